"""HTTP services that score: one connection with retries, time limits and secrets, and the threads that use it.

They run in the run's own process, not in reward workers: no user code is executed, a wait costs no core, and what
counts over the whole run (calls, answers already given) has one place.
"""

import contextlib
import json
import os
import queue
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

import httpx
from pydantic import ValidationError

from ullage.base.errors import ConfigError, ServiceError
from ullage.base.user_code import printable
from ullage.config.tree import RewardFunction, Section
from ullage.rewards.pool import Request, Score, as_json, scores_source, terms
from ullage.rewards.results import UnusableResult, read_result

FIRST_PAUSE_SECONDS = 0.5
"""Before the first retry; doubles with every further one."""
LONGEST_PAUSE_SECONDS = 8.0
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Answers that another attempt may change."""
NEVER_SENT = (httpx.LocalProtocolError, httpx.UnsupportedProtocol)
"""Errors that no further attempt changes."""
MAX_REPLY_BYTES = 1 << 20
REMEDY = "see that the service runs, or give it more timeout_seconds"

Settings = TypeVar("Settings", bound=Section)


def settings_of(section: type[Settings], kwargs: dict[str, Any], name: str) -> Settings:
    """The kwargs of a service, typed. No message shows a value: one may be a key that was put there by mistake."""
    try:
        return section.model_validate(kwargs)
    except ValidationError as error:
        wrong = [(".".join(map(str, detail["loc"])), detail["msg"]) for detail in error.errors(include_url=False)]
    raise ConfigError(
        "\n".join(f"the reward {name} cannot use kwargs.{key}: {rule}" for key, rule in wrong),
        f"it takes: {', '.join(section.model_fields)}",
    )


class Reply(NamedTuple):
    """What came back."""

    status: int
    retry_after: str
    content: bytes


class Silence(Exception):  # noqa: N818 -- not a failure of the program: it becomes the sample's error text
    """Nothing came back."""

    def __init__(self, why: str, *, final: bool) -> None:
        super().__init__(why)
        self.final = final
        """Another attempt would end the same way."""


class Connection:
    """One URL that takes JSON and gives JSON. Used by many threads at a time."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        api_key_env: str | None,
        timeout_seconds: float,
        retries: int,
        concurrency: int,
        max_calls: int | None = None,
    ) -> None:
        self.place = _checked(url, name)
        """The URL as messages show it."""
        self._url = url
        self._name = name
        self._key = _key(api_key_env, name)
        self._timeout_seconds = timeout_seconds
        self._retries = retries
        self._max_calls = max_calls
        self._calls = 0
        self._counting = threading.Lock()
        self._closing = threading.Event()
        self._unanswered = 0
        """Questions in a row to which nothing came back."""
        self._answers = 0
        headers = {"content-type": "application/json"}
        self._client = httpx.Client(
            headers=headers | ({"authorization": f"Bearer {self._key}"} if self._key else {}),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )

    def post(self, body: dict[str, Any]) -> Any:  # noqa: ANN401 -- whatever the service says
        """The answer's JSON. UnusableResult says why there is none; ServiceError that the calls are spent."""
        try:
            content = json.dumps(body, default=as_json).encode()
        except (TypeError, ValueError) as error:
            raise UnusableResult(f"cannot be given this row: {error}") from None
        attempts, seconds = self._hearing()
        deadline, answers = time.monotonic() + seconds, self._answers
        made, failure, asked = 0, "", ""
        while made < attempts and (made == 0 or self._pause(made, asked, deadline)):
            self._count()
            made += 1
            try:
                reply = self._exchange(content, deadline, seconds)
            except Silence as silence:
                failure, asked = str(silence), ""
                if silence.final:
                    break
                continue
            self._unanswered, self._answers = 0, self._answers + 1
            if reply.status == httpx.codes.OK:
                return self._decoded(reply.content)
            failure, asked = self._refusal(reply), reply.retry_after
            if reply.status not in RETRIED:
                break
        if answers == self._answers:  # to nobody else either
            self._unanswered += 1
        raise UnusableResult(f"at {self.place} {failure}" + (f" ({made} attempts)" if made > 1 else ""))

    def close(self) -> None:
        """End waits; a call under way ends with its time limit, in a thread that keeps nothing alive."""
        self._closing.set()
        self._client.close()

    def _hearing(self) -> tuple[int, float]:
        """Attempts and seconds that a question gets.

        Nobody waits long for a service that was just not there: one attempt, with its share of the time. It may only be
        slow, so now and then a question is given all of it; and every one when it has answered.
        """
        attempts = 1 + self._retries
        if not self._unanswered:
            return attempts, self._timeout_seconds
        return 1, self._timeout_seconds / (attempts if self._unanswered % attempts else 1)

    def _exchange(self, content: bytes, deadline: float, seconds: float) -> Reply:
        try:
            reply = self._posted(content, deadline)
        except httpx.TimeoutException:
            before = f", nor to an earlier question in {self._timeout_seconds:g} s"
            shortened = before if seconds < self._timeout_seconds else ""
            raise Silence(f"gave no answer within {seconds:.3g} s{shortened}", final=True) from None
        except httpx.RequestError as error:
            final = isinstance(error, NEVER_SENT)
            why = printable(self._masked(str(error).encode()).decode())
            raise Silence(f"cannot be {'asked' if final else 'reached'}: {why}", final=final) from None
        return reply._replace(content=self._masked(reply.content))  # services quote what they were sent

    def _posted(self, content: bytes, deadline: float) -> Reply:
        remaining = max(deadline - time.monotonic(), 1e-3)
        with self._client.stream("POST", self._url, content=content, timeout=remaining) as response:
            received = b""
            for chunk in response.iter_bytes():
                received += chunk
                if len(received) > MAX_REPLY_BYTES:
                    raise UnusableResult(f"at {self.place} answered with more than {MAX_REPLY_BYTES} bytes")
                if time.monotonic() > deadline:  # httpx limits each read, not their sum
                    raise httpx.ReadTimeout("")
        return Reply(response.status_code, response.headers.get("retry-after", ""), received)

    def _masked(self, text: bytes) -> bytes:
        """Without the key, also where a representation or JSON has put backslashes into it."""
        if not self._key:
            return text
        characters = (re.escape(character.encode()) for character in self._key if character != "\\")
        return re.sub(rb"\\*".join(characters), b"***", text)

    def _pause(self, attempt: int, asked: str, deadline: float) -> bool:
        """Wait before another attempt, as long as the service asked for; False where the time limit ends first."""
        seconds = min(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1), LONGEST_PAUSE_SECONDS)
        with contextlib.suppress(ValueError):  # a date, or nothing
            seconds = max(seconds, float(asked))
        if time.monotonic() + seconds >= deadline:
            return False
        return not self._closing.wait(seconds)

    def _count(self) -> None:
        """Every attempt is a call: each may be billed."""
        with self._counting:
            if self._max_calls is not None and self._calls >= self._max_calls:
                raise ServiceError(
                    f"the reward {self._name} has spent its budget: {self._calls} calls were made to {self.place}",
                    "raise max_calls in its kwargs; a resumed run counts from zero",
                )
            self._calls += 1

    def _decoded(self, content: bytes) -> Any:  # noqa: ANN401
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise UnusableResult(f"at {self.place} did not answer in JSON: {_text(content)}") from None

    def _refusal(self, reply: Reply) -> str:
        reason = httpx.codes.get_reason_phrase(reply.status)
        text = _text(reply.content)
        return f"answered HTTP {reply.status}" + (f" {reason}" if reason else "") + (f": {text}" if text else "")


def _text(content: bytes) -> str:
    return printable(content.decode(errors="replace").strip())


def _checked(url: str, name: str) -> str:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"the reward {name} has no usable URL", "give one that starts with http:// or https://")
    if parsed.userinfo:
        raise ConfigError(
            f"the URL of the reward {name} holds a password, which would be written to files",
            "put it into an environment variable and name that in kwargs.api_key_env",
        )
    return str(parsed.copy_with(query=None, fragment=None))


def _key(variable: str | None, name: str) -> str:
    if variable is None:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"the environment variable that the reward {name} takes its key from is not set: {variable}",
            f"export {variable}=..., or leave kwargs.api_key_env out for a service without one",
        )
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(
            f"{variable} holds white space or other characters that no key has", "set it to the key alone, on one line"
        )
    return key


class Service(Protocol):
    """A scorer behind HTTP."""

    name: str
    description: str
    batch_size: int
    """Requests of one call, at most."""
    concurrency: int
    """Calls at a time."""

    def values(self, requests: Sequence[Request]) -> list[Any]:
        """One score per request, or UnusableResult where there are none."""

    def close(self) -> None:
        """Let go of the connection."""


class Desk:
    """A service's queue and the threads that put it to the service."""

    def __init__(self, service: Service, label: str, function: RewardFunction) -> None:
        self.label = label
        self.description = f"{label}: {service.description}{terms(function)}"
        self._service = service
        self._function = function
        self._jobs: queue.SimpleQueue[tuple[Request, Future[Score]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, daemon=True, name=label) for _ in range(service.concurrency)
        ]
        for thread in self._threads:
            thread.start()

    def scores(self, source: str) -> bool:
        """Whether it is for the rows of this source."""
        return scores_source(self._function, source)

    def submit(self, request: Request) -> Future[Score]:
        future: Future[Score] = Future()
        self._jobs.put((request, future))
        return future

    def close(self) -> None:
        """What is still queued is not scored."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        self._service.close()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            jobs = [job]
            with contextlib.suppress(queue.Empty):
                while len(jobs) < self._service.batch_size:
                    further = self._jobs.get_nowait()
                    if further is None:  # meant for a thread, not for a batch
                        self._jobs.put(None)
                        break
                    jobs.append(further)
            self._answer(jobs)

    def _answer(self, jobs: list[tuple[Request, Future[Score]]]) -> None:
        try:
            values = self._service.values([request for request, _ in jobs])
        except UnusableResult as error:
            for _, future in jobs:
                future.set_result(self._failed(error))
        except Exception as error:  # noqa: BLE001 -- a spent budget or a bug of ours: raised where the result is awaited
            for _, future in jobs:
                future.set_exception(error)
        else:
            for (_, future), value in zip(jobs, values, strict=True):
                future.set_result(self._score(value))

    def _score(self, value: Any) -> Score:  # noqa: ANN401
        try:
            result = read_result(value)
        except UnusableResult as error:
            return self._failed(error)
        assert result.score is not None, "None is for TRL functions"
        parts = {self.label: result.score} | {f"{self.label}/{name}": number for name, number in result.metrics.items()}
        return Score(self._function.weight * result.score, parts, None, result.answer)

    def _failed(self, error: UnusableResult) -> Score:
        return Score(None, {}, f"{self._service.name} {error}", remedy=REMEDY)
