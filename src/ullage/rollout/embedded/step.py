"""One token for every row: through the model, the sampler and back into the state, without a value on the host.

The same code runs eagerly and inside a captured graph. Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ullage.model.fast_decoder import FastDecoder, supports
from ullage.model.head import without
from ullage.model.kernels.sample import sample_fused, sample_plain
from ullage.model.kernels.truncate import least_kept
from ullage.model.language_model import LanguageModel
from ullage.rollout.embedded.bookkeeping import feed_fused, feed_plain, note_fused, note_plain
from ullage.rollout.embedded.layouts import DecodeLayout
from ullage.rollout.embedded.pages import Pages
from ullage.rollout.embedded.state import Rows


def step(
    model: LanguageModel, pages: Pages, rows: Rows, *, truncates: bool, fast: FastDecoder | None = None
) -> Tensor | None:
    """Feed the last token of each row and draw the next; a row whose sample has ended goes along without effect.

    With `truncates`, some row's sampling has a top-p or top-k: gives the ids [S, V] that they left. `fast`: the model's
    own layers with fewer kernels.
    """
    feed = feed_fused(rows) if has_kernels(model) else feed_plain(rows, pages.scratch)
    layout = DecodeLayout(pages.arena, feed.places, feed.page_table, feed.lengths, model.target)
    if fast is None:
        hidden = model.hidden(rows.last[None], rows.length[None], layout)
    else:
        hidden = fast.hidden(rows.last, rows.length, pages.arena, feed.places, layout.read)
    rows.length.add_(rows.running)
    support = append(model, rows, hidden, rows.column, truncates=truncates)
    rows.column.add_(1)
    return support


def append(model: LanguageModel, rows: Rows, hidden: Tensor, column: Tensor, *, truncates: bool) -> Tensor | None:
    """Draw from what the model says of each row, note it in a column of the window, and end the samples that end.

    Hidden states may be more than the rows: those after them are nobody's.
    """
    logits = model.head.logits(hidden, 1.0)[: len(rows.last)]
    temperature, support = rows.temperature, None
    if truncates:
        greedy = temperature == 0
        logits = logits / torch.where(greedy, 1, temperature)[:, None]
        if has_kernels(model):
            # What is no number stays, so that the log-prob says so.
            support = ~(logits < least_kept(logits, rows.top_k, rows.top_p)[:, None])
        else:
            support = _kept(logits, rows.top_p[:, None], rows.top_k[:, None])
        logits, temperature = without(logits, support), torch.where(greedy, 0.0, 1.0).to(temperature.dtype)
    sample, note = (sample_fused, note_fused) if has_kernels(model) else (sample_plain, note_plain)
    tokens, logprobs = sample(logits, temperature, rows.seed, rows.drawn)
    note(rows, tokens, logprobs, column, model.head.weight.shape[0])
    return support


def has_kernels(model: LanguageModel) -> bool:
    """Whether the engine runs on kernels of its own; the arena's dtype is the model's."""
    return model.target.varlen_attention(model.dtype)


def fast_layers(model: LanguageModel) -> FastDecoder | None:
    """Where there are kernels for what lies between the model's matrix products."""
    return FastDecoder(model) if has_kernels(model) and supports(model) else None


def _kept(logits_SV: Tensor, top_p_S1: Tensor, top_k_S1: Tensor) -> Tensor:
    """[S, V] the top-k ids and, of those, the smallest set whose probability reaches top-p, by each row's own."""
    ordered, order = logits_SV.sort(-1, descending=True)
    keep = torch.arange(ordered.shape[-1], device=ordered.device) < top_k_S1
    p = torch.where(keep, ordered, -torch.inf).softmax(-1)
    keep &= (p.cumsum(-1) - p < top_p_S1) | (top_p_S1 >= 1)
    keep |= ordered.isnan()  # so that the log-prob says so
    return torch.zeros_like(keep).scatter(-1, order, keep)
