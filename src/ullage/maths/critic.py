"""What a critic is trained with and judged by."""

import torch
from torch import Tensor

from ullage.base.communicator import Communicator
from ullage.maths.masked import ALONE, statistics


def value_loss(values_NT: Tensor, old_values_NT: Tensor, returns_NT: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """Half the squared error, with the value kept within `clip` of the old one: (loss, where that was active).

    The larger of the two errors counts, so clipping never helps the critic (arXiv:2005.12729 §3).
    """
    kept = torch.minimum(torch.maximum(values_NT, old_values_NT - clip), old_values_NT + clip)
    free_error, kept_error = (values_NT - returns_NT).square(), (kept - returns_NT).square()
    return 0.5 * torch.maximum(free_error, kept_error), kept_error > free_error


def explained_variance(values_NT: Tensor, returns_NT: Tensor, mask_NT: Tensor, ranks: Communicator = ALONE) -> float:
    """1 - var(returns - values) / (var(returns) + 1e-5): 1 for a perfect critic, 0 for a constant one.

    0 for fewer than two tokens.
    """
    count, _, variance = statistics(returns_NT, mask_NT, ranks)
    _, _, unexplained = statistics(returns_NT - values_NT, mask_NT, ranks)
    return 0.0 if count < 2 else 1 - unexplained / (variance + 1e-5)
