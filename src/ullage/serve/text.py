"""Tokens to text as they come: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PARTIAL = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes token by token; what it has said it never takes back.

    Only the last few tokens are decoded again, so that a long answer costs no more per token than a short one. Two
    stretches are kept, because many tokenizers write a token differently at the start of a text: one already said, one
    not yet.
    """

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401 -- transformers' own
        self._tokenizer = tokenizer
        self._said: list[int] = []
        self._held: list[int] = []

    def add(self, tokens: Sequence[int]) -> str:
        """What these tokens add; nothing while they end in what may be the first part of a character."""
        self._held.extend(tokens)
        before, text = self._decode(self._said), self._decode(self._said + self._held)
        if text.endswith(_PARTIAL) or len(text) <= len(before):
            return ""
        self._said, self._held = self._held, []
        return text[len(before) :]

    def rest(self) -> str:
        """What is still held back, at the end of the answer."""
        before, text = self._decode(self._said), self._decode(self._said + self._held)
        self._said, self._held = [], []
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


class StopStrings:
    """Lets text through up to the first stop string; holds back what may be the beginning of one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """What can be shown. Once `found`, nothing more."""
        if self.found:
            return ""
        text = self._held + text
        spans = [(place + len(string), place) for string in self._strings if (place := text.find(string)) >= 0]
        if spans:
            self.found, self._held = True, ""
            _, start = min(spans)  # the first to be complete, however the text was cut
            return text[:start]
        keep = max((_overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def rest(self) -> str:
        """What was held back and was no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, string: str) -> int:
    """Length of the longest beginning of the string that the text ends with."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)
