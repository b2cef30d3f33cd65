"""From samples to the tensors of one packed forward pass, and back.

A block's row is `prompt, response 1 without its last token, response 2 without its last token, ...`; position ids of
every response continue its prompt. The token at place t predicts the next one, so each target knows the place it is
predicted from: the prompt's last token for the first token of every response.

Example: prompt (5 6), responses (3 4 2) and (7 2)
    input_ids     5 6 3 4 7
    positions     0 1 2 3 2
    predict_from  1 2 3 | 1 4        targets  3 4 2 | 7 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ullage.batch.pack import Block
from ullage.batch.stages import Rollouts
from ullage.model.attention import PackedLayout, Span
from ullage.model.target import Target, put


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One micro-batch, ready for the model. M targets: response tokens that carry loss."""

    input_ids: Tensor
    """[1, tokens]"""
    positions: Tensor
    """[1, tokens]"""
    layout: PackedLayout
    predict_from: Tensor
    """[M] place whose hidden state predicts the target."""
    targets: Tensor
    """[M] token ids."""
    samples: Tensor
    """Samples of the stage that are in this micro-batch; on the host, where stages are."""
    rows: Tensor
    """[M] row of the target within `samples`."""
    columns: Tensor
    """[M] response position of the target."""
    supports: tuple[Tensor, ...] | None = None
    """[M] the ids each target was drawn from, where not all."""

    def scatter(self, values_M: Tensor, width: int) -> Tensor:
        """[M] values -> [samples, width], zeros elsewhere; gradients flow back."""
        empty = values_M.new_zeros(len(self.samples), width)
        return empty.index_put((self.rows, self.columns), values_M)


def build(stage: Rollouts, blocks: Sequence[Block], target: Target, dtype: torch.dtype) -> Packed:
    """Lay the blocks out in one row."""
    ids: list[int] = []
    positions: list[int] = []
    spans: list[Span] = []
    samples: list[int] = []
    predict_from: list[int] = []
    targets: list[int] = []
    rows: list[int] = []
    columns: list[int] = []
    supports: list[Tensor] = []
    for block in blocks:
        prompt = stage.prompts[block.prompt]
        spans.append(Span(len(ids), len(prompt), tuple(len(stage.responses[i]) - 1 for i in block.samples)))
        last_of_prompt = len(ids) + len(prompt) - 1
        ids.extend(prompt)
        positions.extend(range(len(prompt)))
        for i in block.samples:
            response = stage.responses[i]
            places = [last_of_prompt, *range(len(ids), len(ids) + len(response) - 1)]
            carries_loss = stage.mask_NT[i, : len(response)].tolist()
            chosen = [t for t, carries in enumerate(carries_loss) if carries]
            predict_from.extend(places[t] for t in chosen)
            targets.extend(response[t] for t in chosen)
            rows.extend([len(samples)] * len(chosen))
            columns.extend(chosen)
            if stage.supports is not None:
                supports.extend(stage.supports[i][t] for t in chosen)
            samples.append(i)
            ids.extend(response[:-1])
            positions.extend(range(len(prompt), len(prompt) + len(response) - 1))

    def tensor(values: list[int]) -> Tensor:
        return put(torch.tensor(values, dtype=torch.long), target.device)

    return Packed(
        input_ids=tensor(ids)[None],
        positions=tensor(positions)[None],
        layout=PackedLayout(spans, target, dtype),
        predict_from=tensor(predict_from),
        targets=tensor(targets),
        samples=torch.tensor(samples, dtype=torch.long),
        rows=tensor(rows),
        columns=tensor(columns),
        supports=None if stage.supports is None else tuple(supports),
    )
