"""The tensors of a packed pass: the documented example, holes in the mask, and the way back."""

import torch

from experience_samples import CPU
from ullage.batch.pack import Block
from ullage.batch.stages import Rollouts
from ullage.model.attention import Span
from ullage.model.packing import build

STAGE = Rollouts(
    prompts=((5, 6), (9,)),
    order_G=torch.arange(2),
    group_N=torch.tensor([0, 1, 0]),
    sample_N=torch.arange(3),
    responses=((3, 4, 2), (8,), (7, 2)),
    mask_NT=torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool),
    rollout_logprobs_NT=torch.zeros(3, 3),
    finish_reasons=("stop",) * 3,
)


def test_the_documented_example():
    packed = build(STAGE, [Block(0, (0, 2))], CPU, torch.float32)
    assert packed.input_ids.tolist() == [[5, 6, 3, 4, 7]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 2]]
    assert packed.predict_from.tolist() == [1, 2, 3, 1, 4]
    assert packed.targets.tolist() == [3, 4, 2, 7, 2]
    assert packed.samples.tolist() == [0, 2]
    assert packed.rows.tolist() == [0, 0, 0, 1, 1]
    assert packed.columns.tolist() == [0, 1, 2, 0, 1]
    assert list(packed.layout.spans) == [Span(0, 2, (2, 1))]


def test_several_blocks_and_a_response_of_one_token():
    packed = build(STAGE, [Block(1, (1,)), Block(0, (2,))], CPU, torch.float32)
    assert packed.input_ids.tolist() == [[9, 5, 6, 7]]
    assert packed.positions.tolist() == [[0, 0, 1, 2]]
    assert packed.predict_from.tolist() == [0, 2, 3]
    assert packed.targets.tolist() == [8, 7, 2]
    assert packed.samples.tolist() == [1, 2]
    assert list(packed.layout.spans) == [Span(0, 1, (0,)), Span(1, 2, (1,))]


def test_tokens_without_loss_are_fed_but_not_predicted():
    holed = STAGE.select(torch.arange(3))
    holed.mask_NT[0, 1] = False
    packed = build(holed, [Block(0, (0,))], CPU, torch.float32)
    assert packed.input_ids.tolist() == [[5, 6, 3, 4]]
    assert packed.predict_from.tolist() == [1, 3]
    assert packed.targets.tolist() == [3, 2]
    assert packed.columns.tolist() == [0, 2]


def test_scatter_places_values_and_returns_gradients():
    packed = build(STAGE, [Block(0, (0, 2)), Block(1, (1,))], CPU, torch.float32)
    values = torch.arange(1.0, 7.0, requires_grad=True)
    placed = packed.scatter(values, 3)
    assert placed.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 0.0], [6.0, 0.0, 0.0]]
    (gradient,) = torch.autograd.grad((placed * torch.arange(9.0).view(3, 3)).sum(), [values])
    assert gradient.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 6.0]
