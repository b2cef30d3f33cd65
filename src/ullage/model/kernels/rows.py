"""What surrounds the model in a step of decoding, as operators: one launch each instead of forty of a few numbers.

The kernels are in `rows_triton.py`, plain twins of both in `rollout/embedded/bookkeeping.py`.
Shapes: S rows, K steps of a window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ullage.model.kernels.operator import operator


@operator("ullage::find_places")
def find_places(running: Tensor, length: Tensor, page_table: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Place in the arena of each row's next token, -1 for none, and the tokens it attends to: int64 [S], int32 [S]."""
    from ullage.model.kernels.rows_triton import find  # a trace needs only shapes

    places, lengths = torch.empty_like(length), torch.empty_like(length, dtype=torch.int32)
    find(running, length, page_table, places, lengths, page_size)
    return places, lengths


@find_places.register_fake
def _(running: Tensor, length: Tensor, page_table: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    del running, page_table, page_size
    return torch.empty_like(length), torch.empty_like(length, dtype=torch.int32)


@operator("ullage::note_drawn", mutates_args=("running", "last", "drawn", "window_tokens", "window_logprobs"))
def note_drawn(
    tokens: Tensor,
    logprobs: Tensor,
    column: Tensor,
    limit: Tensor,
    ignore_eos: Tensor,
    stop_ids: Tensor,
    running: Tensor,
    last: Tensor,
    drawn: Tensor,
    window_tokens: Tensor,
    window_logprobs: Tensor,
    vocabulary: int,
    nothing: int,
) -> None:
    """Numbers of rows are [S], those of the window [S, 1 + K] with rows side by side, `column` [1]."""
    from ullage.model.kernels.rows_triton import note

    note(
        tokens, logprobs, column, limit, ignore_eos, stop_ids, running, last, drawn, window_tokens, window_logprobs,
        vocabulary, nothing,
    )  # fmt: skip
