"""What surrounds the model in a step: where the new tokens go, and what follows from those that were drawn.

Each for any device, and by an operator of `model/kernels/rows.py` for CUDA. Shapes: S rows, P pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ullage.model.kernels.rows import find_places, note_drawn
from ullage.rollout.embedded.pages import PAGE_SIZE
from ullage.rollout.embedded.state import NOTHING, Rows


class Feed(NamedTuple):
    """How the last tokens of all rows are fed."""

    places: Tensor
    """[S] where keys and values go."""
    lengths: Tensor
    """[S] int32, tokens that each attends to, itself included."""
    page_table: Tensor
    """[S, P] int32"""


def feed_plain(rows: Rows, scratch: int) -> Feed:
    """Rows whose sample has ended write to nobody's page and attend to that one token."""
    running = rows.running.bool()
    page = rows.page_table.gather(1, (rows.length // PAGE_SIZE).clamp(max=rows.page_table.shape[1] - 1)[:, None])[:, 0]
    return Feed(
        torch.where(running, page.long() * PAGE_SIZE + rows.length % PAGE_SIZE, scratch * PAGE_SIZE),
        torch.where(running, rows.length + 1, 1).int(),
        torch.where(running[:, None], rows.page_table, scratch),
    )


def feed_fused(rows: Rows) -> Feed:
    """Rows whose sample has ended write nowhere and attend to nothing, which the kernels for CUDA understand."""
    places, lengths = find_places(rows.running, rows.length, rows.page_table, PAGE_SIZE)
    return Feed(places, lengths, rows.page_table)


def note_plain(rows: Rows, tokens: Tensor, logprobs: Tensor, column: Tensor, vocabulary: int) -> None:
    """Write what was drawn to a column of the window, and end the samples that end."""
    running = rows.running.bool()
    # A model that has diverged may give anything, which the next step would look up before the host has seen it.
    tokens = tokens.clamp(0, vocabulary - 1)
    rows.tokens.index_copy_(1, column, torch.where(running, tokens, NOTHING)[:, None])
    rows.logprobs.index_copy_(1, column, logprobs[:, None])
    rows.last.copy_(torch.where(running, tokens, rows.last))
    rows.drawn.add_(rows.running)
    stops = (tokens[:, None] == rows.stop_ids).any(1) & (rows.ignore_eos == 0)
    rows.running.mul_(~(stops | (rows.drawn >= rows.limit)))


def note_fused(rows: Rows, tokens: Tensor, logprobs: Tensor, column: Tensor, vocabulary: int) -> None:
    """As `note_plain`."""
    note_drawn(
        tokens,
        logprobs,
        column,
        rows.limit,
        rows.ignore_eos,
        rows.stop_ids,
        rows.running,
        rows.last,
        rows.drawn,
        rows.tokens,
        rows.logprobs,
        vocabulary,
        NOTHING,
    )
