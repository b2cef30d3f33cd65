"""Whatever is wrong with the input: the right exit code, the cause, the remedy, no traceback, nothing left behind."""

import json
import os
import shutil

import pytest
from runs import contents, metrics_of, outcome_of, write_lines


def fails(ullage, arguments, code, runs):
    """The two lines that `ullage train` ends with; it must leave no run behind."""
    outcome = ullage(*arguments)
    assert outcome.code == code, outcome.stderr
    assert outcome.stdout == ""
    assert not list(runs.glob("*")) if runs.is_dir() else True
    error = outcome.stderr.index("ullage: error: ")
    cause, fix, remedy = outcome.stderr[error:].partition("\n  fix: ")
    assert fix
    return cause.removeprefix("ullage: error: "), remedy.rstrip("\n")


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


# --- the config ---


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"trainer.total_training_stepz": 3},
            "trainer.total_training_stepz = 3: unknown key; did you mean trainer.total_training_steps?",
        ),
        ({"data.train_batch_size": "many"}, "data.train_batch_size = 'many': must be a whole number"),
        (
            {"actor_rollout_ref.rollout.name": "vllm"},
            "actor_rollout_ref.rollout.name = 'vllm': this engine comes in a later release; "
            "set actor_rollout_ref.rollout.name=embedded",
        ),
    ],
)
def test_a_wrong_key(ullage, task, runs, change, problem):
    cause, _ = fails(ullage, task.arguments(runs, "bad", **change), 78, runs)
    assert problem in cause


def test_every_problem_at_once(ullage, task, runs):
    wrong = {"trainer.total_training_stepz": 3, "data.train_batch_size": "many"}
    cause, _ = fails(ullage, task.arguments(runs, "bad", **wrong), 78, runs)
    assert "trainer.total_training_stepz" in cause
    assert "data.train_batch_size" in cause


def test_a_key_given_twice_in_the_file(ullage, tmp_path, runs):
    config = tmp_path / "twice.yaml"
    config.write_text(f"trainer:\n  default_local_dir: {runs}\n  seed: 1\n  seed: 2\n")
    cause, _ = fails(ullage, ["train", config], 78, runs)
    assert f"{config}:4" in cause
    assert "seed" in cause


# --- the data ---


def test_a_missing_column(ullage, task, tmp_path, runs):
    data = write_lines(tmp_path / "data.jsonl", [{"text": "1=", "answer": "1"}] * 4)
    cause, remedy = fails(ullage, task.arguments(runs, "bad", data__train_files=data), 65, runs)
    assert f"{data}:1" in cause
    assert cause.endswith("columns found: text, answer")
    assert "data.columns" in remedy


def test_a_broken_line(ullage, task, tmp_path, runs):
    rows = [json.dumps({"prompt": f"{number}=", "answer": str(number)}) for number in range(20)]
    rows[16] = rows[16][:-3]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(rows))
    cause, _ = fails(ullage, task.arguments(runs, "bad", data__train_files=data), 65, runs)
    assert f"{data}:17" in cause


def test_an_empty_data_set(ullage, task, tmp_path, runs):
    data = write_lines(tmp_path / "data.jsonl", [])
    cause, _ = fails(ullage, task.arguments(runs, "bad", data__train_files=data), 65, runs)
    assert cause == f"the data set is empty: {data}"


def test_fewer_rows_than_a_batch(ullage, task, runs):
    cause, remedy = fails(ullage, task.arguments(runs, "bad", data__train_batch_size=15), 65, runs)
    assert cause == "14 prompts do not fill one batch of data.train_batch_size=15"
    assert remedy == "set data.train_batch_size=14 or less, or add data"


def test_all_prompts_too_long(ullage, task, runs):
    cause, remedy = fails(ullage, task.arguments(runs, "bad", data__max_prompt_length=3), 65, runs)
    assert cause == "all 14 prompts are longer than data.max_prompt_length=3; longest 4 tokens"
    assert remedy.startswith("set data.max_prompt_length=4")


# --- the model ---


def test_no_such_model(ullage, task, tmp_path, runs):
    folder = tmp_path / "nowhere"
    cause, remedy = fails(ullage, task.arguments(runs, "bad", actor_rollout_ref__model__path=folder), 66, runs)
    assert cause == f"no such model folder: {folder}"
    assert remedy == "give a model folder, a GGUF file, a Hub id or `smollm2` (actor_rollout_ref.model.path)"


def test_a_model_without_weights(ullage, task, tmp_path, runs, tiny_model):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "model.safetensors").unlink()
    cause, _ = fails(ullage, task.arguments(runs, "bad", actor_rollout_ref__model__path=folder), 66, runs)
    assert cause == f"{folder} has no weights (*.safetensors)"


def test_a_truncated_model(ullage, task, tmp_path, runs, tiny_model):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    cause, remedy = fails(ullage, task.arguments(runs, "bad", actor_rollout_ref__model__path=folder), 66, runs)
    assert cause.startswith(f"{weights} is damaged: ")
    assert remedy == "copy or download the model again"


def test_a_model_that_gives_no_numbers(ullage, task, tmp_path, runs, tiny_model):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    cause, _ = fails(ullage, task.arguments(runs, "bad", actor_rollout_ref__model__path=folder), 70, runs)
    assert "non-finite logits" in cause


# --- the reward ---

PLAIN = "def score(prompt, response, target):\n    "


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (PLAIN + "return {}['key']", "raised KeyError: 'key' at reward.py:2"),
        (PLAIN + "import time; time.sleep(60)", "timeout after 0.2 s in "),
        (PLAIN + "return float('nan')", "returned NaN"),
        (PLAIN + "return None", "returned None"),
        (PLAIN + "import os; os._exit(3)", "exited with code 3"),
        ("def score(prompts, completions, **kwargs):\n    return [1.0, 2.0]", "returned a list of length 2"),
    ],
    ids=["raises", "hangs", "nan", "none", "crashes", "wrong length"],
)
def test_a_reward_that_never_works(ullage, task, tmp_path, runs, body, problem):
    reward = tmp_path / "reward.py"
    reward.write_text(body + "\n")
    small = {"data__train_batch_size": 1, "actor_rollout_ref__rollout__n": 2, "data__val_files": None}
    small["actor_rollout_ref__actor__ppo_mini_batch_size"] = 1
    arguments = task.arguments(runs, "bad", reward=reward, reward__timeout_seconds=0.2, **small)
    cause, remedy = fails(ullage, arguments, 69, runs)
    assert cause.startswith("2 of 2 rewards failed (limit 50 %): first: ")
    assert problem in cause
    assert remedy.startswith("correct the reward function")


def test_a_reward_that_fails_now_and_then_costs_those_samples(ullage, task, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        PLAIN + "if target == '123':\n        raise ValueError('no')\n"
        "    return sum(a == b for a, b in zip(response, target)) / 3\n"
    )
    keys = {"data__shuffle": "false", "data__val_files": None, "trainer__total_training_steps": 2}
    outcome = ullage(*task.arguments(tmp_path, "run", reward=reward, **keys))
    assert outcome.code == 0, outcome.stderr
    assert [row["reward/failed_fraction"] for row in metrics_of(tmp_path / "run")] == [0.25, 0.0]
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples" / "step_1.jsonl").read_text().splitlines()]
    assert [row["reward"] is None for row in rows] == [row["target"] == "123" for row in rows]
    assert all("raised ValueError: no at reward.py:3" in row["reward_error"] for row in rows[:4])


def test_a_reward_that_does_not_load(ullage, task, tmp_path, runs):
    reward = tmp_path / "reward.py"
    reward.write_text("import no_such_package\n")
    cause, _ = fails(ullage, task.arguments(runs, "bad", reward=reward), 78, runs)
    assert "no_such_package" in cause


# --- the disk ---


def test_a_folder_that_cannot_be_written(ullage, task, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cause, remedy = fails(ullage, task.arguments(blocked / "runs", "bad"), 74, tmp_path / "none")
    assert cause == f"cannot write {blocked / 'runs' / 'bad'}: Not a directory"
    assert "trainer.default_local_dir" in remedy


def test_an_existing_run(ullage, task, tmp_path):
    few = {"trainer__total_training_steps": 1}
    assert ullage(*task.arguments(tmp_path, "twice", **few)).code == 0
    before = contents(tmp_path / "twice")
    outcome = ullage(*task.arguments(tmp_path, "twice", **few))
    assert outcome.code == 74
    assert outcome.stderr.splitlines() == [
        f"ullage: error: the run {tmp_path / 'twice'} already exists",
        f"  fix: give another trainer.experiment_name, or continue it: ullage resume {tmp_path / 'twice'}",
    ]
    assert contents(tmp_path / "twice") == before


def test_a_full_disk_leaves_the_last_checkpoint_intact(ullage, task, tmp_path):
    run = tmp_path / "full"
    outcome = ullage(*task.arguments(tmp_path, "full"), changes=["disk_full"])
    assert outcome.code == 74
    assert "ullage: error: disk full, need " in outcome.stderr
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step_1", "step_2"]
    told = outcome_of(run)
    assert (told["code"], told["phase"], told["step"]) == (74, "save", 3)
    assert ullage("resume", run).code == 0
    assert [row["step"] for row in metrics_of(run)] == [0, 1, 2, 3, 4, 5, 6]


# --- the numbers ---


def test_an_update_that_is_not_finite_is_skipped_and_counted(ullage, task, tmp_path):
    keys = {"trainer__total_training_steps": 3, "data__val_files": None}
    outcome = ullage(*task.arguments(tmp_path, "nan", **keys), changes=["nan_loss_once"])
    assert outcome.code == 0, outcome.stderr
    # Two updates a step: the third one is the first of step 2.
    assert [row["actor/skipped_steps"] for row in metrics_of(tmp_path / "nan")] == [0, 0.5, 0]
    state = json.loads((tmp_path / "nan" / "checkpoints" / "step_3" / "state.json").read_text())
    assert state["nonfinite_steps"] == 1


def test_too_many_updates_that_are_not_finite(ullage, task, tmp_path):
    run = tmp_path / "nan"
    outcome = ullage(*task.arguments(tmp_path, "nan", data__val_files=None), changes=["nan_loss_always"])
    assert outcome.code == 70
    assert "ullage: error: 4 updates had a non-finite gradient (norm nan)\n" in outcome.stderr
    told = outcome_of(run)
    assert (told["code"], told["phase"], told["step"]) == (70, "update", 2)


# --- other people's programs ---


def test_a_dead_logger_changes_nothing(ullage, task, tmp_path):
    few = {"trainer__total_training_steps": 2}
    assert ullage(*task.arguments(tmp_path, "without", **few)).code == 0
    (tmp_path / "wandb.py").write_text("raise RuntimeError('no such server')\n")
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    outcome = ullage(*task.arguments(tmp_path, "with", **few, trainer__logger="[console,wandb]"), PYTHONPATH=path)
    assert outcome.code == 0, outcome.stderr
    assert "logger wandb is off, training goes on: RuntimeError: no such server" in outcome.stderr
    assert metrics_of(tmp_path / "with") == metrics_of(tmp_path / "without")


def test_a_bug_is_one_line(ullage, task, tmp_path):
    outcome = ullage(*task.arguments(tmp_path, "bug"), changes=["bug"])
    assert outcome.code == 1
    last = outcome.stderr.splitlines()[-1]
    assert last == (
        "ullage: internal error: ZeroDivisionError: a bug of ours; run again with --debug for the traceback"
    )
    assert outcome_of(tmp_path / "bug")["reason"] == "internal error: ZeroDivisionError: a bug of ours"
