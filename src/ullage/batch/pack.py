"""Division of samples into micro-batches that never exceed a token budget.

A block is one prompt followed by one or more of its responses; responses in a block share the prompt's computation.
Only tokens that are fed to the model count: the last token of a response predicts nothing and is left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ullage.base.errors import ConfigError

MORE_TOKENS = 1.05
"""Times as many, at most, where prompts are fed twice for fewer passes."""


@dataclass(frozen=True, slots=True)
class Block:
    """One prompt and the samples that share it."""

    prompt: int
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one forward pass may hold."""

    max_tokens: int
    max_sequences: int | None = None
    share_prefix: bool = True


def pack(
    prompt_lengths: Sequence[int],
    groups: Sequence[int],
    response_lengths: Sequence[int],
    samples: Sequence[int],
    limits: Limits,
) -> list[list[Block]]:
    """Micro-batches over `samples` (indices into `groups` and `response_lengths`), each a list of blocks.

    First-fit decreasing finds how many are needed: deterministic, within 11/9 of the fewest, and a hard limit by
    construction. Then the same number is filled evenly, where that goes: the fullest one sets the peak of memory.
    Groups stay whole, unless room that these leave over would save micro-batches at the price of few prompts twice.
    """
    fed = {i: max(response_lengths[i] - 1, 0) for i in samples}
    by_group = _by_group(samples, groups)
    whole = _Room(limits.max_tokens, limits.max_sequences or len(groups))

    def filled(blocks: list[Block]) -> tuple[list[list[Block]], int]:
        tokens = {block: prompt_lengths[block.prompt] + sum(fed[i] for i in block.samples) for block in blocks}
        ordered = sorted(blocks, key=lambda block: (-tokens[block], block.prompt, block.samples))
        tight = _first_fit(ordered, tokens, whole)
        return _even(ordered, tokens, whole, len(tight)) or tight, sum(tokens.values())

    found, total = filled(
        [
            block
            for group, members in by_group.items()
            for block in _split(group, members, prompt_lengths[group], fed, limits)
        ]
    )
    fewest = -(-total // limits.max_tokens)
    if len(found) > fewest and limits.share_prefix and len(by_group) < len(fed):
        cut, with_twice = filled(_cut(by_group, prompt_lengths, fed, whole))
        if len(cut) < len(found) and with_twice <= MORE_TOKENS * total:
            return cut
    return found


class _Room(NamedTuple):
    """What is left of a micro-batch."""

    tokens: int
    sequences: int

    def after(self, tokens: int, block: Block) -> _Room | None:
        """What is left with a block in it; None where it does not fit."""
        left = _Room(self.tokens - tokens, self.sequences - len(block.samples))
        return left if min(left) >= 0 else None


def _first_fit(ordered: Sequence[Block], tokens: Mapping[Block, int], whole: _Room) -> list[list[Block]]:
    """Each block goes to the first micro-batch with room for it."""
    bins: list[list[Block]] = []
    rooms: list[_Room] = []
    for block in ordered:
        for place, room in enumerate(rooms):
            if (left := room.after(tokens[block], block)) is not None:
                bins[place].append(block)
                rooms[place] = left
                break
        else:
            bins.append([block])
            rooms.append(whole.after(tokens[block], block) or _Room(0, 0))
    return bins


def _even(ordered: Sequence[Block], tokens: Mapping[Block, int], whole: _Room, count: int) -> list[list[Block]] | None:
    """Each block goes to the emptiest of so many micro-batches; None where one would not fit."""
    bins: list[list[Block]] = [[] for _ in range(count)]
    emptiest = [(-whole.tokens, place, whole) for place in range(count)]  # a heap, and in order already
    for block in ordered:
        _, place, room = emptiest[0]
        left = room.after(tokens[block], block)
        if left is None:
            return None
        bins[place].append(block)
        heapq.heapreplace(emptiest, (-left.tokens, place, left))
    return bins


def _cut(
    by_group: Mapping[int, Sequence[int]], prompt_lengths: Sequence[int], fed: Mapping[int, int], whole: _Room
) -> list[Block]:
    """Blocks that fill one micro-batch after another: a group that does not fit goes on in the next."""
    blocks: list[Block] = []
    tokens, sequences = whole
    for group, members in by_group.items():
        begun: list[int] = []
        for i in members:
            needed = fed[i] + (0 if begun else prompt_lengths[group])
            if needed > tokens or not sequences:
                if begun:
                    blocks.append(Block(group, tuple(begun)))
                begun, needed = [], fed[i] + prompt_lengths[group]
                tokens, sequences = whole
            begun.append(i)
            tokens, sequences = tokens - needed, sequences - 1
        blocks.append(Block(group, tuple(begun)))
    return blocks


def _by_group(samples: Sequence[int], groups: Sequence[int]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for i in samples:
        members.setdefault(groups[i], []).append(i)
    return members


def _split(group: int, members: list[int], prompt: int, fed: dict[int, int], limits: Limits) -> list[Block]:
    """Blocks of one group: as few as the limits allow, or one per sample without sharing."""
    most = limits.max_sequences or len(members)
    blocks: list[Block] = []
    current: list[int] = []
    used = prompt
    for i in members:
        if prompt + fed[i] > limits.max_tokens:
            raise ConfigError(
                f"a sequence of {prompt + fed[i]} tokens does not fit one pass of {limits.max_tokens} tokens",
                "raise actor_rollout_ref.actor.ppo_max_token_len_per_gpu to at least "
                "data.max_prompt_length + data.max_response_length",
            )
        full = used + fed[i] > limits.max_tokens or len(current) == most
        if current and (full or not limits.share_prefix):
            blocks.append(Block(group, tuple(current)))
            current, used = [], prompt
        current.append(i)
        used += fed[i]
    if current:
        blocks.append(Block(group, tuple(current)))
    return blocks
