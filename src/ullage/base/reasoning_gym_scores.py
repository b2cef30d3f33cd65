"""Answers to reasoning-gym tasks, scored by the tasks themselves, on rows as `reasoning_gym:<task>` makes them."""

import functools
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from ullage.base.errors import ConfigError, DataError

# These compare grids as tuples of tuples, which JSON turns into lists.
TASKS_WITH_TUPLES = frozenset({"arc_agi", "rearc"})


def require_package(part: str) -> None:
    """ConfigError unless reasoning-gym can be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of a dependency's source, when it is first compiled
            import reasoning_gym  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the {part} 'reasoning_gym' needs the package reasoning-gym: {error}",
            "install it: pip install 'ullage[reasoning-gym]'",
        ) from error


def answer_in(response: str) -> str:
    """What stands in the last `<answer>` tags, else the whole response."""
    answers = re.findall(r"<answer>(.*?)</answer>", response, flags=re.DOTALL)
    return str(answers[-1] if answers else response).strip()


def score_answer(answer: str, prompt: Any, target: Any, extra: dict[str, Any]) -> float:  # noqa: ANN401
    """The task's own score, mostly between 0 and 1."""
    entry = _entry(prompt, target, extra)
    return _scorer(entry["metadata"]["source_dataset"])(answer, entry)


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym

    scorer: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(task)
    return scorer


def _entry(prompt: Any, target: Any, extra: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """The task's entry: the row's `reasoning_gym` column, or made from its `metadata`; either may be JSON text."""
    entry = _decoded(extra.get("reasoning_gym")) or {
        "question": prompt,
        "answer": target,
        "metadata": _decoded(extra.get("metadata")),
    }
    task = (entry.get("metadata") or {}).get("source_dataset")
    if task is None:
        raise DataError(
            "the row does not say which reasoning-gym task it comes from: no metadata.source_dataset",
            "take the rows from the task: data.train_files=reasoning_gym:<task>",
        )
    if task in TASKS_WITH_TUPLES:
        entry = {**entry, "metadata": _with_tuples(entry["metadata"])}
    return entry


def _decoded(column: Any) -> Any:  # noqa: ANN401
    return json.loads(column) if isinstance(column, str) else column


def _with_tuples(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(_with_tuples(item) for item in value) if isinstance(value, list) else value
