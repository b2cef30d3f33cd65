"""Roles without a run: `ActorRolloutRef`, `Critic`, `RewardModel`, and the batch they exchange."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from ullage import ActorRolloutRef, Critic, RewardModel
from ullage.base.errors import ConfigError, DataError, UsageError
from ullage.maths import advantages_token

PROMPTS = ["123=", "45="]


@pytest.fixture
def policy(with_keys):
    policy = ActorRolloutRef(with_keys({"data.train_files": []}))
    yield policy
    policy.close()


def parameters(policy):
    return [parameter.detach().clone() for parameter in policy.actor.model.module.parameters()]


def test_collect_score_and_learn(policy, config):
    """The same seed gives the same answers, so the second policy can be told what the first will have said."""
    said = ActorRolloutRef(config).collect_experience(PROMPTS, targets=["1", "2"]).responses
    targets = [said[0] + "!", said[4] + "!"]
    batch = policy.collect_experience(PROMPTS, targets)
    assert len(batch) == 8  # four samples of each prompt
    assert batch.prompts == ["123="] * 4 + ["45="] * 4
    assert batch.responses == said
    marks = [sum(map(str.__eq__, said[i], targets[i // 4])) / len(targets[i // 4]) for i in range(8)]
    assert batch.rewards.tolist() == marks
    assert len(set(marks)) > 1
    before = parameters(policy)
    metrics = policy.update_policy(batch)
    assert metrics["actor/learning_rate"] == 1e-3
    assert metrics["actor/grad_norm"] > 0
    assert metrics["rollout/logprob_gap_mean"] < 1e-5
    assert not all(map(torch.equal, parameters(policy), before))
    assert batch.advantages[0, 0] > 0  # the one that was right


def test_the_first_ratio_is_exactly_one(policy):
    batch = policy.collect_experience(PROMPTS, targets=["1", "2"])
    with torch.no_grad():
        now = policy.compute_log_probs(batch)
    assert torch.equal(now[batch.response_mask], batch.old_log_probs[batch.response_mask])
    assert torch.equal(batch.log_probs, batch.old_log_probs)
    assert torch.equal(batch.ref_log_probs, batch.old_log_probs)
    assert not now.requires_grad


def test_log_probs_are_the_models_and_have_a_gradient(policy, tiny_model):
    batch = policy.collect_experience(PROMPTS, targets=["1", "2"])
    log_probs = policy.compute_log_probs(batch)
    plain = AutoModelForCausalLM.from_pretrained(tiny_model)
    for row, (prompt, response) in enumerate(zip(batch.prompt_ids, batch.response_ids, strict=True)):
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            logits = plain(ids).logits[0]
        expected = logits.log_softmax(-1)[range(len(prompt) - 1, ids.shape[1] - 1), list(response)]
        assert torch.allclose(log_probs[row, : len(response)], expected, atol=1e-5, rtol=0)
    log_probs.sum().backward()
    assert policy.actor.model.module.lm_head.weight.grad.abs().max() > 0


def test_rewards_of_ones_own(with_keys):
    policy = ActorRolloutRef(with_keys({"reward": {}, "data.train_files": []}))
    batch = policy.collect_experience(PROMPTS)
    assert all(math.isnan(reward) for reward in batch.rewards)
    with pytest.raises(DataError, match="8 of 8 responses have no reward"):
        policy.update_policy(batch)
    with pytest.raises(UsageError, match=r"rewards of shape \(2,\) for 8 responses"):
        batch.rewards = [1.0, 2.0]
    batch.rewards = [float(len(set(response))) for response in batch.responses]
    policy.update_policy(batch)
    advantages = batch.advantages
    batch.rewards = [1.0, 0.0, 0.0, 0.0] * 2
    assert batch.advantages is None
    policy.update_policy(batch)
    # By hand: mean 1/4, standard deviation 1/2 (n - 1), so (1 - 1/4) / (1/2) = 1.5 for the one that was right.
    assert batch.advantages[:, 0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5] * 2, abs=1e-4)
    assert not torch.equal(batch.advantages, advantages)


def test_advantages_of_ones_own_decide(policy, with_keys):
    """Advantages of zero and no KL: nothing but weight decay could change a weight, and that is off."""
    policy = ActorRolloutRef(with_keys({"actor_rollout_ref.actor": {"optim": {"lr": 1e-3, "weight_decay": 0.0}}}))
    batch = policy.collect_experience(PROMPTS, targets=["1", "2"])
    before = parameters(policy)
    batch.advantages = torch.zeros(8)
    policy.update_policy(batch)
    assert all(map(torch.equal, parameters(policy), before))
    batch.advantages = torch.arange(8.0)
    policy.update_policy(batch)
    assert not all(map(torch.equal, parameters(policy), before))


def test_the_batch_as_padded_tokens(policy):
    batch = policy.collect_experience(PROMPTS, targets=["1", "2"])
    lengths = [len(p) + len(r) for p, r in zip(batch.prompt_ids, batch.response_ids, strict=True)]
    assert batch.attention_mask.sum(-1).tolist() == lengths
    assert batch.input_ids[0, : lengths[0]].tolist() == [*batch.prompt_ids[0], *batch.response_ids[0]]
    assert batch.input_ids.shape == (8, max(lengths))
    with pytest.raises(UsageError, match="values of shape"):
        batch.values = torch.zeros(3, 3)


def test_a_critic_learns_the_returns(with_keys):
    config = with_keys(
        {"algorithm.name": "ppo", "critic.optim.lr": 1e-4, "actor_rollout_ref.actor.ppo_mini_batch_size": 4}
    )
    policy, critic = ActorRolloutRef(config), Critic(config)
    batch = policy.collect_experience(PROMPTS, targets=["123", "45"])
    batch.rewards = [1.0] * 8
    with pytest.raises(DataError, match="the batch has no values"):
        policy.update_policy(batch)
    batch.values = critic.compute_values(batch)
    assert batch.values.abs().max() == 0  # a fresh head
    policy.update_policy(batch)
    rewards = advantages_token.at_last_token(batch.rewards, batch.response_mask)
    assert torch.equal(batch.returns, rewards.flip(-1).cumsum(-1).flip(-1) * batch.response_mask)
    losses = [critic.update(batch)["critic/loss"] for _ in range(2)]
    assert losses[0] == 0.5  # half the square of 1 - 0
    assert losses[1] < 0.5
    assert critic.compute_values(batch)[batch.response_mask].mean() > 0


def test_a_critic_on_the_actors_hidden_states(with_keys):
    config = with_keys({"algorithm.name": "ppo", "critic.share_actor": True})
    with pytest.raises(ConfigError, match=r"critic\.share_actor = True: there is no actor to build on"):
        Critic(config)
    policy = ActorRolloutRef(config)
    critic = Critic(config, policy)
    assert critic.role.model.trunk is policy.actor.model
    batch = policy.collect_experience(PROMPTS, targets=["1", "2"])
    assert critic.update(batch)["critic/loss"] >= 0


def test_a_reward_model(with_keys, tiny_model, tmp_path):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    shape = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=32, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    classifier = LlamaForSequenceClassification(shape).eval()
    classifier.save_pretrained(tmp_path / "reward")
    tokenizer.save_pretrained(tmp_path / "reward")
    model = RewardModel(with_keys({"reward_model.model.path": str(tmp_path / "reward"), "reward_model.enable": True}))

    # Document 002, "Reward Model".
    inputs = tokenizer("12=" + "345", return_tensors="pt")
    with torch.no_grad():
        reward = classifier(**inputs).logits.item()

    assert model.compute_reward("12=", "345") == pytest.approx(reward, abs=1e-6)
    with pytest.raises(DataError, match="reads at most 32"):
        model.compute_reward("1" * 40, "2")
    with pytest.raises(ConfigError, match="no reward model"):
        RewardModel({})


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"actor_rollout_ref.model": {}}, "no model"),
        ({"environment.name": "tools"}, r"environment\.name is given, which only a run can do"),
        ({"reward.overlong_buffer": {"length": 2}}, r"reward\.overlong_buffer is given"),
        ({"algorithm.name": "remax"}, "greedy answers, which only a run has"),
        (
            {"actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine", "trainer.total_training_steps": None},
            "nothing says how many updates there will be",
        ),
    ],
)
def test_what_a_role_alone_cannot_do(with_keys, keys, cause):
    with pytest.raises(ConfigError, match=cause):
        ActorRolloutRef(with_keys(keys))


def test_prompts_that_cannot_be_answered(policy):
    with pytest.raises(UsageError, match="2 prompts and 1 targets"):
        policy.collect_experience(PROMPTS, ["1"])
    with pytest.raises(DataError, match=r"prompt 1 has 9 tokens, data\.max_prompt_length is 8"):
        policy.collect_experience(["12=", "12345678="])
