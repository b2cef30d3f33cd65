"""Generated sums for the demo: every problem once, split into training and held-out rows."""

import random

from ullage.base.seeds import derive

SUM_FORMAT = "{a} + {b} = "


def one_digit_sums(
    *, seed: int, held_out_fraction: float = 0.25, smallest: int = 1, largest: int = 9, prompt_format: str = SUM_FORMAT
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows of `a + b`; both orders of a pair are on one side, so no held-out sum was trained."""
    numbers = range(smallest, largest + 1)
    pairs = [(a, b) for a in numbers for b in numbers if a <= b]
    random.Random(derive(seed, "one digit sums")).shuffle(pairs)
    held_out = set(pairs[: round(held_out_fraction * len(pairs))])
    train_rows: list[dict[str, str]] = []
    held_out_rows: list[dict[str, str]] = []
    for a in numbers:
        for b in numbers:
            side = held_out_rows if (min(a, b), max(a, b)) in held_out else train_rows
            prompt = prompt_format.format(a=a, b=b)
            side.append({"prompt": prompt, "answer": str(a + b), "data_source": "one_digit_sums"})
    return train_rows, held_out_rows
