"""Layers of a pass, counted by hand: what each keeps, where it waits, and the one that needs most."""

import pytest

from ullage.planner import components as c
from ullage.planner.components import MIB, Pass
from ullage.planner.model_shape import find_shape
from ullage.planner.stack import Stack

SHAPE = find_shape("Qwen2.5-7B")
T, H, I = 4096, 3584, 18944  # noqa: E741 -- the symbols of the forms
A = Pass(tokens=T, positions=1000)
FULL, INPUT = c.saved_by_layer(SHAPE, A), 2 * T * H
POSITIONS = 2 * 2 * T * 128


def stack(a=A, **more):
    return Stack(shape=SHAPE, a=a, **more)


def bytes_of(terms):
    return sum(term.bytes for term in terms)


def test_without_recompute_autograd_frees_a_tensor_before_the_third():
    layers = stack()
    assert layers.staying().bytes == 28 * FULL + POSITIONS
    assert bytes_of(layers.worst_layer()) == 28 * FULL + POSITIONS + 2 * T * (2 * I + H)
    assert layers.last_norm().bytes == 24 * H * T
    few = Pass(tokens=64, positions=64)
    beside = 2 * (64 * (I + H) + H * I)  # a weight's gradient is larger than a tensor of few tokens
    assert stack(few).worst_layer()[1].bytes == beside


def test_layers_that_run_again_are_spread_and_the_last_is_one_of_them():
    layers = stack(recomputed=7)
    assert [index for index, again in enumerate(layers.runs_again) if again] == [3, 7, 11, 15, 19, 23, 27]
    assert layers.staying().bytes == 21 * FULL + 7 * INPUT + POSITIONS
    assert layers.worst_layer()[1].bytes == FULL + 2 * T * (2 * I + H)


def test_the_first_layers_leave_one_by_one_and_spread_ones_two_at_a_time():
    first = stack(recomputed=28, leaving=27)
    assert first.leaves == [True] * 27 + [False]
    assert sum(first.moved) == 27 * INPUT
    assert first.staying().bytes == INPUT + POSITIONS
    assert first.worst_layer()[1].bytes == FULL + 2 * T * (2 * I + H)
    spread = stack(recomputed=28, leaving=9, ahead=True)
    assert [index for index, leaves in enumerate(spread.leaves) if leaves] == list(range(0, 27, 3))
    # At the last one, a layer is on its way back.
    assert bytes_of(spread.worst_layer()) == 19 * INPUT + POSITIONS + FULL + 2 * T * (2 * I + H) + INPUT


def test_what_is_cheap_is_made_again_and_results_of_products_leave():
    kept = c.kept_by_recompute(SHAPE, A, matmuls=True)
    small = 4 * T * 28  # normalisers of attention
    layers = stack(recomputed=28, matmuls=True, leaving=27)
    assert sum(layers.moved) == 27 * (kept - small)
    assert layers.staying().bytes == 28 * kept - 27 * (kept - small) + POSITIONS
    # An activation and a gated product, beside the gradients of two tensors of the MLP and a hidden state.
    assert layers.worst_layer()[1].bytes == 2 * T * 2 * I + 2 * T * (2 * I + H)


def test_small_tensors_stay_on_the_device():
    a = Pass(tokens=T, positions=1000, rank=16)
    layers = stack(a, leaving=27)
    small = 7 * 2 * T * 16 + 4 * T * 28 + 2 * 4 * T  # thin results, normalisers of attention and of two norms
    assert 2 * T * 512 > MIB > 4 * T * 28
    first = 2 * 2 * H * T + 4 * T  # below it nothing has a gradient
    assert sum(layers.moved) == 27 * (c.saved_by_layer(SHAPE, a) - small) - first


@pytest.mark.parametrize(("kind", "width"), [("nf4", 2), ("int8", 6)])
def test_a_quantised_weight_is_made_when_gradients_are_few(kind, width):
    few = Pass(tokens=64, positions=64, rank=8)
    layer = stack(few, quantisation=kind).worst_layer()[1].bytes
    each = 2 * 64 * I
    assert layer == 2 * 64 * H + (each + 2 * H * I if width == 2 else 6 * H * I)
    assert stack(few, quantisation=kind).last_forward().bytes == 2 * 64 * 3 * H + width * H * I
