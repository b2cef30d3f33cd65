"""The reward pool, with real processes and functions that do everything wrong."""

import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy
import psutil
import pytest

from ullage.base.errors import ConfigError, ServiceError
from ullage.config.tree import Reward, RewardFunction
from ullage.rewards.pool import Request, RewardPool, Score, check_budget

SAMPLES = str(Path(__file__).with_name("reward_samples.py"))
WHERE = "score in reward_samples.py"


def pool(*functions, timeout_seconds=20.0, num_workers=2):
    functions = functions or (RewardFunction(path=SAMPLES),)
    return closing(
        RewardPool(Reward(functions=list(functions), timeout_seconds=timeout_seconds, num_workers=num_workers))
    )


def request(response, **changes):
    values = {"prompt": "p", "target": "1", "source": "s", "extra": {}, "response_length": 3} | changes
    return Request(response=response, **values)


def scored(opened, *responses, **changes):
    for response in responses:
        opened.submit(request(response, **changes))
    return opened.collect()


def wait_until_gone(pids):
    """Kernel and init need a moment to bury the dead; nothing survives ten seconds."""
    for _ in range(200):
        left = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        if not left:
            return
        time.sleep(0.05)
    pytest.fail(f"still running: {left}")


def test_scores_in_submit_order_under_random_delays():
    with pool(num_workers=3) as opened:
        scores = scored(opened, *(f"wait {number}" for number in range(60)))
        assert [score.total for score in scores] == [float(number) for number in range(60)]
        assert opened.collect() == []
        assert scored(opened, "number 5") == [Score(5.0, {"reward_samples": 5.0}, None)]


@pytest.mark.parametrize("action", ["hang", "spin", "stop"])
def test_endless_call_costs_its_sample(action):
    with pool(timeout_seconds=0.5, num_workers=1) as opened:
        scores = scored(opened, action, "number 2")
    assert scores == [Score(None, {}, f"timeout after 0.5 s in {WHERE}"), Score(2.0, {"reward_samples": 2.0}, None)]


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("exit 3", f"exited with code 3 in {WHERE}"),
        ("exit 0", f"exited with code 0 in {WHERE}"),
        ("segfault", f"killed by signal 11 (Segmentation fault) in {WHERE}"),
        ("kill", f"killed by signal 9 (Killed) in {WHERE}"),
        ("kill_group", f"killed by signal 9 (Killed) in {WHERE}"),
        ("orphan", f"exited with code 5 in {WHERE}"),
        ("flood", f"returned more than 1048576 bytes in {WHERE}"),
        ("raise 0", f"{WHERE} raised ZeroDivisionError: float division by zero at reward_samples.py:18"),
        ("raise x", f"{WHERE} raised ValueError: could not convert string to float: 'x' at reward_samples.py:18"),
        ("quit 7", f"{WHERE} raised SystemExit: 7 at reward_samples.py:65"),
        ("memory", f"{WHERE} raised MemoryError at reward_samples.py:71"),
        ("number nan", f"{WHERE} returned NaN"),
        ("number inf", f"{WHERE} returned inf"),
        ("none", f"{WHERE} returned None"),
        ("text 0.5", f"{WHERE} returned the str '0.5'"),
        ("list", f"{WHERE} returned a list of length 2"),
    ],
)
def test_failure_costs_its_sample_and_is_named(action, error):
    with pool(num_workers=1) as opened:
        scores = scored(opened, action, "number 2")
    assert scores == [Score(None, {}, error), Score(2.0, {"reward_samples": 2.0}, None)]


def test_closed_pipe_costs_its_sample():
    with pool(timeout_seconds=2.0, num_workers=1) as opened:
        broken, following = scored(opened, "close", "number 2")
    assert broken.total is None
    assert following.total == 2.0


def test_raise_keeps_the_worker_and_exit_replaces_it():
    with pool(num_workers=1) as opened:
        pids = [scored(opened, "pid")[0].total]
        scored(opened, "raise 0")
        pids.append(scored(opened, "pid")[0].total)
        scored(opened, "exit 3")
        pids.append(scored(opened, "pid")[0].total)
    assert pids[0] == pids[1] != pids[2]


def test_pool_is_not_exhausted_by_a_hundred_crashes():
    with pool() as opened:
        scores = scored(opened, *["exit 3"] * 100, *["number 1"] * 10)
    assert [score.total for score in scores] == [None] * 100 + [1.0] * 10


def test_output_never_reaches_the_protocol_or_the_terminal(capfd):
    with pool(num_workers=1) as opened:
        assert scored(opened, "shout 5000000", "number 2", "read")[0].total == 1.0
        assert [score.total for score in scored(opened, "number 2", "read")] == [2.0, 0.0]
    assert capfd.readouterr() == ("", "")


def test_numbers_of_other_libraries():
    with pool(num_workers=1) as opened:
        assert scored(opened, "numpy 0.5")[0] == Score(0.5, {"reward_samples": 0.5}, None)


def test_functions_get_fresh_arguments():
    twice = [RewardFunction(path=SAMPLES), RewardFunction(path=SAMPLES)]
    values = {"prompt": [{"role": "user", "content": "hi"}], "target": [1, 2], "extra": {"nested": {"key": [1]}}}
    with pool(*twice, num_workers=1) as opened:
        scores = scored(opened, "change", "change", **values)
    assert scores == [Score(2.0, {"reward_samples": 1.0, "reward_samples_2": 1.0}, None)] * 2
    assert values["extra"] == {"nested": {"key": [1]}}


def test_rows_may_hold_numpy_values_but_nothing_unknown():
    with pool(num_workers=1) as opened:
        fine, odd = (
            scored(opened, "number 1", target=numpy.arange(2), extra=extra)[0]
            for extra in ({"level": numpy.int64(3)}, {"image": object()})
        )
    assert fine.total == 1.0
    assert odd.error == "the row cannot be handed to a reward function: a value of type object is not JSON"


@pytest.mark.parametrize("group", ["attached", "detached"])
def test_child_of_a_reward_dies_with_the_pool(group):
    with pool(num_workers=1) as opened:
        child = int(scored(opened, f"child {group}")[0].total)
        assert psutil.pid_exists(child)
    assert not psutil.pid_exists(child)


def test_child_of_a_reward_dies_with_its_worker():
    with pool(num_workers=1) as opened:
        child = int(scored(opened, "child detached")[0].total)
        assert scored(opened, "exit 3")[0].total is None
        assert not psutil.pid_exists(child)


def test_nothing_is_left_after_close():
    before = psutil.Process().children(recursive=True)
    with pool(timeout_seconds=0.3, num_workers=3) as opened:
        scored(opened, "hang", "segfault", "child attached", "number 1", "exit 1", "orphan")
        opened.submit(request("hang"))
    assert psutil.Process().children(recursive=True) == before


PROGRAM = f"""
import sys, time
from ullage.config.tree import Reward, RewardFunction
from ullage.rewards.pool import Request, RewardPool
pool = RewardPool(Reward(functions=[RewardFunction(path={SAMPLES!r})], num_workers=1, timeout_seconds=60.0))
def submit(response):
    pool.submit(Request(prompt="", response=response, target="", source="", extra={{}}, response_length=0))
submit("pid"); submit("child detached"); submit("child attached")
for score in pool.collect():
    print(int(score.total))
submit("spin")
time.sleep(0.2)
print("ready", flush=True)
"""


@pytest.mark.parametrize(
    "ending", ["", "raise SystemExit(3)", "raise KeyboardInterrupt", "import os; os._exit(3)", "time.sleep(60)"]
)
def test_nothing_outlives_the_run_however_it_ends(ending):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM + ending], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        lines = [run.stdout.readline().strip() for _ in range(4)]
        assert lines[3] == "ready"
        if "sleep" in ending:
            run.send_signal(signal.SIGKILL)
    wait_until_gone([int(pid) for pid in lines[:3]])


def test_notice_to_the_whole_job_leaves_the_workers_to_the_run():
    before = psutil.Process().children(recursive=True)  # other tests' processes are none of our business
    with pool(num_workers=1) as opened:
        pid = scored(opened, "pid")[0].total
        for process in [child for child in psutil.Process().children(recursive=True) if child not in before]:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
        assert scored(opened, "pid")[0].total == pid


def test_weighted_sum_of_several_functions(tmp_path):
    (tmp_path / "verl_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 0.5, 'acc': True, 'pred': solution_str}\n"
    )
    (tmp_path / "trl_reward.py").write_text(
        "async def brevity(completions, **kwargs): return [-2.0] * len(completions)"
    )
    functions = [
        RewardFunction(name="gsm8k", weight=2.0),
        RewardFunction(path=str(tmp_path / "verl_reward.py"), weight=-1.0),
        RewardFunction(path=str(tmp_path / "trl_reward.py"), name="brevity", weight=0.25),
        RewardFunction(name="length", kwargs={"max_length": 4, "buffer": 2}),
    ]
    with pool(*functions) as opened:
        scores = scored(opened, "It is 18.", target="18")
        assert opened.descriptions == [
            "gsm8k: built in, plain signature (prompt, response, target, method, **), weight 2",
            "verl_reward: compute_score in verl_reward.py, verl signature "
            "(data_source, solution_str, ground_truth, extra_info), weight -1",
            "brevity: brevity in trl_reward.py, TRL signature (completions, **), weight 0.25",
            "length: built in, plain signature (prompt, response, target, max_length, min_length, buffer, unit, "
            "response_length, **)",
        ]
    parts = {"gsm8k": 1.0, "verl_reward": 0.5, "verl_reward/acc": 1.0, "brevity": -2.0, "length": -0.5}
    assert scores == [Score(2.0 * 1.0 - 0.5 + 0.25 * -2.0 - 0.5, parts, None, "18")]


def test_the_answer_is_that_of_the_first_function_that_tells_one(tmp_path):
    (tmp_path / "verl_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 0.5, 'pred': solution_str[-1:]}\n"
    )
    verl = RewardFunction(path=str(tmp_path / "verl_reward.py"))
    with pool(RewardFunction(name="format"), verl, RewardFunction(name="gsm8k"), num_workers=1) as opened:
        assert [score.answer for score in scored(opened, "It is 18!", "", target="18")] == ["!", ""]
    with pool(RewardFunction(name="format"), num_workers=1) as opened:
        assert scored(opened, "x") == [Score(0.0, {"format": 0.0}, None, None)]


def test_trl_none_means_that_the_function_does_not_apply(tmp_path):
    path = tmp_path / "only_math.py"
    path.write_text("def only_math(completions, source, **kwargs): return [1.0 if source[0] == 'math' else None]")
    with pool(RewardFunction(path=str(path)), RewardFunction(name="format")) as opened:
        assert scored(opened, "x", source="math")[0] == Score(1.0, {"only_math": 1.0, "format": 0.0}, None)
        assert scored(opened, "x", source="code")[0] == Score(0.0, {"format": 0.0}, None)
    with pool(RewardFunction(path=str(path))) as opened:
        assert scored(opened, "x", source="code")[0].error == "only_math in only_math.py returned None"


def test_a_function_scores_only_its_own_sources(tmp_path):
    """The others are not even called: the first fails on anything but numbers."""
    (tmp_path / "whole.py").write_text("def score(response, target): return float(int(response) == int(target))")
    functions = [
        RewardFunction(path=str(tmp_path / "whole.py"), sources=["sums", "products"], weight=2.0),
        RewardFunction(name="format", kwargs={"pattern": "[a-z]+"}, sources=["words"], weight=3.0),
        RewardFunction(name="length", kwargs={"max_length": 4, "buffer": 2}),
    ]
    with pool(*functions, num_workers=1) as opened:
        assert scored(opened, "7", target="7", source="sums") == [Score(2 - 0.5, {"whole": 1.0, "length": -0.5}, None)]
        assert scored(opened, "x", target="x", source="words") == [
            Score(3 - 0.5, {"format": 1.0, "length": -0.5}, None)
        ]
        assert scored(opened, "x", target="7", source="sums")[0].error.startswith("score in whole.py raised ValueError")
        assert scored(opened, "x", source="other") == [Score(-0.5, {"length": -0.5}, None)]
        assert [line.partition("), ")[2] for line in opened.descriptions] == [
            "weight 2, for sums and products", "weight 3, for words", ""
        ]  # fmt: skip


def test_what_no_function_scores_is_left_to_others():
    with pool(RewardFunction(name="gsm8k", sources=["sums"]), num_workers=1) as opened:
        opened.submit(request("18", target="18", source="chat"))
        opened.submit(request("18", target="18", source="sums"))
        assert opened.collect() == [Score(0.0, {}, None), Score(1.0, {"gsm8k": 1.0}, None, "18")]


def test_a_lost_worker_is_blamed_on_the_function_that_was_asked(tmp_path):
    path = tmp_path / "fatal.py"
    path.write_text("import os\ndef score(response): os._exit(4)")
    functions = [RewardFunction(name="format", sources=["words"]), RewardFunction(path=str(path), sources=["sums"])]
    with pool(*functions, num_workers=1) as opened:
        lost, fine = (scored(opened, "x", source=source)[0] for source in ("sums", "words"))
    assert lost == Score(None, {}, "exited with code 4 in score in fatal.py")
    assert fine == Score(0.0, {"format": 0.0}, None)


def test_file_may_import_its_neighbours_but_cannot_hide_an_installed_module(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 0.75")
    (tmp_path / "decimal.py").write_text("raise RuntimeError('hidden')")
    (tmp_path / "mine.py").write_text(
        "import decimal\nfrom neighbour_of_reward import VALUE\ndef score(response): return VALUE\n"
    )
    with pool(RewardFunction(path=str(tmp_path / "mine.py"))) as opened:
        assert scored(opened, "x")[0].total == 0.75


def test_problems_of_all_functions_are_reported_at_once(tmp_path):
    (tmp_path / "broken.py").write_text("def f(")
    functions = [RewardFunction(name="gsm8"), RewardFunction(path=str(tmp_path / "broken.py"))]
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ConfigError, match=r"no reward called 'gsm8'\n.*broken.py cannot be imported"):
        RewardPool(Reward(functions=functions))
    assert psutil.Process().children(recursive=True) == before


def test_file_that_ends_the_process_at_import(tmp_path):
    (tmp_path / "broken.py").write_text("import os\nos._exit(9)")
    with pytest.raises(ConfigError, match="cannot be loaded: exited with code 9"):
        RewardPool(Reward(functions=[RewardFunction(path=str(tmp_path / "broken.py"))]))


def test_file_that_hangs_at_import(tmp_path, monkeypatch):
    monkeypatch.setattr("ullage.rewards.pool.LOAD_SECONDS", 0.5)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)")
    with pytest.raises(ConfigError, match=r"cannot be loaded: timeout after 0.5 s"):
        RewardPool(Reward(functions=[RewardFunction(path=str(tmp_path / "slow.py"))]))


def test_file_that_breaks_after_the_start_costs_samples(tmp_path):
    path = tmp_path / "fragile.py"
    path.write_text("import os\ndef score(response): os._exit(1)")
    with pool(RewardFunction(path=str(path)), num_workers=1) as opened:
        path.write_text("def score(")
        scores = scored(opened, "a", "b")
    assert scores[0].error == "exited with code 1 in score in fragile.py"
    assert scores[1].error.startswith("the reward functions no longer load: the reward file ")


def test_no_functions_is_an_error():
    with pytest.raises(ConfigError, match=r"reward\.functions is empty"):
        RewardPool(Reward())


def test_budget():
    good, bad = Score(1.0, {}, None), Score(None, {}, "score in my_reward.py returned NaN")
    check_budget([], 0.0)
    check_budget([good, bad], 0.5)
    check_budget([bad, bad], 1.0)
    with pytest.raises(ServiceError) as caught:
        check_budget([good, bad, bad], 0.5)
    assert caught.value.cause == "2 of 3 rewards failed (limit 50 %): first: score in my_reward.py returned NaN"
    assert caught.value.code == 69
    assert caught.value.remedy == (
        "correct the reward function, or give it more reward.timeout_seconds, or raise reward.max_failure_fraction"
    )
    lost = Score(None, {}, "environment game: step raised KeyError", remedy="correct the environment")
    with pytest.raises(ServiceError) as caught:
        check_budget([good, lost, bad], 0.5)
    assert caught.value.remedy == "correct the environment, or raise reward.max_failure_fraction"
    with pytest.raises(ServiceError, match="1 of 3"):
        check_budget([good, good, bad], 0.0)
