"""The fullest micro-batches that a token limit allows: what one pass may have to hold, whatever lengths come up.

Sequences of full length need not come to the limit, but a mix of lengths does (batch/pack.py). Two mixes are worst:
with long prompts, whose keys are gathered for each of their samples, and with short ones, which leave their room to
positions that carry loss. Where responses of full length leave room over, a sample more has it with shorter ones, or,
where there is none, groups of which a pass holds a part have it with their prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

MORE_TOKENS = 1.01
"""Times as many as there are, for other mixes to be worth the time that it takes to trace them."""


class Block(NamedTuple):
    """A prompt and how many of its samples follow it."""

    prompt: int
    """Its tokens."""
    samples: int
    response: int
    """Tokens of each."""


class Room(NamedTuple):
    """What micro-batches are made of."""

    tokens: int
    """The limit of one."""
    groups: int
    """Prompts of a mini-batch."""
    n: int
    """Samples of each."""
    prompt: int
    """Tokens at most, as of a response, whose last one is not fed."""
    response: int
    sequences: int | None = None
    """Samples at most."""

    @property
    def most(self) -> int:
        return min(self.groups * self.n, self.sequences or self.groups * self.n)


def worst_mixes(room: Room) -> list[list[Block]]:
    """Any may need more."""
    found = [long_prompts(room), short_prompts(room)]
    if room.tokens > MORE_TOKENS * max(map(tokens_of, found)):
        found += [_fuller(room, long_prompts, room.prompt), _fuller(room, short_prompts, 1)]
    return found


def _fuller(room: Room, make: Callable[[Room], list[Block]], prompt: int) -> list[Block]:
    """One sample more, with shorter responses, behind prompts of so many tokens; where there is none, more prompts."""
    samples = sum(block.samples for block in make(room))
    prompts = -(-(samples + 1) // room.n)
    shorter = (room.tokens - prompts * prompt) // (samples + 1) + 1
    if samples == room.most or shorter < 2:
        return many_prompts(room, samples)
    return make(room._replace(response=shorter))


def long_prompts(room: Room) -> list[Block]:
    """Groups of full length, part of one more, and a sample with a shorter prompt where there is still room."""
    fed = room.response - 1
    groups, left = divmod(room.tokens, room.prompt + room.n * fed)
    samples = max(1, min(groups * room.n + max(0, left - room.prompt) // max(1, fed), room.most))
    blocks = [Block(room.prompt, min(room.n, samples - first), room.response) for first in range(0, samples, room.n)]
    left = room.tokens - tokens_of(blocks)
    if left > fed and samples < room.most and len(blocks) < room.groups:
        blocks.append(Block(min(left - fed, room.prompt), 1, room.response))
    return blocks


def short_prompts(room: Room) -> list[Block]:
    """As many samples as fit behind prompts of a token, then prompts that fill the limit."""
    fed = room.response - 1
    groups, left = divmod(room.tokens, 1 + room.n * fed)
    samples = max(1, min(groups * room.n + max(0, left - 1) // max(1, fed), room.most))
    sizes = [min(room.n, samples - first) for first in range(0, samples, room.n)]
    left = max(len(sizes), room.tokens - samples * fed)
    return [
        Block(min(room.prompt, left // len(sizes) + (place < left % len(sizes))), size, room.response)
        for place, size in enumerate(sizes)
    ]


def many_prompts(room: Room, samples: int) -> list[Block]:
    """So many samples behind as many prompts as still fit: of groups that were cut, or have lost samples."""
    left = room.tokens - samples * (room.response - 1)
    count = max(-(-samples // room.n), min(room.groups, samples, -(-left // room.prompt)))
    blocks, more = [], samples - count
    for later in reversed(range(count)):
        prompt, others = max(1, min(room.prompt, left - later)), min(room.n - 1, more)
        blocks.append(Block(prompt, 1 + others, room.response))
        left, more = left - prompt, more - others
    return blocks


def tokens_of(blocks: list[Block]) -> int:
    """That are fed."""
    return sum(block.prompt + block.samples * (block.response - 1) for block in blocks)


def more_keys_of(blocks: list[Block]) -> int:
    """Of prompts that several samples share: once more for each of these (model/attention.py)."""
    return sum(block.prompt * block.samples for block in blocks if block.samples > 1)
