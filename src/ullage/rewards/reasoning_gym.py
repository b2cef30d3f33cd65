"""Any reasoning-gym task: answers scored by the task itself, on rows as `reasoning_gym:<task>` makes them.

>>> row = {"metadata": {"source_dataset": "chain_sum"}}
>>> score("57 - 87 =", "So it is <answer>-30</answer>.", "-30", extra=row)
1.0
"""

import functools
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from ullage.base.errors import ConfigError, DataError
from ullage.rewards.results import Judged

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a dependency's source, when it is first compiled
        import reasoning_gym
except ImportError as error:
    raise ConfigError(
        f"the reward 'reasoning_gym' needs the package reasoning-gym: {error}",
        "install it: pip install 'ullage[reasoning-gym]'",
    ) from error

# These compare grids as tuples of tuples, which JSON turns into lists.
TASKS_WITH_TUPLES = frozenset({"arc_agi", "rearc"})


def score(
    prompt: Any,  # noqa: ANN401
    response: str,
    target: Any,  # noqa: ANN401
    *,
    extra: dict[str, Any],
    **kwargs: Any,  # noqa: ANN401
) -> Judged:
    """The task's own score of what stands in the last `<answer>` tags, else of the whole response."""
    entry = _entry(prompt, target, extra)
    answers = re.findall(r"<answer>(.*?)</answer>", response, flags=re.DOTALL)
    answer = (answers[-1] if answers else response).strip()
    return Judged(_scorer(entry["metadata"]["source_dataset"])(answer, entry), answer)


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
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
