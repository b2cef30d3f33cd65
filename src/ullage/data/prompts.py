"""The prompts of a run: rows of all files, as token ids of the allowed length, with a fingerprint."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ullage.base.errors import DataError
from ullage.config.tree import Data
from ullage.data.chat import Progress, Tokenizer, tokenise
from ullage.data.columns import Fields, Given, check_map, fields_of
from ullage.data.readers import Row, read_rows, source_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data, ready to be answered."""

    id: int
    """Row number over all files, dropped rows included: seeds derive from it."""
    token_ids: tuple[int, ...]
    prompt: Given
    """As given, text or messages: what reward functions see."""
    target: Any
    """The answer or ground truth; None if the data has none."""
    source: str
    """`data_source`, or the name of the file."""
    completion: str | None = None
    """The answer that the data gives, for supervised training."""
    where: str = field(default="", compare=False)
    """Where the row stands, for messages: `train.jsonl:17`; no part of what the data says."""
    extra: dict[str, Any]
    """The row's other columns, the target's included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """All prompts of one side of a run, training or evaluation."""

    prompts: tuple[Prompt, ...]
    fingerprint: str
    """Differs when a row that is used, or the order of rows, differs."""
    num_rows: int
    """Rows read, overlong ones included."""
    num_overlong: int
    overlong: str
    """What was done with those: data.overlong_prompts."""


def load_prompts(
    files: Sequence[str],
    config: Data,
    tokenizer: Tokenizer,
    *,
    max_samples: int = -1,
    progress: Progress | None = None,
) -> PromptSet:
    """Read, tokenise and check the first `max_samples` rows of all files (all of them when negative)."""
    check_map(config.columns)
    rows, fields = _read(files, config, max_samples)
    if not rows:
        named = ", ".join(files) if files else "no files given"
        limit = "; the row limit is 0" if max_samples == 0 else ""
        raise DataError(f"the data set is empty: {named}{limit}", "check data.train_files and data.val_files")
    places = [row.where for row in rows]
    token_ids = tokenise([own.prompt for own in fields], config, tokenizer, places=places, progress=progress)
    _refuse_empty(token_ids, places)
    overlong = [index for index, ids in enumerate(token_ids) if len(ids) > config.max_prompt_length]
    if overlong and config.overlong_prompts in ("drop", "error"):
        _refuse_overlong(token_ids, overlong, places, config)
    prompts = tuple(
        Prompt(
            id=index,
            token_ids=truncate(ids, config.max_prompt_length, config.overlong_prompts),
            prompt=own.prompt,
            target=own.target,
            source=own.source,
            completion=own.completion,
            where=place,
            extra=own.extra,
        )
        for index, (ids, own, place) in enumerate(zip(token_ids, fields, places, strict=True))
        if config.overlong_prompts != "drop" or len(ids) <= config.max_prompt_length
    )
    return PromptSet(
        prompts=prompts,
        fingerprint=fingerprint(prompts),
        num_rows=len(rows),
        num_overlong=len(overlong),
        overlong=config.overlong_prompts,
    )


def truncate(token_ids: tuple[int, ...], limit: int, side: str) -> tuple[int, ...]:
    """At most `limit` token ids, cut on the left, on the right, or in the middle."""
    if len(token_ids) <= limit:
        return token_ids
    if side == "left":
        return token_ids[-limit:]
    if side == "right":
        return token_ids[:limit]
    assert side == "middle", f"not a side: {side}"
    head = limit // 2
    return token_ids[:head] + token_ids[head - limit :]


def fingerprint(prompts: Iterable[Prompt]) -> str:
    """A hash of what the data says, in order. Not of token ids: some chat templates print today's date."""
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        content = [prompt.id, prompt.prompt, prompt.target, prompt.source, prompt.extra]
        digest.update(json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _read(files: Sequence[str], config: Data, max_samples: int) -> tuple[list[Row], list[Fields]]:
    rows: list[Row] = []
    fields: list[Fields] = []
    for file in files:
        left = None if max_samples < 0 else max_samples - len(rows)
        source = source_name(file)
        for row in islice(read_rows(file), left):
            fields.append(fields_of(row, config.columns, default_source=source))
            rows.append(row)
    return rows, fields


def _refuse_empty(token_ids: Sequence[tuple[int, ...]], places: Sequence[str]) -> None:
    for ids, place in zip(token_ids, places, strict=True):
        if not ids:
            raise DataError(f"{place}: the prompt has no tokens", "a reply needs at least one token before it")


def _refuse_overlong(
    token_ids: Sequence[tuple[int, ...]], overlong: Sequence[int], places: Sequence[str], config: Data
) -> None:
    """Stop where the user asked to, and where dropping would leave nothing."""
    limit, longest = config.max_prompt_length, max(len(token_ids[index]) for index in overlong)
    if config.overlong_prompts == "error":
        first = ", ".join(f"{places[index]} ({len(token_ids[index])} tokens)" for index in overlong[:3])
        more = f" and {len(overlong) - 3} more" if len(overlong) > 3 else ""
        raise DataError(
            f"{len(overlong)} of {len(token_ids)} prompts exceed data.max_prompt_length={limit}: {first}{more}",
            f"set data.max_prompt_length={longest}, or data.overlong_prompts=drop (or left, right, middle to truncate)",
        )
    if len(overlong) == len(token_ids):
        raise DataError(
            f"all {len(overlong)} prompts are longer than data.max_prompt_length={limit}; longest {longest} tokens",
            f"set data.max_prompt_length={longest}, or truncate with data.overlong_prompts=left",
        )
