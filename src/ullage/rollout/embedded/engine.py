"""Continuous batching over slots: admit, prefill each prompt once, decode all running samples, one token at a time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ullage.base.errors import DoesNotFitError, NumericsError
from ullage.batch.pack import Limits
from ullage.model.attention import Span
from ullage.model.head import MIN_ROWS
from ullage.model.language_model import LanguageModel
from ullage.rollout.embedded.layouts import DecodeLayout, PrefillLayout
from ullage.rollout.embedded.pages import PAGE_SIZE, Pages, make_arena, pages_for
from ullage.rollout.embedded.sampler import draw, ids_of
from ullage.rollout.sampling import GroupRequest, Sample, Sampling

PREFILL_TOKENS = 4096
"""Prompt tokens of one prefill pass."""


@dataclass(slots=True)
class _Group:
    """A prompt in the cache: its pages, and the hidden state its first tokens are drawn from."""

    prompt: tuple[int, ...]
    unstarted: int
    max_tokens: int
    pages: list[int] = field(default_factory=list)
    last_hidden: Tensor | None = None


@dataclass(slots=True)
class _Running:
    """A sample being decoded in a slot."""

    group: int
    index: int
    seed: int
    slot: int
    pages: list[int]
    cached: int
    """Tokens in the cache."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    supports: list[Tensor] = field(default_factory=list)
    reason: str = ""


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
    ) -> None:
        """`lent`: memory that nothing else needs while samples are drawn; a cache that fits lies there."""
        self.model = model
        self.slots = slots
        self.max_length = max_length
        per_sequence = pages_for(max_length) + 1  # one more for the copy of a partly filled prompt page
        num_pages = pages_for(cache_tokens) if cache_tokens else slots * per_sequence
        arena, self.is_lent = make_arena(model, num_pages, lent)
        self.pages = Pages(arena)
        self.limits = Limits(max_tokens=PREFILL_TOKENS, max_sequences=slots)
        """Prompt tokens of one prefill pass, and samples decoded at once; a call may ask for less."""
        self._page_table = torch.zeros(slots, per_sequence, dtype=torch.long, device=model.target.device)

    @property
    def nbytes(self) -> int:
        """Memory of its own."""
        return 0 if self.is_lent else self.pages.arena.nbytes

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[GroupRequest],
        sampling: Sampling,
        *,
        limits: Limits | None = None,
        finished: dict[tuple[int, int], Sample] | None = None,
        on_finish: Callable[[Sample], None] = lambda sample: None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_token: Callable[[int, int, int], None] = lambda group, index, token: None,
    ) -> list[Sample]:
        """All samples of all groups, ordered by group and index; `on_finish` sees each as soon as it ends.

        `on_progress(tokens so far, samples done)` is called after every token; what it raises ends the call.
        `on_token(group, index, token)` sees every token as it is drawn. `finished`, by group and index, is filled as
        samples end: those in it when a call begins, which an earlier one has finished, are not drawn again.
        """
        if self.is_lent:
            self.pages.arena.zero_()
        batch = _Batch(self, requests, sampling, limits or self.limits, {} if finished is None else finished)
        batch.on_finish, batch.on_token = on_finish, on_token
        try:
            while batch.waiting or batch.running:
                batch.admit()
                batch.decode()
                on_progress(batch.num_tokens, len(batch.finished))
        finally:
            batch.release()
        return [batch.finished[key] for key in sorted(batch.finished)]

    @torch.no_grad()
    def rehearse(self, requests: Sequence[GroupRequest], sampling: Sampling) -> None:
        """Need all the memory that `generate` would, without its time: the prompts, the first tokens, and the last."""
        batch = _Batch(self, requests, sampling, self.limits, {})
        try:
            batch.admit()
            for run in batch.running:
                group = batch.groups[run.group]
                run.cached = len(group.prompt) + group.max_tokens - 1
            batch.decode()
        finally:
            batch.release()


class _Batch:
    """One call of `generate`."""

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[GroupRequest],
        sampling: Sampling,
        limits: Limits,
        finished: dict[tuple[int, int], Sample],
    ) -> None:
        self.engine, self.model, self.pages = engine, engine.model, engine.pages
        self.device = engine.model.target.device
        self.sampling = sampling
        self.limits = limits
        self.on_finish: Callable[[Sample], None] = lambda sample: None
        self.on_token: Callable[[int, int, int], None] = lambda group, index, token: None
        self.waiting = deque(
            (group, index, seed)
            for group, request in enumerate(requests)
            for index, seed in enumerate(request.seeds)
            if (group, index) not in finished
        )
        unstarted = Counter(group for group, _, _ in self.waiting)
        self.groups = [
            _Group(request.prompt, unstarted[group], request.max_tokens or sampling.max_tokens)
            for group, request in enumerate(requests)
        ]
        self.running: list[_Running] = []
        self.seated: dict[int, _Running] = {}
        """By slot: every sample that holds pages, whatever it is in the middle of."""
        self.finished = finished
        slots = min(engine.slots, limits.max_sequences or engine.slots)
        self.free_slots = list(range(slots - 1, -1, -1))
        self.num_tokens = sum(len(sample.token_ids) for sample in finished.values())

    def admit(self) -> None:
        """Move waiting samples into free slots while their pages, reserved to full length, fit the arena."""
        newcomers: list[_Running] = []
        to_prefill: list[_Group] = []
        while self.waiting and self.free_slots:
            group = self.groups[self.waiting[0][0]]
            shared = len(group.prompt) // PAGE_SIZE
            own = pages_for(len(group.prompt) + group.max_tokens) - shared
            prompt_pages = 0 if group.pages else pages_for(len(group.prompt))
            if own + prompt_pages > self.pages.free:
                break
            if not group.pages:
                group.pages = self.pages.take(prompt_pages)
                to_prefill.append(group)
            newcomers.append(self._seat(group, shared, own))
        if not newcomers and not self.running and self.waiting:
            raise DoesNotFitError(
                f"the KV cache of {self.pages.total * PAGE_SIZE} tokens cannot hold one sequence",
                "raise actor_rollout_ref.rollout.kv_cache_tokens, or lower data.max_response_length",
            )
        self._prefill(to_prefill)
        if newcomers:
            self._start(newcomers)

    def _seat(self, group: _Group, shared: int, own: int) -> _Running:
        number, index, seed = self.waiting.popleft()
        pages = group.pages[:shared]
        self.pages.share(pages)
        slot = self.free_slots.pop()
        run = _Running(number, index, seed, slot, pages + self.pages.take(own), len(group.prompt))
        self.seated[slot] = run
        self.engine._page_table[slot, : len(run.pages)] = torch.tensor(run.pages, device=self.device)
        return run

    def _prefill(self, groups: list[_Group]) -> None:
        """Forward each prompt once, in passes of bounded size."""
        passes: list[list[_Group]] = []
        room = 0
        for group in groups:
            if not passes or len(group.prompt) > room:
                passes.append([])
                room = max(self.limits.max_tokens, len(group.prompt))
            passes[-1].append(group)
            room -= len(group.prompt)
        for part in passes:
            part += part[:1] * (MIN_ROWS - sum(len(group.prompt) for group in part))  # as in `decode`
            ids = [token for group in part for token in group.prompt]
            positions = [i for group in part for i in range(len(group.prompt))]
            places = [g.pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE for g in part for i in range(len(g.prompt))]
            spans, start = [], 0
            for group in part:
                spans.append(Span(start, len(group.prompt), ()))
                start += len(group.prompt)
            layout = PrefillLayout(spans, self.pages.arena, self._tensor(places), self.model.target)
            hidden = self.model.hidden(self._tensor(ids)[None], self._tensor(positions)[None], layout)
            for group, span in zip(part, spans, strict=True):
                group.last_hidden = hidden[span.start + span.prompt - 1].clone()

    def _start(self, newcomers: list[_Running]) -> None:
        """Draw each newcomer's first token from its prompt's last hidden state."""
        hidden = []
        for run in newcomers:
            group = self.groups[run.group]
            if len(group.prompt) % PAGE_SIZE:  # the last prompt page is partly filled: each sample writes its own copy
                self.pages.copy(group.pages[-1], run.pages[len(group.prompt) // PAGE_SIZE])
            assert group.last_hidden is not None, "prefilled before it starts"
            hidden.append(group.last_hidden)
            group.unstarted -= 1
            if group.unstarted == 0:
                self.pages.give_back(group.pages)
                group.last_hidden = None
        self._append(newcomers, torch.stack(hidden))

    def decode(self) -> None:
        """One token for every running sample."""
        if not self.running:
            return
        # Repeating a row is harmless: the copy writes the same key and value to the same place.
        rows = self.running + self.running[:1] * (MIN_ROWS - len(self.running))
        slots = self._tensor([run.slot for run in rows])
        lengths = self._tensor([run.cached + 1 for run in rows])
        width = pages_for(max(run.cached + 1 for run in self.running))
        page_table = self.engine._page_table[slots, :width]
        at = lengths - 1
        pages = page_table.gather(1, (at // PAGE_SIZE)[:, None])[:, 0]
        target = self.model.target
        layout = DecodeLayout(self.pages.arena, pages * PAGE_SIZE + at % PAGE_SIZE, page_table, lengths, target)
        last = self._tensor([run.tokens[-1] for run in rows])
        hidden = self.model.hidden(last[None], at[None], layout)[: len(self.running)]
        for run in self.running:
            run.cached += 1
        active, self.running = self.running, []
        self._append(active, hidden)

    def _append(self, runs: list[_Running], hidden: Tensor) -> None:
        """Draw the next token of each, finish those that end."""
        seeds = self._tensor([run.seed for run in runs])
        positions = self._tensor([len(run.tokens) for run in runs])
        logits = self.model.head.logits(hidden, self.sampling.temperature or 1.0)
        tokens, logprobs, support_SV = draw(logits, seeds, positions, self.sampling)
        if not bool(torch.isfinite(logprobs).all()):
            raise NumericsError("the model gives non-finite logits", "lower the learning rate, or check the weights")
        if support_SV is not None and self.sampling.keep_supports:
            for run, ids in zip(runs, ids_of(support_SV), strict=True):
                run.supports.append(ids)
        for run, token, logprob in zip(runs, tokens.tolist(), logprobs.tolist(), strict=True):
            run.tokens.append(token)
            run.logprobs.append(logprob)
            self.on_token(run.group, run.index, token)
            if token in self.model.stop_ids and not self.sampling.ignore_eos:
                self._finish(run, "stop")
            elif len(run.tokens) == self.groups[run.group].max_tokens:
                self._finish(run, "length")
            else:
                self.running.append(run)
        self.num_tokens += len(runs)

    def _finish(self, run: _Running, reason: str) -> None:
        del self.seated[run.slot]
        self.pages.give_back(run.pages)
        self.free_slots.append(run.slot)
        sample = Sample(
            group=run.group,
            index=run.index,
            token_ids=tuple(run.tokens),
            logprobs=tuple(run.logprobs),
            finish_reason=reason,
            supports=tuple(run.supports) or None,
        )
        self.finished[run.group, run.index] = sample
        self.on_finish(sample)

    def release(self) -> None:
        """Give every page back, also after an error half-way."""
        for run in self.seated.values():
            self.pages.give_back(run.pages)
        for group in self.groups:
            if group.unstarted and group.pages:
                self.pages.give_back(group.pages)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)
