"""GMPO (arXiv:2507.20673): the geometric mean of a sequence's token ratios, each clipped first."""

from __future__ import annotations

from ullage.algorithms import gspo
from ullage.maths import losses

CREDIT = "grpo"
AGGREGATION = "seq-mean-token-mean"
ONLY_AGGREGATION = True


class Loss(gspo.Loss):
    """Sequence ratio by geometric mean; the paper's clip is on log-ratios."""

    paper_clip = (0.4, 0.4)
    surrogate = staticmethod(losses.geo_mean)
    of_sequence = True
