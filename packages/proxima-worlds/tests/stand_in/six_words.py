"""An environment of one question, asked with six words."""

import random

import verifiers as vf

WORDS = ("red", "blue", "green", "pink", "gold", "grey")


def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


def of_all(states):
    return [0.0] * len(states)


def load_environment(system: str = "", evaluated: bool = False, grouped: bool = False, shown: object = None):
    start = [{"role": "system", "content": system}] if system else []
    rows = [
        {"prompt": [*start, {"role": "user", "content": shown or f"Say {word}."}], "answer": word, "draw": draw}
        for word in WORDS
        for draw in [random.random()]  # without a seed, as in some published environments
    ]
    rubric = vf.Rubric([of_all] if grouped else [exact], [1.0])
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows[:2] if evaluated else None, rubric=rubric)
