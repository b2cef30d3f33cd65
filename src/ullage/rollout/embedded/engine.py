"""The embedded engine: samples completions with the trainer's own weights, tensors and cache on the same device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ullage.batch.pack import Limits
from ullage.model.language_model import LanguageModel
from ullage.rollout.embedded.cuda import Capture
from ullage.rollout.embedded.decoder import Decoder, rows_needed
from ullage.rollout.embedded.graphs import Capturing, Graphs
from ullage.rollout.embedded.pages import Pages, make_arena, pages_for
from ullage.rollout.embedded.session import Drawn, Session
from ullage.rollout.embedded.state import SlotState
from ullage.rollout.sampling import GroupRequest, Sample, Sampling

PREFILL_TOKENS, PREFILL_ELEMENTS = 16384, 1 << 24
"""Prompt tokens of one prefill pass, and elements of their hidden states, whichever is less: a narrow model's layer is
through with few tokens before the host has started the next."""
MOVING_ROPES = ("dynamic", "longrope")
"""Rotary embeddings that look at the longest sequence on the host and replace their numbers: not to be captured."""
WINDOW = 16
"""Steps between two looks at what was drawn, on a device that the host can run behind."""


class Engine:
    """Samples completions with the weights of the model it is given; nothing is copied, nothing is synchronised."""

    reads_trainer_weights = True
    """Its log-probs are the trainer's, so there is nothing to correct."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        slots: int,
        max_length: int,
        cache_tokens: int | None = None,
        lent: Tensor | None = None,
        window: int | None = None,
        deterministic: bool = False,
        share_prefix: bool = True,
        capture: Capturing | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """
        Args:
            slots: samples decoded at once.
            lent: memory that nothing else needs while samples are drawn; a cache that fits lies there.
            window: steps between two looks at what was drawn; with more than one the host stays a window behind.
            deterministic: the same tokens on a GPU, too, whatever else is decoded beside them; slower.
            share_prefix: on a GPU, the samples of a prompt read its keys and values once for all of them; what
                `deterministic` promises does not allow it.
            capture: in place of a device that is only traced; CUDA devices have their own.
            say: one line for the user.
        """
        self.model = model
        self.slots = slots
        self.max_length = max_length
        target = model.target
        per_sequence = pages_for(max_length) + 1  # one more for the copy of a partly filled prompt page
        num_pages = pages_for(cache_tokens) if cache_tokens else slots * per_sequence
        arena, self.is_lent = make_arena(model, num_pages, lent)
        self.pages = Pages(arena)
        hidden = model.module.config.get_text_config().hidden_size
        self.limits = Limits(max_tokens=min(PREFILL_TOKENS, PREFILL_ELEMENTS // hidden), max_sequences=slots)
        """Prompt tokens of one prefill pass, and samples decoded at once; a call may ask for less."""
        window = window or (1 if target.kind == "cpu" else WINDOW)
        state = SlotState(
            rows_needed(slots, model),
            pages=per_sequence,
            window=window,
            stop_ids=model.stop_ids,
            dtype=torch.promote_types(model.dtype, torch.float32),
            device=target.device,
        )
        if target.device.type == "cuda":
            capture = Capture(target.device)
        self.graphs = Graphs(None if _rope_type(model) in MOVING_ROPES else capture, say)
        self.decoder = Decoder(
            model,
            self.pages,
            state,
            self.graphs,
            slots=slots,
            window=window,
            lag=1 if window > 1 else 0,
            deterministic=deterministic,
            share_prefix=share_prefix,
        )

    @property
    def nbytes(self) -> int:
        """Memory of its own."""
        return 0 if self.is_lent else self.pages.arena.nbytes

    def session(self, limits: Limits | None = None) -> Session:
        """For requests that come and go; one at a time, and no `generate` before it is closed."""
        assert self.pages.free == self.pages.total, "another session is open"
        return Session(self.decoder, limits or self.limits)

    def generate(
        self,
        requests: Sequence[GroupRequest],
        sampling: Sampling,
        *,
        limits: Limits | None = None,
        finished: dict[tuple[int, int], Sample] | None = None,
        on_finish: Callable[[Sample], None] = lambda sample: None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Sample]:
        """All samples of all groups, ordered by group and index; `on_finish` sees each as soon as it ends.

        `on_progress(tokens so far, samples done)` is called after every window; what it raises ends the call.
        `finished`, by group and index, is filled as samples end: those in it when a call begins, which an earlier one
        has finished, are not drawn again.
        """
        finished = {} if finished is None else finished
        num_tokens = sum(len(sample.token_ids) for sample in finished.values())
        partial: defaultdict[tuple[int, int], _Partial] = defaultdict(_Partial)
        session = self.session(limits)
        try:
            indices = _submit(session, requests, sampling, finished)
            while not session.idle:
                for drawn in session.advance():
                    group = drawn.key
                    assert isinstance(group, int), "as submitted"
                    place = (group, indices[group][drawn.index])
                    sample = partial[place].add(place, drawn)
                    num_tokens += len(drawn.token_ids)
                    if sample is not None:
                        del partial[place]
                        finished[place] = sample
                        on_finish(sample)
                on_progress(num_tokens, len(finished))
        finally:
            session.close()
        return [finished[place] for place in sorted(finished)]

    def rehearse(self, requests: Sequence[GroupRequest], sampling: Sampling) -> None:
        """Need all the memory that `generate` would, without its time: the prompts, the first tokens, and the last."""
        session = self.session()
        try:
            _submit(session, requests, sampling, {})
            session.rehearse()
        finally:
            session.close()


@dataclass(slots=True)
class _Partial:
    """A sample so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    supports: list[Tensor] = field(default_factory=list)

    def add(self, place: tuple[int, int], drawn: Drawn) -> Sample | None:
        """The whole sample, with its last token."""
        self.token_ids += drawn.token_ids
        self.logprobs += drawn.logprobs
        self.supports += drawn.supports
        if drawn.finish_reason is None:
            return None
        return Sample(
            group=place[0],
            index=place[1],
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=drawn.finish_reason,
            supports=tuple(self.supports) or None,
        )


def _submit(
    session: Session,
    requests: Sequence[GroupRequest],
    sampling: Sampling,
    finished: dict[tuple[int, int], Sample],
) -> list[list[int]]:
    """Ask for all samples that are not there yet; for each group the indices of those that are asked for."""
    indices = []
    for group, request in enumerate(requests):
        wanted = [index for index in range(len(request.seeds)) if (group, index) not in finished]
        if len(wanted) < len(request.seeds):
            request = replace(request, seeds=tuple(request.seeds[index] for index in wanted))
        session.submit(group, request, sampling)
        indices.append(wanted)
    return indices


def _rope_type(model: LanguageModel) -> str:
    rope = getattr(model.module.config.get_text_config(), "rope_parameters", None) or {}
    return str(rope.get("rope_type", "default"))
