"""Packed passes: how much they have to hold."""

import pytest
import torch

from ullage.batch.pack import Limits, pack
from ullage.batch.stages import Rollouts, pad_rows
from ullage.engine.replay import Extent
from ullage.workers.passes import everything, extent

PROMPTS = ((5,) * 10, (5,) * 3)
GROUPS = (0, 0, 1, 1)
LENGTHS = (6, 2, 20, 1)


def stage_of(masks):
    return Rollouts(
        prompts=PROMPTS,
        order_G=torch.arange(2),
        group_N=torch.tensor(GROUPS),
        sample_N=torch.arange(4),
        responses=tuple((7,) * length for length in LENGTHS),
        mask_NT=pad_rows(masks, width=max(LENGTHS), dtype=torch.bool),
        rollout_logprobs_NT=None,
        finish_reasons=("stop",) * 4,
    )


ALL = [[1.0] * length for length in LENGTHS]


@pytest.mark.parametrize(
    ("share", "members", "expected"),
    [
        # The last token of a response is not fed: 10 + 5 and 10 + 1, 3 + 19 and 3 + 0.
        (True, [[0, 1, 2, 3]], Extent(22, 10 + 6 + 3 + 19, 4)),
        (False, [[0, 1, 2, 3]], Extent(22, 15 + 11 + 22 + 3, 4)),
        (True, [[0, 1], [2, 3]], Extent(22, 22, 2)),
        (True, [[1, 0, 3]], Extent(15, 10 + 6 + 3, 3)),
        (True, [], Extent(0, 0, 0)),
    ],
)
def test_extent_by_hand(share, members, expected):
    limits = Limits(max_tokens=8192, share_prefix=share)
    assert extent(stage_of(ALL), [torch.tensor(part) for part in members], limits) == expected


def test_samples_without_loss_are_not_fed():
    stage = stage_of([ALL[0], ALL[1], [0.0], ALL[3]])
    assert extent(stage, everything(stage), Limits(max_tokens=8192)) == Extent(15, 10 + 6 + 3, 3)


@pytest.mark.parametrize("share", [True, False])
def test_one_pass_holds_just_the_total(share):
    stage = stage_of(ALL)
    size = extent(stage, everything(stage), Limits(max_tokens=8192, share_prefix=share))
    prompts = [len(prompt) for prompt in PROMPTS]
    for tokens, passes in ((size.total, 1), (size.total - 1, 2)):
        limits = Limits(max_tokens=tokens, share_prefix=share)
        assert len(pack(prompts, GROUPS, LENGTHS, range(4), limits)) == passes
