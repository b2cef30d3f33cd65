"""PPO with actor, critic, reference and reward model in one run, and rewards that come over HTTP."""

import json

import pytest
import torch
from runs import assert_same_run, metrics_of, samples_of

KEY = "sk-never-shown-91"
VOCABULARY = 36


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """A random classifier of the tiny models' shape, with their tokenizer."""
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    from make_tiny_model import make_tokenizer

    folder = tmp_path_factory.mktemp("models") / "reward_model"
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(11)
    module = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(module.score.weight, std=0.5)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def all_roles(reward_model, **changes):
    return {
        "algorithm": "ppo",
        "critic__optim__lr": 1e-3,
        "reward_model__enable": "true",
        "reward_model__model__path": reward_model,
        "reward_model__weight": 0.5,
        "trainer__total_training_steps": 3,
        "trainer__test_freq": 3,
        **changes,
    }


@pytest.mark.parametrize("share", ["false", "true"])
def test_ppo_with_all_four_roles_resumes_bit_for_bit(ullage, task, tmp_path, reward_model, share):
    keys = all_roles(reward_model, critic__share_actor=share)
    whole = ullage(*task.arguments(tmp_path, "whole", **keys))
    assert whole.code == 0, whole.stderr
    rows = metrics_of(tmp_path / "whole")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["critic/loss"] > 0
        assert row["actor/kl_ref"] >= 0
        assert row["reward/failed_fraction"] == 0
        mean = row["reward/reward"] + 0.5 * row["reward/reward_model"]
        assert row["reward/mean"] == pytest.approx(mean, rel=1e-12)
    assert rows[2]["actor/kl_ref"] > 0
    assert rows[0]["eval/val/mean@2"] != 0
    assert not any("pass@" in name for row in rows for name in row)
    memory = [json.loads(line) for line in (tmp_path / "whole" / "memory.jsonl").read_text().splitlines()]
    # Embedding, two layers (attention, MLP, two norms), final norm, head; float32.
    numbers = VOCABULARY * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32 + 32
    assert {row["components"]["reward_model"] for row in memory} == {4 * numbers}
    first = json.loads(samples_of(tmp_path / "whole")["step_1.jsonl"].splitlines()[0])
    assert set(first["reward_parts"]) == {"reward", "reward_model"}

    killed = ullage(*task.arguments(tmp_path, "killed", **keys), fault="step=2,phase=reward,kind=sigkill")
    assert killed.code == -9, killed.stderr
    resumed = ullage("resume", tmp_path / "killed")
    assert resumed.code == 0, resumed.stderr
    assert_same_run(tmp_path / "killed", tmp_path / "whole", step=3)


def test_a_reward_model_is_reward_enough_and_its_reward_rises(ullage, task, tmp_path, reward_model):
    """KL in the reward instead of the loss, no reward function, and steps enough to learn what the model likes."""
    keys = all_roles(
        reward_model,
        reward=None,
        algorithm__use_kl_in_reward="true",
        actor_rollout_ref__actor__use_kl_loss="false",
        actor_rollout_ref__rollout__ignore_eos="true",
        actor_rollout_ref__actor__optim__lr=2e-3,
        actor_rollout_ref__actor__optim__lr_scheduler_type="constant",
        actor_rollout_ref__rollout__n=8,
        data__train_batch_size=8,
        trainer__total_training_steps=8,
        trainer__save_freq=-1,
    )
    outcome = ullage(*task.arguments(tmp_path, "alone", **keys))
    assert outcome.code == 0, outcome.stderr
    scores = [row["reward/reward_model"] for row in metrics_of(tmp_path / "alone")[1:]]
    assert len(scores) == 8
    assert sum(scores[-3:]) / 3 > scores[0] + 0.3
    evaluated = ullage("eval", tmp_path / "alone", "--json")
    assert evaluated.code == 0, evaluated.stderr
    assert "mean@2" in evaluated.stdout


def test_a_folder_that_is_no_reward_model(ullage, task, tmp_path, tiny_model):
    outcome = ullage(*task.arguments(tmp_path, "wrong", **all_roles(tiny_model)))
    assert outcome.code == 66
    assert "the reward model: " in outcome.stderr
    assert "has 2 labels; a reward model has one output (num_labels=1)" in outcome.stderr
    assert "check reward_model.model.path" in outcome.stderr


def test_a_scoring_service_that_is_down_ends_the_run(ullage, task, tmp_path):
    functions = [{"name": "endpoint", "kwargs": {"url": "http://127.0.0.1:9/", "retries": 0}}]
    keys = {"reward": None, "reward__functions": json.dumps(functions)}
    outcome = ullage(*task.arguments(tmp_path, "down", **keys))
    assert outcome.code == 69, outcome.stderr
    assert "6 of 6 rewards failed" in outcome.stderr
    assert "endpoint at http://127.0.0.1:9/ cannot be reached: " in outcome.stderr


def test_the_key_of_a_judge_is_nowhere(ullage, task, tmp_path):
    kwargs = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key_env": "JUDGE_KEY", "retries": 0}
    functions = json.dumps([{"name": "judge", "kwargs": kwargs}])
    keys = {"reward": None, "reward__functions": functions, "reward__max_failure_fraction": 1.0}
    keys |= {"trainer__total_training_steps": 1}
    outcome = ullage(*task.arguments(tmp_path, "judged", **keys), JUDGE_KEY=KEY)
    assert outcome.code == 0, outcome.stderr
    written = [path.read_bytes() for path in (tmp_path / "judged").rglob("*") if path.is_file()]
    assert b"JUDGE_KEY" in b"".join(written)
    assert KEY.encode() not in b"".join(written)
    assert KEY not in outcome.stdout + outcome.stderr


def test_a_key_in_the_place_of_its_name_is_refused_unseen(ullage, task, tmp_path):
    kwargs = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api_key_env": KEY}
    functions = json.dumps([{"name": "judge", "kwargs": kwargs}])
    outcome = ullage(*task.arguments(tmp_path, "refused", reward=None, reward__functions=functions))
    assert outcome.code == 78
    assert "kwargs.api_key_env = '***': must be the name of an environment variable" in outcome.stderr
    assert KEY not in outcome.stdout + outcome.stderr
    assert not (tmp_path / "refused").exists()
