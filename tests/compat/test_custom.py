"""Trainers of a user's own: what a subclass defines is what trains, and the library's own loss is the library's run."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file

import ullage
from ullage.base.errors import ConfigError, UsageError
from ullage.maths import advantages_token


def trained(kind, config):
    """The weights that a run of this class leaves."""
    with kind(config) as trainer:
        trainer.train()
    return load_file(trainer.run_directory / "final" / "model.safetensors")


def metrics(trainer):
    return [json.loads(line) for line in (trainer.run_directory / "metrics.jsonl").read_text().splitlines()]


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_librarys_own_loss_is_the_librarys_own_run(config):
    class Own(ullage.BaseTrainer):
        def compute_loss(self, batch):
            return super().compute_loss(batch)

    class Flipped(ullage.BaseTrainer):
        def compute_loss(self, batch):
            return -super().compute_loss(batch)

    built_in = trained(ullage.Trainer, config)
    assert same(trained(ullage.BaseTrainer, config), built_in)
    assert same(trained(Own, config), built_in)
    assert not same(trained(Flipped, config), built_in)


def test_a_loss_that_singles_out_tokens_is_the_same_too(with_keys):
    class Own(ullage.BaseTrainer):
        def compute_loss(self, batch):
            return super().compute_loss(batch)

    config = with_keys({"algorithm.name": "kl_cov", "trainer.total_training_steps": 1})
    assert same(trained(Own, config), trained(ullage.Trainer, config))


# Document 002, "Custom Algorithm Support". Its update does nothing, so it must train nothing.
class CustomAlgorithm(ullage.BaseAlgorithm):
    def __init__(self, config):
        super().__init__(config)
        self.setup_models()

    def update_policy(self, batch):
        # Custom policy update logic
        pass

    def compute_loss(self, batch):
        # Custom loss computation
        pass


def test_custom_algorithm(config, tiny_model):
    assert same(trained(CustomAlgorithm, config), load_file(tiny_model / "model.safetensors"))


# Document 002, "Custom Algorithm Implementation"; the loss that it leaves open is REINFORCE's.
class CustomTrainer(ullage.BaseTrainer):
    def __init__(self, config):
        super().__init__(config)
        self.setup_models()

    def update_policy(self, batch):
        # Custom policy update logic
        advantages = self.compute_advantages(batch)

        # Custom loss function
        policy_loss = self.compute_custom_loss(batch, advantages)

        # Update models
        self.actor_optimizer.zero_grad()
        policy_loss.backward()
        self.actor_optimizer.step()

    def compute_custom_loss(self, batch, advantages):
        # Implement custom loss computation
        log_probs = self.actor.compute_log_probs(batch)
        return -(advantages * log_probs).sum() / batch.response_mask.sum()


def test_custom_trainer(with_keys):
    """With one mini-batch and no KL term, the clipped surrogate has REINFORCE's gradient: this is GRPO."""
    config = with_keys({
        "actor_rollout_ref.actor": {"optim": {"lr": 1e-3}, "entropy_coeff": 0.0},
        "trainer.total_training_steps": 1,
    })  # fmt: skip
    trainer = CustomTrainer(config)
    trainer.train()
    own = load_file(trainer.run_directory / "final" / "model.safetensors")
    [row] = metrics(trainer)
    trainer.close()
    with ullage.Trainer(config) as other:
        other.train()
    built_in = load_file(other.run_directory / "final" / "model.safetensors")
    [expected] = metrics(other)
    assert row["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
    assert all(torch.allclose(own[name], built_in[name], rtol=0, atol=1e-6) for name in own)
    assert row["reward/mean"] == expected["reward/mean"]


# Document 002, "PPO Implementation": its two methods, unchanged.
class PPOTrainer(ullage.BaseTrainer):
    def update_policy(self, batch):
        # Compute log probabilities
        log_probs = self.actor.compute_log_probs(batch)

        # Compute advantages
        values = self.critic.compute_values(batch)
        advantages = self.compute_advantages(batch.rewards, values)

        # Compute KL penalty
        with torch.no_grad():
            ref_log_probs = self.reference_model.compute_log_probs(batch)
            kl_penalty = log_probs - ref_log_probs

        # PPO objective
        ratio = torch.exp(log_probs - batch.old_log_probs)
        surr1 = ratio * advantages
        surr2 = torch.clamp(ratio, 1 - self.config.clip_epsilon, 1 + self.config.clip_epsilon) * advantages
        policy_loss = -torch.min(surr1, surr2).mean()

        # Add KL penalty
        policy_loss += self.config.kl_coef * kl_penalty.mean()

        # Update actor
        self.actor.optimizer.zero_grad()
        policy_loss.backward()
        self.actor.optimizer.step()

    def compute_advantages(self, rewards, values, gamma=0.99, lambda_gae=0.95):
        # Generalized Advantage Estimation
        advantages = []
        last_advantage = 0

        for t in reversed(range(len(rewards))):
            if t == len(rewards) - 1:  # noqa: SIM108 -- as it stands there
                next_value = 0
            else:
                next_value = values[t + 1]

            delta = rewards[t] + gamma * next_value - values[t]
            advantage = delta + gamma * lambda_gae * last_advantage
            advantages.insert(0, advantage)
            last_advantage = advantage

        return torch.tensor(advantages)


def test_ppo_trainer(with_keys, tiny_model):
    """The document's GAE is right for the tokens of one response, which is what it is called with."""
    seen = []

    class Watched(PPOTrainer):
        def update_policy(self, batch):
            seen.append((batch, self.critic.compute_values(batch)))
            super().update_policy(batch)

    config = with_keys({"algorithm.name": "ppo", "actor_rollout_ref.actor.clip_epsilon": 0.3})
    with Watched(config) as trainer:
        trainer.train()
        assert trainer.config.clip_epsilon == 0.3
        assert trainer.reward_model is None
    assert len(seen) == 4  # two steps of two mini-batches
    batch, values = seen[3]
    assert values.abs().max() > 0  # the critic has learned meanwhile
    rewards = advantages_token.at_last_token(batch.rewards, batch.response_mask)
    expected, returns = advantages_token.gae(rewards, batch.values.double(), batch.response_mask, gamma=0.99, lam=0.95)
    assert torch.allclose(batch.advantages, expected, rtol=0, atol=1e-6)
    assert torch.allclose(batch.returns, returns, rtol=0, atol=1e-6)
    final = load_file(trainer.run_directory / "final" / "model.safetensors")
    assert not same(final, load_file(tiny_model / "model.safetensors"))
    assert metrics(trainer)[1]["critic/loss"] > 0


def test_credit_of_ones_own_is_what_the_built_in_update_uses(with_keys):
    """Advantages of zero leave only weight decay, which is off here."""

    class Nothing(ullage.BaseTrainer):
        def compute_advantages(self, rewards, values):
            return rewards * 0

    class Group(ullage.BaseTrainer):
        def compute_advantages(self, rewards, values):
            return super().compute_advantages(rewards, values, gamma=1.0, lambda_gae=1.0)

    keys = {
        "actor_rollout_ref.actor": {"optim": {"lr": 1e-3, "weight_decay": 0.0}},
        "trainer.total_training_steps": 1,
    }
    config = with_keys(keys)
    start = load_file(f"{config['actor_rollout_ref']['model']['path']}/model.safetensors")
    assert same(trained(Nothing, config), start)
    assert not same(trained(Group, config), start)


def test_metrics_that_an_update_returns_are_recorded(with_keys):
    class Counting(ullage.BaseTrainer):
        def update_policy(self, batch):
            super().update_policy(batch)
            return {"mine/size": len(batch)}

    config = with_keys({"trainer.total_training_steps": 1})
    with Counting(config) as trainer:
        trainer.train()
    [row] = metrics(trainer)
    assert row["mine/size"] == 8  # two prompts, four samples each
    assert row["actor/grad_norm"] > 0


def test_mistakes_are_said(with_keys):
    class Short(ullage.BaseTrainer):
        def compute_advantages(self, rewards, values):
            return [1.0]

    with (
        Short(with_keys({"actor_rollout_ref.rollout.ignore_eos": True})) as trainer,
        pytest.raises(UsageError, match=r"gave \(1,\) for a response of 3 tokens"),
    ):
        trainer.train()
    with pytest.raises(ConfigError, match="a trainer of your own runs on one rank"):
        Short(with_keys({"trainer.n_gpus_per_node": 2}))


def test_a_loaded_checkpoint_keeps_the_subclass(with_keys, tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    with CustomTrainer(with_keys({"trainer.total_training_steps": 1})) as first:
        first.train()
        first.save_checkpoint(tmp_path / "one")
    config = with_keys({"trainer.total_training_steps": 2})
    with CustomTrainer(config) as second:
        second.load_checkpoint(tmp_path / "one")
        second.train()
    resumed = load_file(second.run_directory / "final" / "model.safetensors")
    assert same(resumed, trained(CustomTrainer, config))
