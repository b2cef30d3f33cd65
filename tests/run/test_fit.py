"""A run that does not fit: the levers that are left, and what the allocator held."""

import json
from types import SimpleNamespace

import pytest
import torch

from ullage.base.errors import DoesNotFitError
from ullage.config.settle import plainly
from ullage.config.tree import Config
from ullage.engine.replay import Replays
from ullage.model.target import Target
from ullage.run.fit import capacity, fitting, levers, write_snapshot

CPU = Target("cpu", 0, (0, 0), 8 << 30)
GPU = Target("cuda", 1, (9, 0), 80 << 30)
SEGMENTS = [
    {
        "allocated_size": 5 << 20,
        "total_size": 8 << 20,
        "blocks": [
            {"size": 2 << 20, "state": "active_allocated"},
            {"size": 3 << 20, "state": "active_allocated"},
            {"size": 3 << 20, "state": "inactive"},
        ],
    },
    {"allocated_size": 4 << 20, "total_size": 4 << 20, "blocks": [{"size": 2 << 20, "state": "active_allocated"}] * 2},
]


def given_for(tmp_path, target=CPU, config=None):
    events = []
    return SimpleNamespace(
        config=config or plainly(Config(), target.kind),
        target=target,
        recorder=SimpleNamespace(current_phase="update", current_step=7, event=events.append, events=events),
        probe=SimpleNamespace(highest={"weights": 3 << 30, "kv_cache": 0, "activations": 5 << 29}),
        planned=SimpleNamespace(
            components={"update": {"weights": 3 << 30, "activations": 2 << 30, "slack": 1 << 28}},
            capacity_bytes=8 << 30,
        ),
        directory=SimpleNamespace(metrics=tmp_path / "metrics.jsonl", logs=tmp_path, path=tmp_path),
        replays=Replays(),
    )


def config_of(memory, **model):
    return plainly(Config.model_validate({"memory": memory, "actor_rollout_ref": {"model": model}}), "cuda")


PULLED = {
    "recompute": "full",
    "offload_roles": True,
    "optimizer_state": "host",
    "gradients": "host",
    "activation_offload": "sync",
}


@pytest.mark.parametrize(
    ("config", "phase", "expected"),
    [
        (
            plainly(Config(), "cuda"),
            "update",
            [
                "actor_rollout_ref.rollout.max_num_seqs=32",
                "memory.offload_roles=true",
                "memory.optimizer_state=streamed",
                "memory.gradients=host",
                "memory.activation_offload=async",
                "data.max_response_length (shorter)",
                "actor_rollout_ref.model.lora_rank=16 (in a new run)",
            ],
        ),
        (
            config_of({**PULLED, "replay": False}, lora_rank=8),
            "logprob",
            [
                "memory.replay=true",
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024",
                "actor_rollout_ref.rollout.max_num_seqs=32",
                "data.max_response_length (shorter)",
            ],
        ),
        (
            config_of({**PULLED, "replay": False, "recompute": 0.5}, lora_rank=8),
            "rollout",  # which keeps no activations, and is not cut by the update's budget
            [
                "memory.replay=true",
                "actor_rollout_ref.rollout.max_num_seqs=32",
                "data.max_response_length (shorter)",
            ],
        ),
    ],
)
def test_levers_that_are_not_pulled(config, phase, expected):
    assert levers(config, phase) == expected


def test_out_of_memory_says_what_held_it(tmp_path):
    given = given_for(tmp_path)
    message = "CUDA out of memory. Tried to allocate 2.00 GiB. If reserved but unallocated memory is large try setting"
    with pytest.raises(DoesNotFitError) as caught, fitting(given):
        raise torch.OutOfMemoryError(message)
    assert caught.value.cause.splitlines() == [
        "update does not fit: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "the most that was        held     planned",
        "  weights             3.0 GiB     3.0 GiB",
        "  activations         2.5 GiB     2.0 GiB",
        "  slack                     -   256.0 MiB",
        "  capacity            8.0 GiB     8.0 GiB",
    ]
    assert "resume" not in caught.value.remedy  # there is nothing to resume yet
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(DoesNotFitError) as caught, fitting(given):
        raise MemoryError
    assert caught.value.cause.splitlines()[0] == "update does not fit: MemoryError"
    assert caught.value.remedy.endswith(f"; continue with: ullage resume {tmp_path} KEY=VALUE")


def test_other_errors_pass(tmp_path):
    with pytest.raises(RuntimeError, match="a bug"), fitting(given_for(tmp_path)):
        raise RuntimeError("a bug")


def test_capacity_is_what_the_process_may_use(monkeypatch):
    assert capacity(CPU) == 8 << 30
    monkeypatch.setattr("torch.cuda.memory.get_per_process_memory_fraction", lambda device: 0.25)
    assert capacity(GPU) == 20 << 30


def test_a_snapshot_by_size_of_block(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.memory_snapshot", lambda: SEGMENTS)
    given = given_for(tmp_path, GPU)
    write_snapshot(given, torch.OutOfMemoryError("no more"))
    assert given.recorder.events == []
    assert json.loads((tmp_path / "memory_snapshot.json").read_text()) == {
        "phase": "update",
        "step": 7,
        "message": "no more",
        "allocated_bytes": 9 << 20,
        "reserved_bytes": 12 << 20,
        "blocks": [
            {"bytes": 2 << 20, "state": "active_allocated", "count": 3},
            {"bytes": 3 << 20, "state": "active_allocated", "count": 1},
            {"bytes": 3 << 20, "state": "inactive", "count": 1},
        ],
    }


def test_a_snapshot_that_fails_does_not_hide_the_reason(tmp_path, monkeypatch):
    def broken():
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("torch.cuda.memory_snapshot", broken)
    given = given_for(tmp_path, GPU)
    write_snapshot(given, torch.OutOfMemoryError("no more"))
    assert given.recorder.events == ["no memory snapshot: RuntimeError: the device is gone"]
