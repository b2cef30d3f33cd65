"""An optimizer's step over a piece of bfloat16 weights as one operator: everything is read once and written once.

The kernel is in `step_triton.py`, its plain-torch twins are the rules of `engine/rules.py`. Shapes: n elements.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ullage.model.kernels.operator import operator

BLOCK = 256
"""Moments that share a scale in 8 bits, as in arXiv:2110.02861."""
PERIOD = 65521
"""Elements after which the thresholds repeat that a master is rounded by: a CPU makes them once for a piece.

A prime, so that no two rows of a matrix have the same: what they round away alike would add up.
"""


@operator("ullage::step", mutates_args=("weights", "master", "mean", "mean_scale", "square", "square_scale"))
def step_(
    weights: Tensor,
    gradient: Tensor,
    master: Tensor | None,
    mean: Tensor | None,
    mean_scale: Tensor | None,
    square: Tensor | None,
    square_scale: Tensor | None,
    scale: float,
    decay: float,
    rate: float,
    betas: Sequence[float],
    correction: float,
    eps: float,
    words: Sequence[int],
    start: int,
) -> None:
    """Change the weights [n], their master [n] if they have one, and the moments.

    Moments [n] are float32, or 8-bit codes with a float32 scale for every block; without moments it is SGD. A master is
    rounded by thresholds; without one the weights are rounded stochastically.

    Args:
        gradient: [n], bfloat16 or float32; multiplied by `scale`.
        decay: what the weights are multiplied by.
        rate: the step's size, corrected for the first moment's start at zero.
        correction: what the second moment is multiplied by, for the same reason.
        words: two int32 words of random bits each, for the first moment's codes, the second's, and rounding.
        start: the first element's place among the thresholds.
    """
    from ullage.model.kernels.step_triton import step_into  # a trace needs only shapes

    step_into(
        weights, gradient, master, mean, mean_scale, square, square_scale,
        scale, decay, rate, betas, correction, eps, words, start,
    )  # fmt: skip
