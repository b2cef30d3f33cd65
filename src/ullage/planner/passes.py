"""The fullest micro-batches that a token limit allows: what one pass may have to hold, whatever lengths come up.

Sequences of full length need not come to the limit, but a mix of lengths does (batch/pack.py). Two mixes are worst:
with long prompts, whose keys are gathered for each of their samples, and with short ones, which leave their room to
positions that carry loss. Where both leave room, groups of which a pass holds a part may fill it with their prompts.
Responses have their full length in all.
"""

from __future__ import annotations

from typing import NamedTuple

MORE_TOKENS = 1.01
"""Times as many as in other mixes, for one more to be worth the time that it takes to trace it."""


class Block(NamedTuple):
    """A prompt and how many of its samples follow it."""

    prompt: int
    """Its tokens."""
    samples: int


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
    most = max(tokens_of(blocks, room.response) for blocks in found)
    for samples in sorted({sum(block.samples for block in blocks) for blocks in found}):
        blocks = many_prompts(room, samples)
        if tokens_of(blocks, room.response) > MORE_TOKENS * most:
            found.append(blocks)
    return found


def long_prompts(room: Room) -> list[Block]:
    """Groups of full length, part of one more, and a sample with a shorter prompt where there is still room."""
    fed = room.response - 1
    groups, left = divmod(room.tokens, room.prompt + room.n * fed)
    samples = max(1, min(groups * room.n + max(0, left - room.prompt) // max(1, fed), room.most))
    blocks = [Block(room.prompt, min(room.n, samples - first)) for first in range(0, samples, room.n)]
    left = room.tokens - tokens_of(blocks, room.response)
    if left > fed and samples < room.most and len(blocks) < room.groups:
        blocks.append(Block(min(left - fed, room.prompt), 1))
    return blocks


def short_prompts(room: Room) -> list[Block]:
    """As many samples as fit behind prompts of a token, then prompts that fill the limit."""
    fed = room.response - 1
    groups, left = divmod(room.tokens, 1 + room.n * fed)
    samples = max(1, min(groups * room.n + max(0, left - 1) // max(1, fed), room.most))
    sizes = [min(room.n, samples - first) for first in range(0, samples, room.n)]
    left = max(len(sizes), room.tokens - samples * fed)
    return [
        Block(min(room.prompt, left // len(sizes) + (place < left % len(sizes))), size)
        for place, size in enumerate(sizes)
    ]


def many_prompts(room: Room, samples: int) -> list[Block]:
    """So many samples behind as many prompts as still fit: of groups that were cut, or have lost samples."""
    left = room.tokens - samples * (room.response - 1)
    count = max(-(-samples // room.n), min(room.groups, samples, -(-left // room.prompt)))
    blocks, more = [], samples - count
    for later in reversed(range(count)):
        prompt, others = max(1, min(room.prompt, left - later)), min(room.n - 1, more)
        blocks.append(Block(prompt, 1 + others))
        left, more = left - prompt, more - others
    return blocks


def tokens_of(blocks: list[Block], response: int) -> int:
    """That are fed."""
    return sum(block.prompt + block.samples * (response - 1) for block in blocks)


def more_keys_of(blocks: list[Block]) -> int:
    """Of prompts that several samples share: once more for each of these (model/attention.py)."""
    return sum(block.prompt * block.samples for block in blocks if block.samples > 1)
