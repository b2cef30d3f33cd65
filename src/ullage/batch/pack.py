"""Division of samples into micro-batches that never exceed a token budget.

A block is one prompt followed by one or more of its responses; responses in a block share the prompt's computation.
Only tokens that are fed to the model count: the last token of a response predicts nothing and is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ullage.base.errors import ConfigError


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

    First-fit decreasing: deterministic, within 11/9 of the fewest micro-batches, and a hard limit by construction.
    """
    fed = {i: max(response_lengths[i] - 1, 0) for i in samples}
    blocks = [
        block
        for group, members in _by_group(samples, groups).items()
        for block in _split(group, members, prompt_lengths[group], fed, limits)
    ]
    tokens = {block: prompt_lengths[block.prompt] + sum(fed[i] for i in block.samples) for block in blocks}
    bins: list[list[Block]] = []
    room: list[tuple[int, int]] = []  # tokens and sequences left in each bin
    max_sequences = limits.max_sequences or len(groups)
    for block in sorted(blocks, key=lambda block: (-tokens[block], block.prompt, block.samples)):
        need = (tokens[block], len(block.samples))
        for k, (tokens_left, sequences_left) in enumerate(room):
            if need[0] <= tokens_left and need[1] <= sequences_left:
                bins[k].append(block)
                room[k] = (tokens_left - need[0], sequences_left - need[1])
                break
        else:
            bins.append([block])
            room.append((limits.max_tokens - need[0], max_sequences - need[1]))
    return bins


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
