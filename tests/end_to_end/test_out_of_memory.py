"""Memory that runs out, wherever it does: the run goes on with the same samples and weights, or says what would fit."""

import json
import re

import pytest
from runs import assert_same_run, metrics_of, outcome_of, samples_of
from safetensors.torch import load_file

# A step has two mini-batches of two prompts: each is two passes of a prompt and its eight answers (4 + 8 * 2 tokens).
KEYS = {
    "algorithm": "ppo",
    "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 24,
    "actor_rollout_ref__actor__optim__lr": 1e-5,
    "actor_rollout_ref__actor__optim__lr_scheduler_type": "constant",
    "actor_rollout_ref__rollout__n": 8,
    "critic__optim__lr": 1e-5,
    "trainer__total_training_steps": 2,
    "trainer__test_freq": 1,
}


def train(ullage, task, runs, *, name="run", fault=None, changes=(), **keys):
    outcome = ullage(*task.arguments(runs, name, **{**KEYS, **keys}), fault=fault, changes=changes)
    return runs / name, outcome


def out_of_memory(*places, step=2, **options):
    """A fault for each `phase` and number of pass; a pass with a minus sign fails in its backward half."""
    rest = "".join(f",{name}={value}" for name, value in options.items())
    return ";".join(
        f"step={step},phase={phase},kind=oom,at={abs(at)},half={'backward' if at < 0 else 'forward'}{rest}"
        for phase, at in places
    )


def replays_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row.get("memory/replays") for row in rows]


def events_of(run):
    return (run / "logs" / "events.log").read_text().splitlines()


def assert_close(run, other):
    """The same samples; weights and metrics as far as the order of sums allows."""
    assert samples_of(run) == samples_of(other)
    for row, expected in zip(metrics_of(run), metrics_of(other), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-7)
    for file in ("model/model.safetensors", "critic.safetensors"):
        weights, expected = (load_file(each / "checkpoints" / "step_2" / file) for each in (run, other))
        assert max(float((weights[name] - expected[name]).abs().max()) for name in expected) <= 1e-6


@pytest.fixture(scope="module")
def undisturbed(ullage, task, tmp_path_factory):
    run, outcome = train(ullage, task, tmp_path_factory.mktemp("undisturbed"))
    assert outcome.code == 0, outcome.stderr
    assert replays_of(run) == [None, 0, 0]
    return run


# Of rollout and evaluation the first pass is the prefill, the others are tokens.
FIRST = (
    ("rollout", 1),
    ("logprob", 1),
    ("reference", 2),
    ("values", 3),
    ("update", 2),
    ("update_critic", 1),
    ("eval", 1),
)
LATER = ("rollout", 3), ("logprob", 3), ("reference", 4), ("values", 4), ("update", -2), ("update_critic", -2)


@pytest.mark.invariant
@pytest.mark.parametrize("places", [(*FIRST, ("eval", 1)), LATER])
def test_repeated_at_the_same_budget(ullage, task, tmp_path, undisturbed, places):
    run, outcome = train(ullage, task, tmp_path, fault=out_of_memory(*places, factor=1))
    assert outcome.code == 0, outcome.stderr
    assert replays_of(run) == [None, 0, len(places)]
    assert_same_run(run, undisturbed, step=2)


@pytest.mark.invariant
def test_repeated_at_half_the_budget(ullage, task, tmp_path, undisturbed):
    run, outcome = train(ullage, task, tmp_path, fault=out_of_memory(*LATER, step=1))
    assert outcome.code == 0, outcome.stderr
    done = "ran out of memory: repeated, and from now on done, in passes of"
    key = "to begin with that, set actor_rollout_ref"
    assert [line.split("step 1: ")[1] for line in events_of(run) if done in line] == [
        f"rollout {done} 8 instead of 16384 tokens and 16 instead of 32 sequences; {key}.rollout.max_num_seqs=16",
        f"logprob {done} 12 instead of 24 tokens; {key}.actor.ppo_max_token_len_per_gpu=12",
        f"reference {done} 12 instead of 24 tokens; {key}.ref.log_prob_max_token_len_per_gpu=12",
        f"values {done} 12 instead of 24 tokens; to begin with that, set critic.ppo_max_token_len_per_gpu=12",
        # No key may be below the 11 tokens that a sequence can have.
        f"update {done} 6 instead of 12 tokens; {key}.actor.ppo_max_token_len_per_gpu=11",
        f"update_critic {done} 6 instead of 12 tokens; to begin with that, set critic.ppo_max_token_len_per_gpu=11",
    ]
    assert replays_of(run) == [None, 6, 0]
    assert_close(run, undisturbed)


def test_a_rank_repeats_its_part_alone(ullage, task, tmp_path, undisturbed):
    fault = out_of_memory(("rollout", 2), ("update", -1), rank=1, step=1)
    run, outcome = train(ullage, task, tmp_path, fault=fault, changes=["fork_ranks"], trainer__n_gpus_per_node=2)
    assert outcome.code == 0, outcome.stderr
    assert [line.split(": ")[1:3] for line in events_of(run) if "ran out" in line] == [
        ["rank 1", "rollout ran out of memory"],
        ["rank 1", "update ran out of memory"],
    ]
    assert replays_of(run) == [None, 2, 0]
    assert_close(run, undisturbed)


def test_nothing_left_to_halve(ullage, task, tmp_path, undisturbed):
    run, outcome = train(ullage, task, tmp_path, fault=out_of_memory(("update", 2), times=99))
    assert outcome.code == 79
    cause, rest = outcome.stderr.split("ullage: error: ")[1].split("\n", 1)
    assert cause == "update does not fit: injected by a test"
    assert rest.splitlines()[0].split() == ["the", "most", "that", "was", "held", "planned"]
    table = [re.split(r"\s\s+", line.strip()) for line in rest.splitlines()[1:-1]]
    assert [name for name, held, _ in table if held != "-"] == [
        "context", "weights", "gradients", "optimizer", "activations", "capacity"
    ]  # fmt: skip
    rows = {name: held for name, held, _ in table}
    sizes = [tensor.nbytes for tensor in load_file(run / "checkpoints/step_1/model/model.safetensors").values()]
    assert rows["gradients"] == f"{2 * sum(sizes) / 2**20:.1f} MiB"  # of actor and critic, which has a small head more
    assert [planned for name, _, planned in table if name == "gradients"] == [rows["gradients"]]
    assert rest.splitlines()[-1] == (
        "  fix: set one or more of: actor_rollout_ref.rollout.max_num_seqs=32, memory.recompute=full, "
        "memory.offload_roles=true, memory.optimizer_state=streamed, memory.gradients=host, "
        "memory.activation_offload=async, data.max_response_length (shorter), "
        f"actor_rollout_ref.model.lora_rank=16 (in a new run); continue with: ullage resume {run} KEY=VALUE"
    )
    told = outcome_of(run)
    assert (told["code"], told["phase"], told["step"]) == (79, "update", 2)
    assert told["resume_command"] == f"ullage resume {run}"
    resumed = ullage("resume", run)
    assert resumed.code == 0, resumed.stderr
    assert_same_run(run, undisturbed, step=2)


def test_without_replay_the_first_time_is_the_last(ullage, task, tmp_path):
    run, outcome = train(ullage, task, tmp_path, fault=out_of_memory(("logprob", 1)), memory__replay="false")
    assert outcome.code == 79
    assert "ullage: error: logprob does not fit: injected by a test\n" in outcome.stderr
    assert "fix: set one or more of: memory.replay=true, actor_rollout_ref.actor.ppo_max_token_len_per_gpu=11" in (
        outcome.stderr
    )
    assert not [line for line in events_of(run) if "ran out" in line]
