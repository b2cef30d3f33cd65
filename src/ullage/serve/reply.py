"""What a client is answered: the objects of the OpenAI interface, whole or as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from ullage.serve.answer import Order, Piece
from ullage.serve.request import Body, ChatBody

Object = dict[str, Any]


def reply_to(body: Body, order: Order, model: str, tokenizer: Any) -> Reply:  # noqa: ANN401 -- transformers' own
    return (_Chat if isinstance(body, ChatBody) else _Completion)(body, order, model, tokenizer)


class Reply(ABC):
    """Collects the pieces of an answer, or turns each into chunks."""

    prefix: str
    whole_name: str
    chunk_name: str

    def __init__(self, body: Body, order: Order, model: str, tokenizer: Any) -> None:  # noqa: ANN401
        self._body, self._order, self._tokenizer = body, order, tokenizer
        self._head = {"id": f"{self.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._pieces: list[list[Piece]] = [[] for _ in range(order.num_choices)]
        self._num_tokens = 0

    def add(self, piece: Piece) -> None:
        self._pieces[piece.choice].append(piece)
        self._num_tokens += len(piece.token_ids)

    def whole(self) -> Object:
        """The answer, once every choice has ended."""
        choices = [self._whole_choice(number, _joined(pieces)) for number, pieces in enumerate(self._pieces)]
        return {**self._head, "object": self.whole_name, "choices": choices, "usage": self._usage(), **self._extra()}

    def opening(self) -> Iterator[Object]:
        """Chunks before the first token."""
        for number in range(self._order.num_choices):
            for choice in self._opening_choice(number):
                yield self._chunk([choice], **self._extra())

    def chunk(self, piece: Piece) -> Object:
        self._num_tokens += len(piece.token_ids)
        return self._chunk([self._chunk_choice(piece)])

    def closing(self) -> Iterator[Object]:
        """Chunks after the last token."""
        if self._body.stream_options.include_usage:
            yield {**self._chunk([]), "usage": self._usage()}

    def _chunk(self, choices: list[Object], **extra: Any) -> Object:  # noqa: ANN401 -- JSON values
        return {**self._head, "object": self.chunk_name, "choices": choices, **extra}

    def _usage(self) -> Object:
        prompt = sum(len(ids) for ids in self._order.prompts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt + self._num_tokens,
        }

    def _common(self, piece: Piece) -> Object:
        """What a choice and a chunk of it have in both endpoints."""
        found: Object = {"index": piece.choice, "finish_reason": piece.finish_reason, "logprobs": None}
        if self._body.wants_logprobs:
            found["logprobs"] = self._logprobs(piece)
        if self._body.return_token_ids:
            found["token_ids"] = piece.token_ids
        return found

    def _token_text(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def _extra(self) -> Object:
        """Fields of the object itself that the interface does not have."""
        return {}

    @abstractmethod
    def _whole_choice(self, number: int, piece: Piece) -> Object: ...

    @abstractmethod
    def _opening_choice(self, number: int) -> Iterator[Object]: ...

    @abstractmethod
    def _chunk_choice(self, piece: Piece) -> Object: ...

    @abstractmethod
    def _logprobs(self, piece: Piece) -> Object: ...


class _Completion(Reply):
    prefix, whole_name, chunk_name = "cmpl", "text_completion", "text_completion"

    def _whole_choice(self, number: int, piece: Piece) -> Object:
        return {**self._common(piece), "text": piece.text, **self._prompt_ids(number)}

    def _opening_choice(self, number: int) -> Iterator[Object]:
        if self._body.return_token_ids:
            empty = Piece(choice=number, text="", token_ids=(), logprobs=(), finish_reason=None)
            yield {**self._common(empty), "logprobs": None, "text": "", **self._prompt_ids(number)}

    def _chunk_choice(self, piece: Piece) -> Object:
        return {**self._common(piece), "text": piece.text}

    def _prompt_ids(self, number: int) -> Object:
        wanted = self._body.return_token_ids
        return {"prompt_token_ids": self._order.prompts[number // self._order.samples]} if wanted else {}

    def _logprobs(self, piece: Piece) -> Object:
        tokens = [self._token_text(token) for token in piece.token_ids]
        return {"tokens": tokens, "token_logprobs": piece.logprobs, "top_logprobs": None}


class _Chat(Reply):
    prefix, whole_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _whole_choice(self, number: int, piece: Piece) -> Object:
        del number
        return {**self._common(piece), "message": {"role": "assistant", "content": piece.text}}

    def _opening_choice(self, number: int) -> Iterator[Object]:
        delta = {"role": "assistant", "content": ""}
        yield {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk_choice(self, piece: Piece) -> Object:
        return {**self._common(piece), "delta": {"content": piece.text} if piece.text else {}}

    def _extra(self) -> Object:
        return {"prompt_token_ids": self._order.prompts[0]} if self._body.return_token_ids else {}

    def _logprobs(self, piece: Piece) -> Object:
        content = []
        for token, logprob in zip(piece.token_ids, piece.logprobs, strict=True):
            text = self._token_text(token)
            whole = "\N{REPLACEMENT CHARACTER}" not in text  # a part of a character has bytes, but not these
            raw = list(text.encode()) if whole else None
            content.append({"token": text, "logprob": logprob, "bytes": raw, "top_logprobs": []})
        return {"content": content, "refusal": None}


def _joined(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        choice=pieces[-1].choice,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        finish_reason=pieces[-1].finish_reason,
    )
