"""The reward of recipe.yaml."""

import re
from typing import Any


def right_number(completion: str, answer: Any) -> dict[str, float | bool]:
    """1 if the last number of the completion is the last number of the row's answer, else 0.

    Called once per completion, in a worker process: if it raises or hangs, that completion has no score and the run
    continues. Returns a number, or a dict: `value` is trained on, `correct` counts as accuracy, and any other number is
    logged.
    """
    expected = number_at_end(str(answer))
    correct = expected is not None and number_at_end(completion) == expected
    return {"value": float(correct), "correct": correct}


def number_at_end(text: str) -> float | None:
    """-1234.5 for `It is $-1,234.50.`; None without a number."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(numbers[-1]) if numbers else None
