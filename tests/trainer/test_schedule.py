"""Mini-batches: which samples, in which order, with which weights."""

import torch

from ullage.base.communicator import Solo
from ullage.batch.stages import Rollouts, pad_rows
from ullage.config.tree import Config
from ullage.trainer.schedule import Schedule


class Peer(Solo):
    """One rank of two whose peer contributes these numbers to every sum."""

    size = 2

    def __init__(self, *theirs):
        self.theirs = theirs

    def sum(self, values):
        return [mine + their for mine, their in zip(values, self.theirs, strict=True)]


def make_schedule(ranks=None, *, prompts=4, mode="token-mean", **actor):
    settings = {"loss_agg_mode": mode, **actor}
    config = Config.model_validate(
        {
            "data": {"train_batch_size": prompts, "max_response_length": 8},
            "actor_rollout_ref": {"actor": settings},
        }
    )
    return Schedule(config, mode, ranks or Solo())


def make_batch(order=(0, 1, 2, 3), lengths=((2, 1), (3, 1), (1, 1), (2, 2)), signal=None):
    """Two samples for each prompt; `order` is the prompts' place in the global batch."""
    flat = [length for pair in lengths for length in pair]
    rollouts = Rollouts(
        prompts=tuple((5 + place,) for place in order),
        order_G=torch.tensor(order),
        group_N=torch.arange(len(flat)) // 2,
        sample_N=torch.arange(len(flat)),
        responses=tuple((7,) * length for length in flat),
        mask_NT=pad_rows([[1.0] * length for length in flat], width=max(flat), dtype=torch.bool),
        rollout_logprobs_NT=torch.zeros(len(flat), max(flat)),
        finish_reasons=("stop",) * len(flat),
    )
    everybody = torch.ones(len(flat), dtype=torch.bool)
    experience = rollouts.scored(rewards_N=torch.arange(len(flat)).double(), valid_N=everybody)
    if signal is not None:
        experience = experience.with_signal(torch.tensor(signal, dtype=torch.bool))
    return experience.credited(advantages_NT=experience.mask_NT.double())


def rewards_of(mini_batches):
    """Which samples they hold: a sample's reward is its number."""
    return [part.rewards_N.int().tolist() for part in mini_batches]


def test_one_mini_batch_is_strictly_on_policy():
    schedule = make_schedule()
    assert not schedule.off_policy
    assert rewards_of(schedule.mini_batches(make_batch(), step=1)) == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_several_mini_batches_or_epochs_are_off_policy():
    assert make_schedule(ppo_mini_batch_size=2).off_policy
    assert make_schedule(ppo_epochs=2).off_policy


def test_members_are_ranges_of_the_global_order():
    """This rank holds the prompts at places 3, 0, 2 and 1."""
    schedule = make_schedule(ppo_mini_batch_size=2)
    batch = make_batch(order=(3, 0, 2, 1))
    assert rewards_of(schedule.mini_batches(batch, step=1)) == [[2, 3, 6, 7], [0, 1, 4, 5]]


def test_a_last_mini_batch_may_be_smaller():
    schedule = make_schedule(ppo_mini_batch_size=3)
    assert rewards_of(schedule.mini_batches(make_batch(), step=1)) == [[0, 1, 2, 3, 4, 5], [6, 7]]


def test_two_ranks_see_the_mini_batches_of_one():
    """Rank 0 holds places 0 and 2, rank 1 places 1 and 3: both cut at the same places."""
    schedule = make_schedule(Peer(0, 0, 0), ppo_mini_batch_size=2)
    pair = ((2, 1), (3, 1))
    for order in ((0, 2), (1, 3)):
        assert rewards_of(schedule.mini_batches(make_batch(order, pair), step=1)) == [[0, 1], [2, 3]]


def test_epochs_repeat_and_shuffling_differs_by_step_and_epoch():
    schedule = make_schedule(ppo_mini_batch_size=1, ppo_epochs=2, shuffle=True)
    orders = {}
    for step in (1, 2):
        parts = rewards_of(schedule.mini_batches(make_batch(), step=step))
        assert len(parts) == 8
        for epoch in (0, 1):
            orders[step, epoch] = [part[0] // 2 for part in parts[4 * epoch : 4 * epoch + 4]]
            assert sorted(orders[step, epoch]) == [0, 1, 2, 3]
    assert len({tuple(order) for order in orders.values()}) == 4
    again = rewards_of(schedule.mini_batches(make_batch(), step=2))
    assert [part[0] // 2 for part in again] == orders[2, 0] + orders[2, 1]


def test_the_plan_is_what_the_first_epoch_will_update():
    schedule = make_schedule(ppo_mini_batch_size=2, ppo_epochs=2, shuffle=True)
    batch = make_batch(signal=[1, 1, 0, 0, 1, 1, 1, 1])
    plan = [members.tolist() for members in schedule.plan(batch, step=3)]
    assert plan == rewards_of(schedule.mini_batches(batch, step=3))[:2]


def test_samples_without_signal_are_counted_then_left_out():
    """13 tokens in all; the two samples of the second prompt, four tokens, have none."""
    batch = make_batch(signal=[1, 1, 0, 0, 1, 1, 1, 1])
    (part,) = make_schedule().mini_batches(batch, step=1)
    assert part.rewards_N.int().tolist() == [0, 1, 4, 5, 6, 7]
    torch.testing.assert_close(part.weights_NT, part.mask_NT.double() / 13, rtol=0, atol=0)


def test_a_mini_batch_without_signal_anywhere_is_skipped():
    schedule = make_schedule(ppo_mini_batch_size=2)
    batch = make_batch(signal=[0, 0, 0, 0, 1, 1, 1, 1])
    assert rewards_of(schedule.mini_batches(batch, step=1)) == [[4, 5, 6, 7]]


def test_a_rank_without_signal_takes_part_while_its_peer_has_some():
    """Collectives of the update must be made by all ranks or by none."""
    batch = make_batch(signal=[0] * 8)
    assert rewards_of(make_schedule(Peer(5, 2, 2)).mini_batches(batch, step=1)) == [[]]
    assert rewards_of(make_schedule(Peer(5, 2, 0)).mini_batches(batch, step=1)) == []


def test_the_critic_has_the_same_denominators_with_its_own_way_to_add_up():
    config = Config.model_validate({"data": {"train_batch_size": 4}, "critic": {"loss_agg_mode": "seq-mean-token-sum"}})
    (part,) = Schedule(config, "token-mean", Peer(7, 2, 2)).mini_batches(make_batch(), step=1)
    torch.testing.assert_close(part.weights_NT, part.mask_NT.double() / 20, rtol=0, atol=0)
    torch.testing.assert_close(part.value_weights_NT, part.mask_NT.double() / 10, rtol=0, atol=0)
    (same,) = make_schedule(Peer(7, 2, 2)).mini_batches(make_batch(), step=1)
    assert torch.equal(same.value_weights_NT, same.weights_NT)


def test_denominators_count_the_tokens_and_sequences_of_all_ranks():
    """Here 13 tokens in 8 sequences; the peer has 7 tokens in 2."""
    (tokens,) = make_schedule(Peer(7, 2, 2)).mini_batches(make_batch(), step=1)
    torch.testing.assert_close(tokens.weights_NT, tokens.mask_NT.double() / 20, rtol=0, atol=0)
    (sequences,) = make_schedule(Peer(7, 2, 2), mode="seq-mean-token-sum").mini_batches(make_batch(), step=1)
    torch.testing.assert_close(sequences.weights_NT, sequences.mask_NT.double() / 10, rtol=0, atol=0)
    (scaled,) = make_schedule(Peer(7, 2, 2), mode="seq-mean-token-sum-norm").mini_batches(make_batch(), step=1)
    torch.testing.assert_close(scaled.weights_NT, scaled.mask_NT.double() / 10 / 8, rtol=0, atol=0)
