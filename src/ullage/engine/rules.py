"""Update rules on flat pieces of parameters: AdamW in full precision, AdamW with 8-bit moments, SGD; and rounding.

A rule changes numbers in float32 (float64 stays) that are the parameter itself, its master copy, or a wide copy; a
parameter of fewer bits is rounded afterwards. It never sees where its state lives or how a parameter was divided, and
neither changes its results: blocks do not cross pieces, and random bits belong to an element's place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ullage.base.seeds import derive
from ullage.model.kernels.step import BLOCK, PERIOD, step_

SMALLEST_IN_8_BITS = 4096
"""Parameters with fewer elements keep float32 moments, as there: norms and biases are few, and sensitive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyper:
    """One step's numbers."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    """From 1."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece lies, for random numbers that belong to an element and not to an order."""

    seed: int
    """Of this parameter; in this step, but for thresholds."""
    start: int
    """The piece's first element within its parameter."""

    def bits(self, count: int, purpose: str, beside: Tensor) -> Tensor:
        """[count] uniform whole numbers below 65536, where that tensor is."""
        first, second = self.words(purpose)
        # Products and sums are taken modulo 2**32; the multipliers are those of the lowbias32 hash, which leaves no
        # visible order in consecutive numbers. The second word keeps two streams from being one, shifted.
        x = beside.new_ones(count, dtype=torch.int32).cumsum_(0).add_(_signed(first - 1))
        x.bitwise_xor_(_shifted(x, 16)).mul_(0x7FEB352D)
        x.bitwise_xor_(_shifted(x, 15)).add_(second).mul_(_signed(0x846CA68B))
        return x.bitwise_xor_(_shifted(x, 16)).bitwise_and_(0xFFFF)

    def words(self, purpose: str) -> tuple[int, int]:
        """Two int32 that these bits follow from: what an element's number within the piece is added to, and a key."""
        key = derive(self.seed, purpose)
        return _signed(key + self.start), _signed(key >> 31)


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A kind of state: one entry for so many elements of a parameter."""

    dtype: torch.dtype
    elements: int = 1

    def entries(self, numel: int) -> int:
        return -(-numel // self.elements)


class Rule(Protocol):
    def state(self, numel: int) -> Mapping[str, StateTensor]:
        """What is kept for a parameter of that size."""

    def step_(self, work: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Hyper, place: Place) -> None:
        """Change `work` [n] and its state in place, given its gradient in the same dtype."""


class AdamW:
    """torch's fused AdamW (arXiv:1711.05101)."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def state(self, numel: int) -> Mapping[str, StateTensor]:
        del numel
        return {"exp_avg": StateTensor(self.dtype), "exp_avg_sq": StateTensor(self.dtype)}

    def step_(self, work: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Hyper, place: Place) -> None:
        del place
        torch._fused_adamw_(
            [work],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [torch.full((), float(hyper.step), device=work.device)],
            lr=hyper.learning_rate,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
        )


class AdamW8bit:
    """AdamW whose moments rest in 8 bits, with a float32 scale for every block.

    A code is the fourth root of a moment's share of the block's largest, rounded stochastically: in one step the second
    moment changes by a thousandth, less than half the distance of two codes, so that round-to-nearest would freeze it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._plain = AdamW(dtype)

    def state(self, numel: int) -> Mapping[str, StateTensor]:
        if numel < SMALLEST_IN_8_BITS:
            return self._plain.state(numel)
        scale = StateTensor(torch.float32, BLOCK)
        return {
            "exp_avg": StateTensor(torch.int8),
            "exp_avg_scale": scale,
            "exp_avg_sq": StateTensor(torch.uint8),
            "exp_avg_sq_scale": scale,
        }

    def step_(self, work: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Hyper, place: Place) -> None:
        if "exp_avg_scale" not in state:
            self._plain.step_(work, gradient, state, hyper, place)
            return
        beta1, beta2 = hyper.betas
        gradient = gradient.float()
        # Operations that round once on every device: none that it may fuse, no division by a number (CUDA multiplies).
        mean = decode(state["exp_avg"], state["exp_avg_scale"]).sub_(gradient).mul_(beta1).add_(gradient)
        square = decode(state["exp_avg_sq"], state["exp_avg_sq_scale"]).mul_(beta2)
        square.add_(gradient.square().mul_(1 - beta2))
        bits = place.bits(len(work), "exp_avg", work)
        encode(mean, state["exp_avg"], state["exp_avg_scale"], bits)
        bits = place.bits(len(work), "exp_avg_sq", work)
        encode(square, state["exp_avg_sq"], state["exp_avg_sq_scale"], bits)
        root = square.mul_(1 / (1 - beta2**hyper.step)).sqrt_().add_(hyper.eps)
        work.mul_(1 - hyper.learning_rate * hyper.weight_decay)
        work.sub_(mean.div_(root).mul_(hyper.learning_rate / (1 - beta1**hyper.step)))


class SGD:
    """Plain gradient descent, no state at all."""

    def __init__(self, dtype: torch.dtype) -> None:
        del dtype

    def state(self, numel: int) -> Mapping[str, StateTensor]:
        del numel
        return {}

    def step_(self, work: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Hyper, place: Place) -> None:
        del state, place
        work.mul_(1 - hyper.learning_rate * hyper.weight_decay).add_(gradient, alpha=-hyper.learning_rate)


def step_fused_(
    weights: Tensor,
    master: Tensor | None,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    hyper: Hyper,
    place: Place,
    thresholds: Place,
    *,
    scale: float,
) -> None:
    """Any of these rules on bfloat16 weights on CUDA, in one pass; which it is follows from the state.

    Args:
        master: of the weights, rounded by thresholds; without one they are rounded stochastically.
        scale: of the gradient.
    """
    beta1, beta2 = hyper.betas
    torch.autograd.graph.increment_version(weights)  # a graph that still needs them as they were has to notice
    rounding = place.words("rounding") if master is None else Place(thresholds.seed, 0).words("thresholds")
    step_(
        weights,
        gradient,
        master,
        state.get("exp_avg"),
        state.get("exp_avg_scale"),
        state.get("exp_avg_sq"),
        state.get("exp_avg_sq_scale"),
        scale,
        1 - hyper.learning_rate * hyper.weight_decay,
        hyper.learning_rate / (1 - beta1**hyper.step if "exp_avg" in state else 1),
        hyper.betas,
        1 / (1 - beta2**hyper.step),
        hyper.eps,
        [*place.words("exp_avg"), *place.words("exp_avg_sq"), *rounding],
        thresholds.start % PERIOD,
    )


# --- 8-bit moments ---


def encode(values: Tensor, codes: Tensor, scales: Tensor, bits: Tensor) -> None:
    """Float32 values [n] to codes [n], int8 with a sign or uint8 without, and a scale for each block.

    Up or down to the next code with the odds that keep the mean. Without a sign, only zero becomes zero: an update
    divides by the root of these numbers.
    """
    blocks = _blocks(values)
    size = blocks.abs()
    torch.amax(size, -1, out=scales)
    share = size.div_(scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None])
    top = _top(codes)
    # Only operations that round correctly, so that CPUs, GPUs, vectors and their remainders agree; a root may be wrong
    # in its last bit on a CPU, which at worst names the code's neighbour and gives it odds of one, or of none.
    low = share.sqrt().sqrt_().mul_(top).floor_().clamp_(max=top - 1)
    below = _power(low * (1 / top))
    odds = share.sub_(below).div_(_power((low + 1).mul_(1 / top)).sub_(below))
    low.add_(_blocks(bits.float().add_(0.5).div_(65536)) < odds)
    if codes.dtype == torch.int8:
        low.mul_(blocks.sign())
    else:
        low.clamp_(min=1).mul_(blocks > 0)
    codes.copy_(low.flatten()[: len(codes)])


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 values that codes stand for."""
    share = codes.float().mul_(1 / _top(codes))
    blocks = _blocks(share.sign().mul_(_power(share.abs_())))
    return (blocks * scales[:, None]).flatten()[: len(codes)]


def _top(codes: Tensor) -> int:
    return torch.iinfo(codes.dtype).max


def _power(root: Tensor) -> Tensor:
    """The fourth power, in place."""
    return root.square_().square_()


def _blocks(values: Tensor) -> Tensor:
    """[blocks, BLOCK]; the last block is filled up with zeros."""
    missing = -len(values) % BLOCK
    return torch.nn.functional.pad(values, (0, missing)).view(-1, BLOCK) if missing else values.view(-1, BLOCK)


# --- rounding ---


def round_stochastically_(narrow: Tensor, wide: Tensor, place: Place) -> None:
    """Float32 to bfloat16, up or down with the odds that keep the mean."""
    _lift_(narrow, wide, place.bits(len(wide), "rounding", wide))


def round_by_thresholds_(narrow: Tensor, wide: Tensor, place: Place) -> None:
    """Float32 to bfloat16, up or down by a threshold of each weight's own, the same in every step.

    Weights begin at numbers that bfloat16 has, and a step of reinforcement learning is a hundredth of the distance to
    the next one: rounded to nearest, nothing moves for many steps. With random thresholds, so many weights have moved
    that their mean follows the master from the first step on, and those that have not moved stay where they are.
    """
    start = place.start % PERIOD
    if start + len(wide) <= PERIOD:
        _lift_(narrow, wide, Place(place.seed, start).bits(len(wide), "thresholds", wide))
        return
    thresholds = Place(place.seed, 0).bits(PERIOD, "thresholds", wide)
    head = -start % PERIOD
    body = head + (len(wide) - head) // PERIOD * PERIOD
    _lift_(narrow[:head], wide[:head], thresholds[start : start + head])
    scratch = wide.new_empty(2, 4, PERIOD)  # what a CPU's cache holds
    for part in range(head, body, 4 * PERIOD):
        rows = slice(part, min(part + 4 * PERIOD, body))
        _lift_(narrow[rows].view(-1, PERIOD), wide[rows].view(-1, PERIOD), thresholds, scratch)
    _lift_(narrow[body:], wide[body:], thresholds[: len(wide) - body])


def _lift_(narrow: Tensor, wide: Tensor, bits: Tensor, scratch: Tensor | None = None) -> None:
    """The 16 bits to be lost meet 16 others, and carry or not. What is no number stays none, also one from a GPU."""
    lifted, least = [torch.empty_like(wide) for _ in range(2)] if scratch is None else scratch[:, : len(wide)]
    torch.add(wide.view(torch.int32), bits, out=lifted.view(torch.int32)).bitwise_and_(-0x10000)
    # Both let through what is no number, and change nothing else: a mask would take a CPU four times as long.
    torch.maximum(lifted, torch.minimum(lifted, wide, out=least), out=lifted)
    narrow.copy_(lifted)


def _signed(word: int) -> int:
    """The int32 with the same bits."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def _shifted(x: Tensor, count: int) -> Tensor:
    """Shifted right, filled with zeros."""
    return (x >> count).bitwise_and_((1 << (32 - count)) - 1)
