"""Continuous batching: requests come at any time, wait for a row and pages, are decoded in windows, and leave.

Prompts of a group lie in the cache once. A sample gets pages for one window at a time; where there are none left, the
youngest gives its own back and is prefilled again later, to go on exactly where it was: a token follows from the
sample's seed and its position alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ullage.base.errors import DoesNotFitError, NumericsError
from ullage.batch.pack import Limits
from ullage.rollout.embedded.cuda import Arriving
from ullage.rollout.embedded.decoder import Decoder, Text
from ullage.rollout.embedded.pages import PAGE_SIZE, pages_for
from ullage.rollout.embedded.requests import Drawn, Group, Run, shared_beginnings
from ullage.rollout.embedded.state import NOTHING, Row
from ullage.rollout.sampling import GroupRequest, Sampling

__all__ = ["Drawn", "Session"]

REFILL = 16
"""Part of the rows that have to be free before newcomers come in."""


class _Supports(NamedTuple):
    """The ids that tokens of one column of a window were drawn from."""

    first_row: int
    ids: list[Tensor]


class _Window(NamedTuple):
    """Tokens on their way to the host."""

    runs: list[Run]
    """By row."""
    arriving: Arriving
    columns: int
    supports: dict[int, _Supports]
    """By column."""


@dataclass(slots=True)
class _Admission:
    """Samples that come in together, and what has to be done before they can begin."""

    newcomers: list[Run] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    groups: list[Group | None] = field(default_factory=list)
    """For each text, whose prompt it is; None: a sample that goes on."""
    copied: list[int] = field(default_factory=list)
    """Partly filled pages of prompts, and the pages of samples that they are copied to."""
    copies: list[int] = field(default_factory=list)


class Session:
    """One user of an engine, alone with it until it is closed."""

    def __init__(self, decoder: Decoder, limits: Limits) -> None:
        self._decoder, self._pages = decoder, decoder.pages
        self._limits = limits
        self._slots = min(decoder.slots, limits.max_sequences or decoder.slots)
        self._groups: dict[Hashable, Group] = {}
        self._waiting: deque[Run] = deque()
        self._rows: list[Run] = []
        """In the order of the device's rows."""
        self._placed = 0
        """Rows that the device takes for somebody's."""
        self._reseated = True
        """Since the device was last told which rows have their beginnings in common."""
        self._windows: deque[_Window] = deque()
        self._supports: dict[int, _Supports] = {}
        self._ready: list[Drawn] = []
        self._admitted = 0
        decoder.begin()

    @property
    def idle(self) -> bool:
        """Nothing waits or runs, and nothing is left to be told."""
        return not self._groups and not self._ready

    def submit(self, key: Hashable, request: GroupRequest, sampling: Sampling) -> None:
        """Ask for samples; `advance` gives them under the key, which is free again when all have ended."""
        assert key not in self._groups, "a key stands for one request at a time"
        if not request.seeds:
            return
        group = Group(key, request.prompt, sampling, request.max_tokens or sampling.max_tokens)
        self._check_fits(group, len(request.seeds))
        group.samples = [Run(group, index, seed) for index, seed in enumerate(request.seeds)]
        group.unstarted = group.unfinished = len(group.samples)
        self._groups[key] = group
        self._waiting.extend(group.samples)

    def cancel(self, key: Hashable) -> None:
        """Forget a request; nothing more is told of it."""
        group = self._groups.pop(key, None)
        if group is None:
            return
        self._release(group)
        self._waiting = deque(run for run in self._waiting if run.group is not group)
        self._rows = [run for run in self._rows if run.seated]
        self._ready = [drawn for drawn in self._ready if drawn.key != key]

    @torch.no_grad()
    def advance(self) -> list[Drawn]:
        """Admit what fits and run one window. What the host has seen by now, which may be nothing yet."""
        self._grow()
        self._admit()
        lag = 0 if self._keeps_supports else self._decoder.lag
        if lag == 0 and any(run.bound == 1 for run in self._rows):
            self._send(steps=0)  # samples that ended with their first token need no step
            self._collect(0)
            self._order_rows()
        launched = bool(self._rows)
        if launched:
            self._run_window()
        self._collect(lag if launched else 0)
        ready, self._ready = self._ready, []
        return ready

    @torch.no_grad()
    def rehearse(self) -> None:
        """Need the memory of the largest window, without its time or its results."""
        self._admit()
        self._share()
        self._decoder.run(len(self._rows), 1, self._decoder.state.pages, truncates=_truncates(self._rows))

    def close(self) -> None:
        """Every page back, also after an error half-way."""
        for group in self._groups.values():
            self._release(group)
        self._groups.clear()
        self._waiting.clear()
        self._windows.clear()
        self._rows = []

    # --- coming and going ---

    def _check_fits(self, group: Group, count: int) -> None:
        tokens = len(group.prompt) + group.limit
        # A prompt that others still begin from keeps its last, partly filled page.
        kept = 1 if len(group.prompt) % PAGE_SIZE and count > 1 else 0
        if pages_for(tokens) + kept > self._pages.total:
            raise DoesNotFitError(
                f"the KV cache of {self._pages.total * PAGE_SIZE} tokens cannot hold one sequence",
                "raise actor_rollout_ref.rollout.kv_cache_tokens, or lower data.max_response_length",
            )
        if pages_for(tokens) > self._decoder.state.pages:
            longest = self._decoder.state.pages * PAGE_SIZE
            raise DoesNotFitError(
                f"a sequence of {tokens} tokens is longer than the {longest} that the engine was made for",
                "shorten the prompt, or ask for fewer tokens",
            )

    def _admit(self) -> None:
        """Move waiting samples into free rows while there are pages for their first window."""
        admission = _Admission()
        # A pass over a prompt or two takes as long as one over many: with many waiting, they come in together.
        enough = min(len(self._waiting), max(1, self._slots // REFILL))
        while self._waiting and self._slots - len(self._rows) >= enough:
            others = len(self._rows) + len(admission.newcomers)
            if others == self._slots:
                break
            if self._seat(self._waiting[0], others, admission):
                admission.newcomers.append(self._waiting.popleft())
            elif others or not self._forget_prompts():
                break
        assert self._rows or admission.newcomers or not self._waiting, "what fits the cache gets its turn"
        self._order_rows()
        if admission.newcomers:
            hidden = self._decoder.prefill(admission.texts, self._limits.max_tokens)
            for group, last in zip(admission.groups, hidden, strict=True):
                if group is not None:
                    group.last_hidden = last
            self._pages.copy(admission.copied, admission.copies)
            self._start(admission.newcomers)

    def _seat(self, run: Run, others: int, admission: _Admission) -> bool:
        """Pages for its first window, if there are any beside one that each of the others may need next."""
        group, prompt = run.group, len(run.group.prompt)
        inherits = run.is_fresh and group.unstarted == 1  # the last to begin takes the prompt's pages as they are
        shared = 0 if not run.is_fresh else pages_for(prompt) if inherits else prompt // PAGE_SIZE
        own = pages_for(run.reach(self._decoder.window)) - shared
        missing = pages_for(prompt) if run.is_fresh and not group.pages else 0
        if own + missing + others > self._pages.free:
            return False
        if missing:
            group.pages = self._pages.take(missing)
            admission.texts.append(Text(group.prompt, group.pages))
            admission.groups.append(group)
        kept = group.pages[:shared]
        if inherits:
            group.pages = []
        else:
            self._pages.share(kept)
        run.pages = kept + self._pages.take(own)
        if not run.is_fresh:
            admission.texts.append(Text((*group.prompt, *run.tokens[:-1]), run.pages))
            admission.groups.append(None)
        elif prompt % PAGE_SIZE and not inherits:
            admission.copied.append(group.pages[-1])
            admission.copies.append(run.pages[shared])
        if not run.age:
            self._admitted += 1
            run.age = self._admitted
        group.unstarted -= run.is_fresh
        run.seated = True
        return True

    def _start(self, newcomers: list[Run]) -> None:
        """Give each a row; those that begin draw their first token."""
        newcomers = sorted(newcomers, key=lambda run: not run.is_fresh)
        first_row = len(self._rows)
        self._decoder.state.place(
            first_row,
            [
                Row(
                    pages=run.pages,
                    length=len(run.group.prompt) + max(0, len(run.tokens) - 1),
                    last=run.tokens[-1] if run.tokens else 0,
                    drawn=len(run.tokens),
                    limit=run.group.limit,
                    seed=run.seed,
                    sampling=run.group.sampling,
                )
                for run in newcomers
            ],
        )
        for row, run in enumerate(newcomers, start=first_row):
            run.row, run.entered = row, len(run.pages)
        self._rows += newcomers
        self._placed, self._reseated = len(self._rows), True
        fresh = [run for run in newcomers if run.is_fresh]
        if not fresh:
            return
        hidden = [run.group.last_hidden for run in fresh if run.group.last_hidden is not None]
        assert len(hidden) == len(fresh), "prefilled before they start"
        support = self._decoder.start(first_row, hidden, truncates=_truncates(fresh))
        if support is not None and any(run.group.keeps_supports for run in fresh):
            self._supports[0] = _Supports(first_row, self._decoder.ids_of(support))
        for run in fresh:
            run.bound = 1
            if not run.group.unstarted:
                run.group.last_hidden = None

    def _leave(self, runs: list[Run]) -> None:
        for run in runs:
            run.seated = False
            self._pages.give_back(run.pages)
            run.pages = []
        self._rows = [run for run in self._rows if run.seated]

    def _release(self, group: Group) -> None:
        self._leave([run for run in group.samples if run.pages])
        self._pages.give_back(group.pages)
        group.pages = []

    # --- pages ---

    def _grow(self) -> None:
        """Pages for the next window of every row, the oldest first."""
        rows, window = sorted(self._rows, key=lambda run: run.age), self._decoder.window
        missing = [run.missing_pages(window) for run in rows]
        if sum(missing) <= self._pages.free:  # most windows: all at once
            taken = iter(self._pages.take(sum(missing)))
            for run, count in zip(rows, missing, strict=True):
                run.pages += islice(taken, count)
            return
        for run in rows:
            while run.seated and (count := run.missing_pages(window)):
                if count <= self._pages.free:
                    run.pages += self._pages.take(count)
                else:
                    self._make_room()

    def _make_room(self) -> None:
        """Free some pages: of those that have ended, else of the youngest, else of prompts that nobody begins now."""
        if self._windows:
            self._collect(0)
        elif len(self._rows) > 1:
            youngest = max(self._rows, key=lambda run: run.age)
            assert len(youngest.tokens) == youngest.bound, "all that was drawn has been seen"
            self._leave([youngest])
            self._waiting.appendleft(youngest)
        else:
            freed = self._forget_prompts()
            assert freed, "one sequence alone fits the cache"

    def _forget_prompts(self) -> bool:
        """Drop prompts that samples still wait to begin from; they are prefilled again."""
        cached = [group for group in self._groups.values() if group.pages]
        for group in cached:
            self._pages.give_back(group.pages)
            group.pages, group.last_hidden = [], None
        return bool(cached)

    # --- windows ---

    def _order_rows(self) -> None:
        """The device's rows as they are here: those of samples in front, with all of their pages."""
        state = self._decoder.state
        order = [run.row for run in self._rows]
        if order != list(range(self._placed)):
            state.rearrange(order)
            self._reseated = True
        rows, places, pages = [], [], []
        for row, run in enumerate(self._rows):
            run.row = row
            for place in range(run.entered, len(run.pages)):
                rows.append(row)
                places.append(place)
                pages.append(run.pages[place])
            run.entered = len(run.pages)
        state.grant(rows, places, pages)
        self._placed = len(self._rows)

    def _share(self) -> None:
        """The beginnings that rows have in common: their pages are held until rows are put in order again."""
        if self._reseated and self._decoder.shares:
            self._decoder.state.share(*shared_beginnings(self._rows))
        self._reseated = False

    def _run_window(self) -> None:
        self._share()
        rows = self._rows
        steps = min(self._decoder.window, max(run.group.limit - run.bound for run in rows))
        pages = max(len(run.pages) for run in rows)
        if steps and self._keeps_supports:
            steps = 1
            support = self._decoder.step(len(rows), pages, truncates=True)
            assert support is not None, "somebody's sampling truncates"
            self._supports[1] = _Supports(0, self._decoder.ids_of(support))
        else:
            self._decoder.run(len(rows), steps, pages, truncates=_truncates(rows))
        for run in rows:
            run.bound = min(run.group.limit, run.bound + steps)
        self._send(steps)

    def _send(self, steps: int) -> None:
        """What the window drew to the host. Samples that have certainly ended with it make place for others."""
        arriving = self._decoder.send(len(self._rows))
        self._windows.append(_Window(list(self._rows), arriving, 1 + steps, self._supports))
        self._supports = {}
        self._leave([run for run in self._rows if run.bound == run.group.limit])

    def _collect(self, behind: int) -> None:
        """See all windows but the last so many."""
        while len(self._windows) > behind:
            self._see(self._windows.popleft())

    def _see(self, window: _Window) -> None:
        # numpy: for a mask over so little torch would wake all of its threads.
        tokens, logprobs = (part[:, : window.columns].numpy() for part in window.arriving.read())
        is_drawn = tokens != NOTHING
        if not np.isfinite(logprobs[is_drawn]).all():
            raise NumericsError("the model gives non-finite logits", "lower the learning rate, or check the weights")
        ended = []
        counts = is_drawn.sum(1).tolist()
        parts = zip(window.runs, counts, tokens.tolist(), logprobs.tolist(), strict=True)
        for row, (run, count, ids, values) in enumerate(parts):
            group = run.group
            if not count or self._groups.get(group.key) is not group:
                continue
            start = 1 if ids[0] == NOTHING else 0  # column 0 is for first tokens; a sample's follow each other
            end = start + count
            drawn = ids[start:end]
            reason = run.add(drawn, self._decoder.model.stop_ids)
            supports = []
            if group.keeps_supports:
                columns = (window.supports[column] for column in range(start, end))
                supports = [column.ids[row - column.first_row] for column in columns]
            self._ready.append(Drawn(group.key, run.index, drawn, values[start:end], reason, supports))
            if reason:
                ended.append(run)
        self._end(ended)

    def _end(self, ended: list[Run]) -> None:
        self._leave([run for run in ended if run.seated])
        for run in ended:
            run.group.unfinished -= 1
            if not run.group.unfinished:
                del self._groups[run.group.key]

    @property
    def _keeps_supports(self) -> bool:
        return any(group.keeps_supports for group in {run.group for run in self._rows})


def _truncates(runs: list[Run]) -> bool:
    return any(group.sampling.truncates for group in {run.group for run in runs})
