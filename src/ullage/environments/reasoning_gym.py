"""Any reasoning-gym task with several attempts: a wrong answer is told so, and the last one counts.

Rows come from the task (`data.train_files: [reasoning_gym:<task>]`), scores from the task's own scorer.
"""

from ullage.base.errors import ConfigError
from ullage.base.reasoning_gym_scores import answer_in, require_package, score_answer
from ullage.environments import Row, Turn

require_package("environment")

FULL_MARKS = 1.0


class Environment:
    """One question, a few attempts at it."""

    def __init__(self, attempts: int = 3, discount: float = 1.0, feedback: str = "Wrong. Try again.") -> None:
        if attempts < 1:
            raise ConfigError(f"environment.kwargs.attempts = {attempts}", "give at least one")
        self.attempts = attempts
        self.discount = discount
        """What every further attempt costs: the score of attempt k is multiplied by discount ** (k - 1)."""
        self.feedback = feedback

    def reset(self, row: Row) -> None:
        self.row = row
        self.used = 0

    def step(self, action: str) -> Turn:
        """Score the attempt; anything but full marks may be tried again."""
        answer = answer_in(action)
        score = score_answer(answer, self.row.prompt, self.row.target, self.row.extra)
        worth = score * self.discount**self.used
        self.used += 1
        if score >= FULL_MARKS or self.used == self.attempts:
            return Turn(reward=worth, done=True, answer=answer)
        return Turn(self.feedback)
