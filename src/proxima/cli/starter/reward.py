"""The reward of recipe.yaml."""

from typing import Any


def brief_answer(prompt: Any, completion: Any) -> dict[str, float | bool]:
    """0 unless the first word is the row's answer; otherwise 0.5, plus 0.5 divided by the number of words.

    Called once per completion, in a worker process: if it raises or hangs, that completion has no score and the run
    continues. `prompt.answer` is the row's answer, `completion.text` the model's answer. Returns a number, or a dict:
    `value` is trained on, `correct` counts as accuracy, and any other number is logged.
    """
    words = completion.text.lower().replace(",", " ").replace(".", " ").split()
    correct = words[:1] == [prompt.answer]
    return {"value": 0.5 + 0.5 / len(words) if correct else 0.0, "correct": correct}
