"""Episodes in worker processes: user code that raises, hangs, crashes or lies costs its episode and nothing else."""

import os

import pytest

from ullage.base.errors import ConfigError
from ullage.config.check import problems
from ullage.config.tree import Config
from ullage.environments import Row, Turn
from ullage.environments._pool import EnvironmentPool

COUNTER = """
import os, signal, sys, time
from ullage.environments import Turn

shared = []

class Environment:
    def __init__(self, start=0):
        self.count = start

    def reset(self, row):
        if row.target == "refuse":
            raise ValueError("refused")
        self.row = row
        shared.append(row.target)

    def step(self, action):
        self.count += 1
        if action == "raise": raise KeyError("gone")
        if action == "exit": sys.exit(3)
        if action == "hard exit": os._exit(4)
        if action == "crash": os.kill(os.getpid(), signal.SIGSEGV)
        if action == "hang": time.sleep(60)
        if action == "stop": signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(os.getpid(), signal.SIGSTOP)
        if action == "kill the group": os.killpg(0, signal.SIGKILL)
        if action == "long": return Turn("x" * 2_000_000)
        if action == "text": return "a text"
        if action == "nan": return Turn("x", reward=float("nan"))
        if action == "nothing": return Turn()
        if action == "role": return Turn([{"content": "x"}])
        if action == "number": return Turn(7)
        if action == "print": print("hello"); sys.stdout.flush()
        return Turn(f"{self.row.target} {self.count} {shared}", reward=self.count, done=action == "done")
"""


def row(target="a", seed=0):
    return Row(prompt="p", target=target, source="s", extra={"column": 1}, seed=seed)


def make_pool(tmp_path, source=COUNTER, *, timeout_seconds=20.0, num_workers=1, name=None, **kwargs):
    (tmp_path / "mine.py").write_text(source)
    environment = {"name": name or str(tmp_path / "mine.py"), "kwargs": kwargs}
    reward = {"timeout_seconds": timeout_seconds, "num_workers": num_workers}
    return EnvironmentPool(Config.model_validate({"environment": environment, "reward": reward}))


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    made = make_pool(tmp_path_factory.mktemp("pool"), start=10)
    yield made
    made.close()


def test_every_episode_starts_from_what_the_constructor_left(pool):
    first, second = pool.reset(row("a")), pool.reset(row("b"))
    for episode in (first, first, second):
        pool.step(episode, "go")
    assert pool.collect() == [
        (first, None, None),
        (second, None, None),
        (first, Turn("a 11 ['a']", 11), None),
        (first, Turn("a 12 ['a']", 12), None),
        (second, Turn("b 11 ['b']", 11), None),
    ]
    assert pool.collect() == []


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("raise", "step raised KeyError: 'gone' at mine.py:19"),
        ("exit", "step raised SystemExit: 3 at mine.py:20"),
        ("hard exit", "exited with code 4"),
        ("crash", "killed by signal 11 (Segmentation fault)"),
        ("kill the group", "killed by signal 9 (Killed)"),
        ("long", "returned more than 524288 bytes"),
        ("text", "step returned a value of type str, not a Turn"),
        ("nan", "step returned a number that is none: {'reward': nan}"),
        ("nothing", "step returned neither an observation nor done"),
        ("role", "step returned an observation that is neither text nor messages with role and content"),
        ("number", "step returned an observation that is neither text nor messages with role and content"),
    ],
)
def test_what_goes_wrong_costs_its_episode(pool, action, error):
    lost, other = pool.reset(row("a")), pool.reset(row("b"))
    pool.step(lost, action)
    pool.step(other, "go")
    pool.step(lost, "go")
    assert pool.collect()[2:] == [
        (lost, None, error),
        (other, Turn("b 11 ['b']", 11), None),
        (lost, None, "the episode was lost with its worker"),
    ]
    pool.end(other)
    assert pool.collect() == [(other, None, None)]


def test_a_reset_may_fail(pool):
    episode = pool.reset(row("refuse"))
    assert pool.collect() == [(episode, None, "reset raised ValueError: refused at mine.py:13")]


def test_what_it_prints_is_not_seen(pool, capfd):
    episode = pool.reset(row("a"))
    pool.step(episode, "print")
    pool.step(episode, "done")
    assert pool.collect()[-1] == (episode, Turn("a 12 ['a']", 12, done=True), None)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("action", ["hang", "stop"])
def test_a_call_that_takes_too_long_is_killed(tmp_path, action):
    pool = make_pool(tmp_path, timeout_seconds=0.3)
    try:
        lost, other = pool.reset(row("a")), pool.reset(row("b"))
        pool.step(lost, action)
        pool.step(other, "go")
        assert pool.collect()[2:] == [(lost, None, "timeout after 0.3 s"), (other, Turn("b 1 ['b']", 1), None)]
    finally:
        pool.close()


def test_a_lost_worker_is_replaced(tmp_path):
    source = COUNTER.replace(
        'if action == "raise"',
        'if action == "parent": os.kill(os.getppid(), 9); time.sleep(60)\n        if action == "raise"',
    )
    pool = make_pool(tmp_path, source)
    try:
        first, second = pool.reset(row("a")), pool.reset(row("b"))
        pool.step(first, "parent")
        pool.step(second, "go")
        assert pool.collect()[2:] == [
            (first, None, "killed by signal 9 (Killed)"),
            (second, None, "the episode was lost with its worker"),
        ]
        third = pool.reset(row("c"))
        pool.step(third, "go")
        assert pool.collect() == [(third, None, None), (third, Turn("c 1 ['c']", 1), None)]
    finally:
        pool.close()


def test_several_workers_share_the_episodes(tmp_path):
    pool = make_pool(tmp_path, COUNTER.replace("{shared}", "{os.getppid()}"), num_workers=2)
    try:
        episodes = [pool.reset(row(str(number))) for number in range(4)]
        for episode in episodes:
            pool.step(episode, "go")
        results = pool.collect()[4:]
        assert [turn.observation.split()[:2] for _, turn, _ in results] == [[str(n), "1"] for n in range(4)]
        assert len({turn.observation.split()[2] for _, turn, _ in results}) == 2
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("x = 1", "{} has no class Environment"),
        ("import no_such_thing", "the environment {} cannot be made: it raised ModuleNotFoundError: .*no_such_thing"),
        ("def f(:", "the environment {} cannot be made: it raised SyntaxError"),
        ("class Environment:\n    def __init__(self): raise OSError('no disk')", "it raised OSError: no disk"),
        ("class Environment:\n    def reset(self, row): ...", "{}: class Environment has no step"),
        ("class Environment: ...", "{}: class Environment has no reset and no step"),
        ("import os; os._exit(5)", "the environment {} cannot be loaded: exited with code 5"),
    ],
)
def test_one_that_cannot_be_built_is_refused(tmp_path, source, cause):
    with pytest.raises(ConfigError, match=cause.format(str(tmp_path / "mine.py"))):
        make_pool(tmp_path, source)


def test_arguments_that_it_does_not_take(tmp_path):
    with pytest.raises(ConfigError, match="unexpected keyword argument 'nonsense'") as refused:
        make_pool(tmp_path, nonsense=1)
    assert "environment.kwargs" in refused.value.remedy


@pytest.mark.parametrize(("limits", "expected"), [((64, 4096), 256), ((64, 100), 36), ((64, 64), 1)])
def test_a_pool_says_how_many_episodes_it_can_play_at_once(tmp_path, monkeypatch, limits, expected):
    """By the open files that a process may have; a limit that may be raised is."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, {limits})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    pool = make_pool(tmp_path, num_workers=2)
    try:
        assert pool.max_episodes == 2 * expected
        episodes = [pool.reset(row("a")) for _ in range(min(pool.max_episodes, 80))]
        assert pool.collect() == [(episode, None, None) for episode in episodes]
    finally:
        pool.close()


def test_descriptors_above_a_thousand(tmp_path):
    """As where a library of the environment holds many files; `select` cannot wait for such a descriptor."""
    raised = "files = resource.RLIMIT_NOFILE\nresource.setrlimit(files, (2048, resource.getrlimit(files)[1]))"
    held = "held = [os.open('/dev/null', os.O_RDONLY) for _ in range(1100)]"
    pool = make_pool(tmp_path, f"import os, resource\n{raised}\n{held}\n{COUNTER}")
    try:
        episode = pool.reset(row("a"))
        pool.step(episode, "go")
        assert pool.collect() == [(episode, None, None), (episode, Turn("a 1 ['a']", 1), None)]
    finally:
        pool.close()


def test_an_environment_is_told_the_limit_of_a_call(tmp_path):
    pool = make_pool(tmp_path, COUNTER.replace("{shared}", "{self.row.seconds}"), timeout_seconds=7.5)
    try:
        episode = pool.reset(row("a"))
        pool.step(episode, "go")
        assert pool.collect()[1] == (episode, Turn("a 1 7.5", 1), None)
    finally:
        pool.close()


def test_too_many_episodes_cost_those_that_are_too_many(tmp_path):
    source = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))\n" + COUNTER
    pool = make_pool(tmp_path, source)
    try:
        episodes = [pool.reset(row(str(number))) for number in range(30)]
        errors = [error for _, _, error in pool.collect()]
        begun = errors.index(next(filter(None, errors)))
        assert 5 < begun < 24
        assert set(errors[begun:]) == {"the episode cannot be started: [Errno 24] Too many open files"}
        pool.step(episodes[0], "go")
        assert pool.collect() == [(episodes[0], Turn("0 1 ['0']", 1), None)]
    finally:
        pool.close()


@pytest.mark.parametrize("name", ["tolls", "_pool"])
def test_a_name_is_checked_with_the_config(name):
    (problem,) = problems(Config.model_validate({"environment": {"name": name}}))
    assert (problem.path, problem.value) == ("environment.name", name)
    assert problem.rule.startswith("unknown; known are reasoning_gym, tools, verifiers; or give a dotted module")


@pytest.mark.parametrize(("seconds", "refused"), [(9.9, False), (10, True), (60.0, True)])
def test_a_program_needs_less_time_than_a_call_may_take(seconds, refused):
    environment = {"name": "tools", "kwargs": {"tools": ["python"], "python_seconds": seconds}}
    found = list(problems(Config.model_validate({"environment": environment})))
    assert [(problem.path, problem.value) for problem in found] == (
        [("environment.kwargs.python_seconds", seconds)] if refused else []
    )
    assert all(problem.rule.startswith("must be less than reward.timeout_seconds = 10") for problem in found)
    assert not list(problems(Config.model_validate({"environment": {**environment, "name": "mine.py"}})))


def test_the_python_tool_is_refused_where_no_sandbox_works(tmp_path, monkeypatch):
    """Both made unavailable: no program on the path, and a package that cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['sandlock'] = None\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ConfigError, match="the python tool needs a sandbox, and none works here"):
        make_pool(tmp_path, name="tools", tools=["python"])
