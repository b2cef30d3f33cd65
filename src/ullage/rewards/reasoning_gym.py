"""Any reasoning-gym task: rows made here, answers scored by the task itself.

>>> row = make_rows("chain_sum", size=1, seed=3, min_terms=2, max_terms=2)[0]
>>> row["prompt"]
'State the final answer to the following arithmetic problem: 57 - 87 ='
>>> score(row["prompt"], "<answer>-30</answer>", row["answer"], extra=row)
1.0
"""

import functools
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from ullage.base.errors import ConfigError, DataError

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a dependency's source, when it is first compiled
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
except ImportError as error:
    raise ConfigError(
        f"the reward 'reasoning_gym' needs the package reasoning-gym: {error}",
        "install it: pip install 'ullage[reasoning-gym]'",
    ) from error

# These compare grids as tuples of tuples, which JSON turns into lists.
TASKS_WITH_TUPLES = frozenset({"arc_agi", "rearc"})


def make_rows(task: str, size: int, seed: int, **config: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Training rows of a task, ready for JSONL; `config` is the task's own."""
    if task not in DATASETS:
        raise ConfigError(f"reasoning-gym has no task called '{task}'", f"it has: {', '.join(sorted(DATASETS))}")
    dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **config)
    rows = [
        {
            "prompt": entry["question"],
            # Tasks with many right answers store none and score from the metadata.
            "answer": "" if entry["answer"] is None else entry["answer"],
            "source": task,
            "metadata": entry["metadata"],
        }
        for entry in (dataset[index] for index in range(size))
    ]
    plain: list[dict[str, Any]] = json.loads(json.dumps(rows))
    return plain


def score(
    prompt: Any,  # noqa: ANN401
    response: str,
    target: Any,  # noqa: ANN401
    *,
    extra: dict[str, Any],
    **kwargs: Any,  # noqa: ANN401
) -> float:
    """The task's own score of what stands in the last `<answer>` tags, else of the whole response."""
    entry = _entry(prompt, target, extra)
    answers = re.findall(r"<answer>(.*?)</answer>", response, flags=re.DOTALL)
    answer = (answers[-1] if answers else response).strip()
    return float(_scorer(entry["metadata"]["source_dataset"])(answer, entry))


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
            "make the rows with ullage.rewards.reasoning_gym.make_rows",
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
