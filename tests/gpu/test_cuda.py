"""The same program on a CUDA device: packed varlen attention, the paged engine, a training run. Run: make gpu."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ullage.batch.pack import Limits
from ullage.bench.fit import Phases
from ullage.bench.shapes import shape_config
from ullage.cli.main import main
from ullage.config.load import load_mapping
from ullage.config.settle import open_keys, plain, settled
from ullage.data.prompts import Prompt
from ullage.model.language_model import LanguageModel
from ullage.model.load import load_model
from ullage.model.target import find_target
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sample, Sampling
from ullage.run.rehearsal import Rehearsal
from ullage.trainer.collect import to_rollouts
from ullage.workers.passes import micro_batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [tuple(range(5, 5 + length)) for length in (3, 16, 17, 24)]


def sample(model: LanguageModel) -> list[Sample]:
    engine = Engine(model, slots=6, max_length=64)
    requests = [GroupRequest(prompt=p, seeds=(1, 2, 3)) for p in PROMPTS]
    return engine.generate(requests, Sampling(max_tokens=12, ignore_eos=True))


def logprobs(model: LanguageModel, samples: list[Sample], *, share: bool, max_tokens: int) -> torch.Tensor:
    prompts = [
        Prompt(id=i, token_ids=ids, prompt="", target=None, source="", extra={}) for i, ids in enumerate(PROMPTS)
    ]
    stage = to_rollouts(prompts, list(range(len(prompts))), samples)
    out = torch.zeros(stage.mask_NT.shape)
    with torch.no_grad():
        for packed, _ in micro_batches(stage, model, Limits(max_tokens=max_tokens, share_prefix=share)):
            values, _ = model.logprobs(packed, temperature=1.0)
            out[packed.samples] = packed.scatter(values, out.shape[1]).float().cpu()
    return out


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_varlen_packing_equals_one_by_one(tiny_architecture, architecture):
    model = load_model(str(tiny_architecture(architecture)), find_target("cuda", 0), dtype="bfloat16")
    samples = sample(model)
    packed = logprobs(model, samples, share=False, max_tokens=4096)
    alone = logprobs(model, samples, share=False, max_tokens=36)
    rollout = torch.tensor([s.logprobs for s in samples])
    # bf16 has 8 bits: a log-prob near -3.5 moves by a few thousandths when kernels round differently.
    assert (packed - alone).abs().max() < 0.03
    assert (packed - rollout).abs().max() < 0.06
    assert (packed - rollout).abs().mean() < 0.006


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_float32_agrees_with_the_cpu(tiny_architecture, architecture):
    path = str(tiny_architecture(architecture))
    cuda = load_model(path, find_target("cuda", 0), dtype="float32")
    samples = sample(cuda)
    shared = logprobs(cuda, samples, share=True, max_tokens=4096)
    on_cpu = logprobs(load_model(path, find_target("cpu", 0), dtype="float32"), samples, share=False, max_tokens=4096)
    assert (shared - on_cpu).abs().max() < 2e-5
    assert (shared - torch.tensor([s.logprobs for s in samples])).abs().max() < 2e-5


@pytest.mark.parametrize("recompute", ["none", "matmuls", "full"])
def test_micro_batches_are_launched_without_waiting_for_the_device(recompute):
    """A host that waits builds the next one while the device has nothing to do."""
    given = {
        "algorithm.name": "grpo",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 16,
        "data.max_response_length": 32,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 256,
        "memory.recompute": recompute,
    }
    config = load_mapping(given).config
    found = plain(config, "cuda")
    config = settled(config, {key: found[key] for key in open_keys(config)})
    target = find_target("cuda", 0)
    run = Rehearsal(config, shape_config("tiny"), target, Phases(target), every_phase=False)
    run.step(1)  # kernels are loaded, and workspaces made
    backward, seen = run.actor.backward, []

    def watched(*arguments):
        torch.cuda.set_sync_debug_mode("error")
        try:
            seen.append(backward(*arguments))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return seen[0]

    run.actor.backward = watched
    run.step(2)
    assert seen[0].tokens == 4 * 4 * 32


def test_training_runs_and_resumes_in_bfloat16(tiny_model, tmp_path: Path, capfd):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}=", "answer": str(i)}) + "\n" for i in range(40)))
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompt, response, target):\n    return response.count(target[0]) / 4\n")
    words = [
        "train",
        f"data.train_files={data}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        f"actor_rollout_ref.model.path={tiny_model}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"reward={reward}",
        f"trainer.default_local_dir={tmp_path}",
        "trainer.experiment_name=cuda",
        "trainer.total_training_steps=6",
        "trainer.device=cuda",
    ]
    assert main(words) == 0
    assert "not traced" not in capfd.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "cuda" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["reward/mean"] > lines[0]["reward/mean"]
    assert all(line["rollout/logprob_gap_mean"] < 0.02 for line in lines)
    memory = [json.loads(line) for line in (tmp_path / "cuda" / "memory.jsonl").read_text().splitlines()]
    update = next(row for row in memory if row["phase"] == "update")
    weights = update["components"]["weights"]
    assert update["components"]["master"] == weights  # four bytes against two, of the actor and of the reference
    assert update["components"]["optimizer"] == 2 * weights
    assert update["allocated_peak_bytes"] == sum(update["components"].values())


CLAIM = """
import torch
from ullage.engine.claim import MIB, claim
from ullage.model.target import find_target

target = find_target("cuda", 0)

def held():
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

def take(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

kept = [take(100)]
passing = [take(30), take(50)]
kept.append(take(20))  # behind what goes: there are gaps
del passing
before = held()
there = [claim(target, 1000 * MIB)]
claimed = held()
passing = [take(mib) for mib in (7, 400, 13, 260, 199, 1)]
full = held()
del passing
there.append(claim(target, 1000 * MIB))
torch.cuda.set_per_process_memory_fraction(2000 * MIB / target.memory_bytes)
there.append(claim(target, 3000 * MIB))
there.append(claim(target, 1000 * MIB))
print(*before, *claimed, *full, *map(int, there))
"""


@pytest.mark.parametrize("expandable", [True, False])
def test_a_planned_peak_is_reserved_before_it_is_needed(expandable):
    # A fresh process: torch reads its allocator's settings once.
    settings = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{expandable}"}
    command = [sys.executable, "-c", CLAIM]
    out = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True).stdout
    allocated, reserved, allocated_after, claimed, _, full, *there = (int(word) for word in out.split())
    mib = 1 << 20
    assert allocated == allocated_after == 120 * mib
    if expandable:
        assert reserved < 1000 * mib <= claimed <= 1200 * mib
        assert full == claimed
        assert there == [1, 1, 0, 1]
    else:
        assert claimed == reserved
        assert there == [1, 1, 1, 1]
