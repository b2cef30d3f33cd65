"""The command line as a user meets it: real processes for streams, codes and imports; `main` for the rest."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ullage import __version__
from ullage.base.errors import DataError
from ullage.base.extensions import load_file
from ullage.cli import init, ls, main
from ullage.config.load import load_config
from ullage.telemetry.run_directory import RunDirectory, RunInfo
from ullage.telemetry.writer import MetricsWriter

SOURCE = Path(__file__).parents[2] / "src"


def ullage(*words, cwd=None, **extra):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), **extra}
    return subprocess.run(
        [sys.executable, "-m", "ullage", *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def runs(tmp_path):
    directory = RunDirectory(tmp_path / "runs", "brave-otter")
    directory.create()
    directory.write_info(
        RunInfo(name="brave-otter", algorithm="grpo", model="models/SmolLM2", total_steps=6, created_at=1.0)
    )
    writer = MetricsWriter(directory)
    writer.step(3, {"reward/mean": 0.5, "eval/sums/mean@4": 0.75})
    writer.exit(75, "preempted", "update", 3, f"ullage resume {directory.path}")
    writer.close()
    directory.close()
    return tmp_path / "runs"


class FakeVerb:
    """Stands in for a verb's module: does what the test says."""

    def __init__(self, action):
        self.action = action

    def add_arguments(self, parser):
        parser.add_argument("config", nargs="?")
        parser.add_argument("--json", action="store_true")

    def run(self, arguments, overrides):
        return self.action(arguments, overrides)


@pytest.fixture
def fake(monkeypatch):
    """Makes `ullage train` run a function."""

    def install(action):
        monkeypatch.setattr(main, "available_verbs", lambda: list(main.VERBS))
        monkeypatch.setattr(main, "import_module", lambda name: FakeVerb(action))

    return install


def raising(error):
    def action(arguments, overrides):
        raise error

    return action


@pytest.mark.parametrize("words", [["--help"], ["ls", "--help"], ["ls"], ["init"], ["--version"]])
def test_light_verbs_import_neither_torch_nor_other_heavy_parts(words, tmp_path):
    script = (
        "import sys\nfrom ullage.cli.main import main\ncode = main(sys.argv[1:])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'rich', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "sys.stderr.write(f'{code} {sorted(heavy)}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.splitlines()[-1].endswith("0 []")


def test_help_lists_every_verb_there_is_with_its_line():
    done = ullage("--help")
    assert done.returncode == 0
    for verb in main.available_verbs():
        assert f"    {verb:<10}{main.VERBS[verb].help.split()[0]}" in done.stdout


@pytest.mark.parametrize("verb", main.available_verbs())
def test_the_table_and_the_modules_agree(verb):
    module = importlib.import_module(f"ullage.cli.{verb}")
    table = main.VERBS[verb]
    assert table.help == module.HELP
    assert callable(module.add_arguments)
    assert callable(module.run)


def test_no_verb_prints_the_help():
    done = ullage()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ullage")


def test_version():
    assert ullage("--version").stdout == f"ullage {__version__}\n"


def test_a_mistyped_verb_is_a_usage_error_with_the_nearest():
    done = ullage("inti")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ullage: error: no verb 'inti'\n  fix: did you mean init?\n"


@pytest.mark.parametrize(
    "words", [["ls", "--nope"], ["ls", "extra"], ["init", "nonsense"], ["--nope"], ["ls", "--ro", "x"]]
)
def test_a_wrong_line_is_a_usage_error_in_two_lines(words, capsys):
    assert main.main(words) == 2
    cause, remedy = capsys.readouterr().err.splitlines()
    assert cause.startswith("ullage: error: ")
    assert remedy.startswith("  fix: see ullage")


@pytest.mark.parametrize("word", ["trainer.seed=3", "--trainer.seed", "--trainer.seed=3"])
def test_a_verb_without_overrides_refuses_them(word, capsys):
    assert main.main(["ls", word]) == 2
    cause, remedy = capsys.readouterr().err.splitlines()
    assert cause == f"ullage: error: ls takes no config overrides: {word}"
    assert remedy == "  fix: see ullage ls --help"


def test_overrides_reach_the_verb_in_either_form(fake):
    seen = []
    fake(lambda arguments, overrides: seen.append((arguments.config, overrides)) or 7)
    assert main.main(["train", "run.yaml", "trainer.seed=3", "--data.train_batch_size", "8"]) == 7
    assert seen == [("run.yaml", ["trainer.seed=3", "data.train_batch_size=8"])]


def test_an_expected_error_is_a_cause_and_a_remedy(fake, capsys):
    fake(raising(DataError("line 17 is broken \x1b[31m", "mend it")))
    assert main.main(["train"]) == 65
    assert capsys.readouterr() == ("", "ullage: error: line 17 is broken \n  fix: mend it\n")


def test_an_expected_error_as_json(fake, capsys):
    fake(raising(DataError("line 17 is broken", "mend it")))
    assert main.main(["train", "--json"]) == 65
    out, err = capsys.readouterr()
    assert json.loads(out) == {"code": 65, "message": "line 17 is broken", "hint": "mend it"}
    assert err == ""


def test_a_traceback_only_with_debug(fake, capsys):
    fake(raising(DataError("broken")))
    assert main.main(["train", "--debug"]) == 65
    assert "Traceback" in capsys.readouterr().err
    fake(raising(ZeroDivisionError("by zero")))
    assert main.main(["train"]) == 1
    text = capsys.readouterr().err
    assert text == "ullage: internal error: ZeroDivisionError: by zero; run again with --debug for the traceback\n"
    assert main.main(["--debug", "train"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_is_130(fake, capsys):
    fake(raising(KeyboardInterrupt()))
    assert main.main(["train"]) == 130
    assert capsys.readouterr().err == "ullage: error: interrupted\n"


def test_a_broken_pipe_that_is_not_stdout_is_a_bug(fake, capfd):
    fake(raising(BrokenPipeError("a worker's")))
    assert main.main(["train"]) == 1
    assert "internal error: BrokenPipeError" in capfd.readouterr().err


def test_a_reader_that_leaves_is_no_error(runs):
    """`ullage ls --json | head -c0`: the pipe is closed before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ullage", "ls", "--root", str(runs), "--json"],
            stdout=writing,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            timeout=60,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_closed_streams_are_no_error(runs):
    command = f'"{sys.executable}" -m ullage ls --root "{runs}" >&- 2>&-'
    done = subprocess.run(["sh", "-c", command], env={**os.environ, "PYTHONPATH": str(SOURCE)}, timeout=60)
    assert done.returncode == 0


def test_ls_prints_a_table(runs):
    os.utime(runs / "brave-otter", (1, 1))
    done = ullage("ls", cwd=runs.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "name         state        step  reward  best eval   algorithm  model    age",
        "brave-otter  interrupted  3/6   0.500   0.750 at 3  grpo       SmolLM2  now",
    ]


def test_ls_json_has_a_stable_schema(runs):
    [row] = json.loads(ullage("ls", "--root", str(runs), "--json").stdout)
    assert row.pop("updated_at") > 1e9
    assert row == {
        "name": "brave-otter",
        "path": str(runs / "brave-otter"),
        "state": "interrupted",
        "step": 3,
        "total_steps": 6,
        "reward": 0.5,
        "best_evaluation": 0.75,
        "best_evaluation_step": 3,
        "model": "models/SmolLM2",
        "algorithm": "grpo",
        "created_at": 1.0,
        "reason": "preempted",
        "resume_command": f"ullage resume {runs / 'brave-otter'}",
    }


def test_ls_without_runs_says_what_to_do(tmp_path):
    done = ullage("ls", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "no runs in runs/ yet; start one with `ullage demo` or `ullage train`\n"
    assert ullage("ls", "--json", cwd=tmp_path).stdout == "[]\n"
    assert ullage("ls", "--root", "nowhere", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize(("seconds", "text"), [(-5, "now"), (59, "now"), (60, "1 min"), (7300, "2 h"), (200000, "2 d")])
def test_ages(seconds, text):
    assert ls.age_text(seconds) == text


def test_init_prints_a_config_that_loads(tmp_path):
    done = ullage("init")
    assert (done.returncode, done.stderr) == (0, "")
    path = tmp_path / "run.yaml"
    path.write_text(done.stdout)
    assert load_config(path).config.algorithm.name == "grpo"


def test_init_writes_once_and_never_over_a_file(tmp_path):
    first = ullage("init", "grpo", "--out", "run.yaml", cwd=tmp_path)
    assert (first.returncode, first.stdout) == (0, "")
    assert first.stderr == "wrote run.yaml; next: edit it, then `ullage train run.yaml`\n"
    (tmp_path / "run.yaml").write_text("mine")
    second = ullage("init", "--out", "run.yaml", "--with-reward", "reward.py", cwd=tmp_path)
    assert second.returncode == 74
    assert second.stderr.splitlines()[0] == "ullage: error: run.yaml already exists"
    assert (tmp_path / "run.yaml").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
    assert ullage("init", "--out", "no/such/run.yaml", cwd=tmp_path).returncode == 74


def test_init_with_a_reward_writes_a_function_that_the_config_uses(tmp_path):
    done = ullage("init", "--out", "run.yaml", "--with-reward", "my reward's.py", cwd=tmp_path)
    assert done.returncode == 0
    [function] = load_config(tmp_path / "run.yaml").config.reward.functions
    assert function.name == "score"
    assert Path(function.path).name == "my reward's.py"
    module = load_file(tmp_path / "my reward's.py")
    scores = [module.score("p", response, "1200") for response in ("so 1,200.", "7 then 1200", "1200 or 7", "none")]
    assert scores == [1.0, 1.0, 0.0, 0.0]
    assert ullage("init", "--with-reward", "reward.txt", cwd=tmp_path).returncode == 2


def test_only_the_reward_section_is_replaced():
    template = "a: 1\nreward:\n  functions:\n    - x\n\n  # inside\n\n# about b\nb:\n  reward: 2\n"
    section = "reward:\n  functions:\n    - path: 'r.py'  # your file\n      name: score\n\n"
    assert init.with_reward(template, Path("r.py")) == f"a: 1\n{section}# about b\nb:\n  reward: 2\n"
    assert init.with_reward("a: 1\n", Path("r.py")) == f"a: 1\n\n{section}"
