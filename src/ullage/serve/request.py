"""What a client may ask for: bodies of `/v1/completions` and `/v1/chat/completions`, checked, with reasons for refusal.

A parameter is one of four: read; without effect on the answer, and ignored (`IGNORED`); accepted at the value that
changes nothing (`NEUTRAL`); refused, because ignoring it would change the answer.
"""

from __future__ import annotations

import difflib
import json
from abc import abstractmethod
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

IGNORED = frozenset(
    {
        "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "service_tier", "store", "user",
    }
)  # fmt: skip
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((1,), "choices are not ranked; ask for n"),
    "echo": ((False,), "the prompt is not repeated; return_token_ids gives its token ids"),
    "frequency_penalty": ((0,), "tokens are drawn from the model's own distribution"),
    "function_call": (("none",), "calls are not read out of answers"),
    "functions": (([],), "calls are not read out of answers"),
    "logit_bias": (({},), "tokens are drawn from the model's own distribution"),
    "min_p": ((0,), "use top_p or top_k"),
    "min_tokens": ((0,), "ignore_eos draws max_tokens tokens"),
    "modalities": ((["text"],), "answers are text"),
    "presence_penalty": ((0,), "tokens are drawn from the model's own distribution"),
    "repetition_penalty": ((1,), "tokens are drawn from the model's own distribution"),
    "response_format": (({"type": "text"},), "answers are not constrained to a grammar"),
    "suffix": (("",), "the model only continues text"),
    "tool_choice": (("none", "auto"), "calls are not read out of answers"),
    "tools": (([],), "calls are not read out of answers"),
    "top_logprobs": ((0,), "the engine keeps the log-prob of the drawn token, not of others"),
}
"""Values that change nothing, and why others are refused."""
MAX_CHOICES_PER_PROMPT = 128
MIN_TEMPERATURE = 0.01
"""Logits divided by less may overflow; 0 is greedy."""

Text = Annotated[str, StringConstraints(min_length=1)]
Token = Annotated[int, Field(ge=0)]


class RefusalError(Exception):
    """A request that is not answered: the HTTP status, and what the client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False


class Body(_Strict):
    """What both endpoints read."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=1e-6, le=1)  # less than float32 can tell from 0 would leave no token
    top_k: int = Field(-1, ge=-1)
    n: int = Field(1, ge=1, le=MAX_CHOICES_PER_PROMPT)
    seed: int | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    ignore_eos: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wanted_tokens(self) -> int | None:
        """The most that an answer may have; None: as many as fit."""
        return self.max_tokens

    @property
    @abstractmethod
    def wants_logprobs(self) -> bool: ...


class CompletionBody(Body):
    prompt: Text | list[Text] | list[Token] | list[list[Token]]
    max_tokens: int | None = Field(16, ge=1)  # OpenAI's default
    logprobs: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None


class ChatBody(Body):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs


Kind = TypeVar("Kind", bound=Body)


def parse(raw: bytes, kind: type[Kind]) -> Kind:
    """The body of a request; RefusalError (400) says what is wrong with it."""
    given = _read_json(raw)
    for name, value in given.items():
        _refuse_what_would_be_lost(name, value)
    known = {name: value for name, value in given.items() if name not in IGNORED and name not in NEUTRAL}
    try:
        body = kind.model_validate(known)
    except ValidationError as error:
        raise _explained(error, kind) from None
    if 0 < body.temperature < MIN_TEMPERATURE:
        message = f"temperature: must be 0 (greedy) or at least {MIN_TEMPERATURE}"
        raise RefusalError(400, message, param="temperature")
    if isinstance(body, CompletionBody) and body.logprobs not in (None, 0):
        raise RefusalError(
            400,
            f"logprobs: {body.logprobs} alternatives were asked for, but the engine keeps the log-prob of the drawn "
            "token, not of others; logprobs: 0 gives it",
            param="logprobs",
        )
    return body


def _read_json(raw: bytes) -> dict[str, Any]:
    """A JSON object; null is the same as absent, in messages too (clients send back what they were given)."""
    try:
        value = json.loads(raw, parse_constant=_no_constant)
        if b"\\ud" in raw.lower():  # half a surrogate pair can be written in JSON, but is no text
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise RefusalError(400, "the body is nested too deeply") from None
    except ValueError as error:
        raise RefusalError(400, f"the body is not JSON in UTF-8: {error}") from None
    if not isinstance(value, dict):
        raise RefusalError(400, "the body must be a JSON object")
    given = {name: item for name, item in value.items() if item is not None}
    messages = given.get("messages")
    if isinstance(messages, list):
        given["messages"] = [
            {name: item for name, item in message.items() if item is not None} if isinstance(message, dict) else message
            for message in messages
        ]
    return given


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _refuse_what_would_be_lost(name: str, value: Any) -> None:  # noqa: ANN401 -- any JSON value
    neutral = NEUTRAL.get(name)
    if neutral is not None and (isinstance(value, bool) != isinstance(neutral[0][0], bool) or value not in neutral[0]):
        shown = json.dumps(value)
        raise RefusalError(
            400, f"{name}: {shown if len(shown) < 80 else '…'} is not supported: {neutral[1]}", param=name
        )


def _explained(error: ValidationError, kind: type[Body]) -> RefusalError:
    """The first problem, in the client's words."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(problem["loc"][0])
    field = kind.model_fields.get(name)
    # Places inside a union carry the names of its branches: of no use to a client.
    place = ".".join(str(part) for part in problem["loc"]) if name in ("messages", "stream_options") else name
    if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
        nearest = difflib.get_close_matches(name, kind.model_fields, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        return RefusalError(400, f"{name}: unknown parameter{hint}", param=name, code="unknown_parameter")
    if name in ("prompt", "stop") and field is not None and problem["type"] != "missing":
        what = {
            "prompt": "a text, a list of texts, a list of token ids or a list of such lists, none of them empty",
            "stop": "a text or up to 16 texts, none of them empty",
        }[name]
        return RefusalError(400, f"{name}: must be {what}", param=name)
    if name == "messages" and "content" in problem["loc"] and problem["type"] != "missing":
        place = place.partition(".content")[0]
        return RefusalError(400, f"{place}.content: must be text, or a list of parts of type text", param="messages")
    return RefusalError(400, f"{place}: {problem['msg']}", param=name)
