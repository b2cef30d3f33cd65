"""One token for every row: through the model, the sampler and back into the state, without a value on the host.

The same code runs eagerly and inside a captured graph. Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from ullage.model.fast_decoder import FastDecoder, supports
from ullage.model.language_model import LanguageModel
from ullage.rollout.embedded.bookkeeping import feed_fused, feed_plain, note_fused, note_plain
from ullage.rollout.embedded.layouts import DecodeLayout, Shared
from ullage.rollout.embedded.pages import Pages
from ullage.rollout.embedded.sampler import draw
from ullage.rollout.embedded.state import Rows


def step(
    model: LanguageModel,
    pages: Pages,
    rows: Rows,
    *,
    truncates: bool,
    shares: bool = False,
    fast: FastDecoder | None = None,
) -> Tensor | None:
    """Feed the last token of each row and draw the next; a row whose sample has ended goes along without effect.

    With `truncates`, some row's sampling has a top-p or top-k: gives the ids [S, V] that they left. With `shares`,
    beginnings that rows have in common are read once, where there are kernels of our own. `fast`: the model's own
    layers with fewer kernels.
    """
    feed = feed_fused(rows) if has_kernels(model) else feed_plain(rows, pages.scratch)
    layout = DecodeLayout(pages.arena, feed.places, feed.page_table, feed.lengths, model.target)
    if shares:
        layout.shared = Shared(rows.starts, rows.members)
    if fast is None:
        hidden = model.hidden(rows.last[None], rows.length[None], layout)
    else:
        hidden = fast.hidden(rows.last, rows.length, layout.attend_projected)
    rows.length.add_(rows.running)
    support = append(model, rows, hidden, rows.column, truncates=truncates)
    rows.column.add_(1)
    return support


def append(model: LanguageModel, rows: Rows, hidden: Tensor, column: Tensor, *, truncates: bool) -> Tensor | None:
    """Draw from what the model says of each row, note it in a column of the window, and end the samples that end.

    Hidden states may be more than the rows: those after them are nobody's.
    """
    logits = model.head.logits(hidden, 1.0)[: len(rows.last)]
    drawn = draw(
        logits,
        rows.temperature,
        rows.top_p,
        rows.top_k,
        rows.seed,
        rows.drawn,
        truncates=truncates,
        fused=has_kernels(model),
    )
    note = note_fused if has_kernels(model) else note_plain
    note(rows, drawn.tokens, drawn.logprobs, column, model.head.weight.shape[0])
    return drawn.support_SV


def has_kernels(model: LanguageModel) -> bool:
    """Whether the engine runs on kernels of its own; the arena's dtype is the model's."""
    return model.target.varlen_attention(model.dtype)


def fast_layers(model: LanguageModel) -> FastDecoder | None:
    """Where there are kernels for what lies between the model's matrix products."""
    return FastDecoder(model) if has_kernels(model) and supports(model) else None
