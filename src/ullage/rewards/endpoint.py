"""A scoring service of the user's own: completions go out as JSON, scores come back.

The body is `{"prompt", "response", "target", "source"}` and the answer `{"score": x}`; numbers beside `score` become
metrics. With `batch_size` above 1 it is `{"items": [...]}` of such bodies, and `{"scores": [...]}` in the same order.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from ullage.config.tree import Section
from ullage.rewards.pool import Request
from ullage.rewards.results import UnusableResult
from ullage.rewards.service import Connection, settings_of

FIELDS = ("prompt", "response", "target", "source")


class Settings(Section):
    """The `kwargs` of `{name: endpoint}`."""

    url: str
    api_key_env: str | None = None
    """Name of an environment variable whose value is sent as a bearer token."""
    retries: NonNegativeInt = 5
    """After connection errors, 429 and 5xx, with growing pauses, within reward.timeout_seconds."""
    concurrency: PositiveInt = 16
    """Calls at a time."""
    batch_size: PositiveInt = 1
    """Completions of one call, at most."""


class Endpoint:
    """Asks the service."""

    name = "endpoint"

    def __init__(self, kwargs: dict[str, Any], timeout_seconds: float) -> None:
        settings = settings_of(Settings, kwargs, self.name)
        self.batch_size = settings.batch_size
        self.concurrency = settings.concurrency
        self._connection = Connection(
            settings.url,
            name=self.name,
            api_key_env=settings.api_key_env,
            timeout_seconds=timeout_seconds,
            retries=settings.retries,
            concurrency=settings.concurrency,
        )
        self.description = f"scoring service at {self._connection.place}"

    def values(self, requests: Sequence[Request]) -> list[Any]:
        items = [{field: getattr(request, field) for field in FIELDS} for request in requests]
        reply = self._connection.post({"items": items} if self.batch_size > 1 else items[0])
        if self.batch_size == 1 and isinstance(reply, dict) and "score" in reply:
            return [reply]
        scores = reply.get("scores") if isinstance(reply, dict) else None
        if not isinstance(scores, list):
            key = "score" if self.batch_size == 1 else "scores"
            raise UnusableResult(f"at {self._connection.place} answered without '{key}'")
        if len(scores) != len(requests):
            raise UnusableResult(
                f"at {self._connection.place} answered {len(scores)} scores for {len(requests)} completions"
            )
        return scores

    def close(self) -> None:
        self._connection.close()
