"""Faults that no signal at a phase's beginning can make; the fork server puts one into a child before it runs."""

import atexit
import errno
import os
import signal
import sys


def kill_before_publishing():
    _kill_around_publishing(after=False)


def kill_before_latest():
    _kill_around_publishing(after=True)


def _kill_around_publishing(after):
    from ullage.engine import checkpoint

    publish = checkpoint._publish

    def dying(temporary, target):
        if target.name == "step_4":
            if after:
                publish(temporary, target)
            os.kill(os.getpid(), signal.SIGKILL)
        publish(temporary, target)

    checkpoint._publish = dying


def disk_full():
    """From step 3 on, the weights of a checkpoint no longer fit the disk."""
    from ullage.model.language_model import LanguageModel

    save = LanguageModel.save

    def failing(self, folder):
        if "step_3" in str(folder):
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(self, folder)

    LanguageModel.save = failing


def nan_loss_once():
    _nan_loss({3})


def nan_loss_always():
    _nan_loss(range(100))


def _nan_loss(updates):
    """Losses of these updates (counted from 1) are not numbers."""
    from ullage.maths import losses

    surrogate = losses.clipped_surrogate
    count = 0

    def spoilt(*arguments, **options):
        nonlocal count
        count += 1
        loss, clipped = surrogate(*arguments, **options)
        return (loss * float("nan"), clipped) if count in updates else (loss, clipped)

    losses.clipped_surrogate = spoilt


def bug():
    """An exception that nobody foresaw, in the second step."""
    from ullage.trainer.schedule import Schedule

    plan = Schedule.plan

    def failing(self, experience, step):
        if step == 2:
            raise ZeroDivisionError("a bug of ours")
        return plan(self, experience, step)

    Schedule.plan = failing


def fork_ranks():
    """Ranks are forks, too: they need not import torch again."""
    from ullage.run import launch

    launch.subprocess = ForkedRank  # the name the launcher knows the module by


class ForkedRank:
    """As much of `subprocess` as the launcher uses."""

    PIPE = -1

    class Popen:
        def __init__(self, command, *, env, stderr, **pipes_and_session):
            assert pipes_and_session == {"stdin": -1, "stdout": -1, "start_new_session": True}
            input_end, stdin = os.pipe()
            stdout, output_end = os.pipe()
            self.returncode = None
            self.pid = os.fork()
            if self.pid == 0:
                self._become(command, env, (input_end, output_end, 2 if stderr is None else stderr.fileno()))
            os.close(input_end)
            os.close(output_end)
            self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb")

        def _become(self, command, env, streams):
            from ullage.run import rank

            os.setsid()
            for descriptor, stream in enumerate(streams):
                os.dup2(stream, descriptor)
            os.closerange(3, 256)  # above all the ends of other ranks' pipes
            os.environ.update(env)
            sys.argv = command[-2:]
            code = rank.main()
            atexit._run_exitfuncs()
            os._exit(code)

        def poll(self):
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

        def send_signal(self, number):
            os.kill(self.pid, number)

        def kill(self):
            os.kill(self.pid, signal.SIGKILL)
