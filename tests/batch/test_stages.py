"""The stages of a step: what each transition keeps, sets and masks."""

import dataclasses

import pytest
import torch

from ullage.batch.stages import Experience, Rollouts, TrainBatch, pad_rows


def make_rollouts():
    """The example of the stages' own documentation."""
    return Rollouts(
        prompts=((5, 6), (7, 8, 9)),
        order_G=torch.tensor([4, 2]),
        group_N=torch.tensor([0, 0, 1, 1]),
        sample_N=torch.arange(4),
        responses=((3, 2), (4, 4, 2), (2,), (3, 3, 2)),
        mask_NT=torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]], dtype=torch.bool),
        rollout_logprobs_NT=-torch.arange(12.0).view(4, 3),
        finish_reasons=("stop", "stop", "length", "stop"),
    )


def test_select_takes_samples_and_keeps_prompts():
    part = make_rollouts().select(torch.tensor([3, 1]))
    assert part.prompts == ((5, 6), (7, 8, 9))
    assert part.order_G.tolist() == [4, 2]
    assert part.group_N.tolist() == [1, 0]
    assert part.responses == ((3, 3, 2), (4, 4, 2))
    assert part.rollout_logprobs_NT.tolist() == [[-9.0, -10.0, -11.0], [-3.0, -4.0, -5.0]]
    assert part.finish_reasons == ("stop", "stop")


def test_scoring_masks_what_could_not_be_scored():
    valid = torch.tensor([True, False, True, True])
    experience = make_rollouts().scored(rewards_N=torch.tensor([1.0, 0.0, 0.5, 0.0]), valid_N=valid)
    assert type(experience) is Experience
    assert experience.mask_NT.tolist() == [
        [True, True, False],
        [False, False, False],
        [True, False, False],
        [True, True, True],
    ]
    assert torch.equal(experience.signal_N, valid)
    assert experience.old_logprobs_NT is None


def test_the_whole_way_keeps_every_field():
    rollouts = make_rollouts()
    everyone = torch.ones(4, dtype=torch.bool)
    numbers = torch.arange(12.0).view(4, 3)
    batch = (
        rollouts.scored(rewards_N=torch.tensor([1.0, 2.0, 3.0, 4.0]), valid_N=everyone)
        .with_signal(torch.tensor([True, True, False, True]))
        .evaluated(old_logprobs=numbers, ref_logprobs=numbers + 1, values=None)
        .credited(advantages_NT=numbers + 2)
    )
    assert type(batch) is TrainBatch
    for field in dataclasses.fields(Rollouts):
        ours, theirs = getattr(batch, field.name), getattr(rollouts, field.name)
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
    assert batch.weights_NT.abs().sum() == 0
    weighted = batch.weighted(numbers + 3).select(torch.tensor([2]))
    assert weighted.rewards_N.tolist() == [3.0]
    assert weighted.signal_N.tolist() == [False]
    assert weighted.old_logprobs_NT.tolist() == [[6.0, 7.0, 8.0]]
    assert weighted.ref_logprobs_NT.tolist() == [[7.0, 8.0, 9.0]]
    assert weighted.advantages_NT.tolist() == [[8.0, 9.0, 10.0]]
    assert weighted.weights_NT.tolist() == [[9.0, 10.0, 11.0]]
    assert weighted.values_NT is None
    assert weighted.returns_NT is None


def test_moved_moves_every_tensor():
    moved = make_rollouts().moved(lambda tensor: tensor.to("meta"))
    for field in dataclasses.fields(moved):
        value = getattr(moved, field.name)
        if isinstance(value, torch.Tensor):
            assert value.device.type == "meta", field.name
    assert moved.responses == make_rollouts().responses


def test_stages_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_rollouts().responses = ()


def test_pad_rows():
    assert pad_rows([[1.5, 2.0], [], [3.0]], width=3, dtype=torch.float64).tolist() == [
        [1.5, 2.0, 0.0],
        [0.0, 0.0, 0.0],
        [3.0, 0.0, 0.0],
    ]
    assert pad_rows([[1.0, 0.0]], width=2, dtype=torch.bool).tolist() == [[True, False]]
