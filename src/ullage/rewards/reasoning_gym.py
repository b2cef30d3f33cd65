"""Any reasoning-gym task: answers scored by the task itself, on rows as `reasoning_gym:<task>` makes them.

>>> row = {"metadata": {"source_dataset": "chain_sum"}}
>>> score("57 - 87 =", "So it is <answer>-30</answer>.", "-30", extra=row)
1.0
"""

from typing import Any

from ullage.base.reasoning_gym_scores import answer_in, require_package, score_answer
from ullage.rewards.results import Judged

require_package("reward")


def score(
    prompt: Any,  # noqa: ANN401
    response: str,
    target: Any,  # noqa: ANN401
    *,
    extra: dict[str, Any],
    **kwargs: Any,  # noqa: ANN401
) -> Judged:
    """The task's own score of what stands in the last `<answer>` tags, else of the whole response."""
    answer = answer_in(response)
    return Judged(score_answer(answer, prompt, target, extra), answer)
