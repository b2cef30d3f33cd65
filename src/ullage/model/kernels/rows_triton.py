"""The kernels of `kernels/rows.py`: a row is a lane."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
"""Rows of one program."""
OF_ROWS = ["limit", "ignore_eos", "running", "last", "drawn", "window_tokens", "window_logprobs"]
"""Newcomers' rows begin anywhere: no kernel is compiled for where."""


@triton.jit(do_not_specialize=["rows"])
def _find(  # noqa: ANN202 -- Triton's own types
    running, length, page_table, places, lengths, rows, table_stride,  # noqa: ANN001
    page: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < rows
    goes_on = tl.load(running + row, mask=inside, other=0) != 0
    cached = tl.load(length + row, mask=inside, other=0)
    number = tl.load(page_table + row.to(tl.int64) * table_stride + cached // page, mask=goes_on, other=0)
    place = number.to(tl.int64) * page + cached % page
    tl.store(places + row, tl.where(goes_on, place, -1), mask=inside)
    tl.store(lengths + row, tl.where(goes_on, cached + 1, 0).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=OF_ROWS)
def _note(  # noqa: ANN202
    tokens, logprobs, column, limit, ignore_eos, stop_ids, running, last, drawn, window_tokens,  # noqa: ANN001
    window_logprobs, rows, width, vocabulary,  # noqa: ANN001
    stops: tl.constexpr, nothing: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * block + tl.arange(0, block)
    inside = row < rows
    goes_on = tl.load(running + row, mask=inside, other=0) != 0
    token = tl.load(tokens + row, mask=inside, other=0)
    token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
    ends = row < 0
    for i in range(stops):
        ends = ends | (token == tl.load(stop_ids + i))
    ends = ends & (tl.load(ignore_eos + row, mask=inside, other=0) == 0)
    count = tl.load(drawn + row, mask=inside, other=0) + goes_on.to(tl.int64)
    ends = ends | (count >= tl.load(limit + row, mask=inside, other=0))
    place = row.to(tl.int64) * width + tl.load(column)
    tl.store(window_tokens + place, tl.where(goes_on, token, nothing), mask=inside)
    tl.store(window_logprobs + place, tl.load(logprobs + row, mask=inside, other=0.0), mask=inside)
    tl.store(last + row, token, mask=inside & goes_on)
    tl.store(drawn + row, count, mask=inside)
    tl.store(running + row, (goes_on & (ends == 0)).to(tl.int64), mask=inside)


def find(running: Tensor, length: Tensor, page_table: Tensor, places: Tensor, lengths: Tensor, page_size: int) -> None:
    rows = len(length)
    _find[(triton.cdiv(rows, BLOCK),)](
        running, length, page_table, places, lengths, rows, page_table.stride(0), page=page_size, block=BLOCK,
        num_warps=1,
    )  # fmt: skip


def note(
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
    rows = len(tokens)
    _note[(triton.cdiv(rows, BLOCK),)](
        tokens, logprobs, column, limit, ignore_eos, stop_ids, running, last, drawn, window_tokens, window_logprobs,
        rows, window_tokens.stride(0), vocabulary, stops=len(stop_ids), nothing=nothing, block=BLOCK, num_warps=1,
    )  # fmt: skip
