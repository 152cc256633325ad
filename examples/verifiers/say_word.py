"""An environment of the library verifiers: repeat a word, and say nothing else.

Install it as any environment, or run in its folder: `python` of the recipe then imports it from there.
"""

import random

import verifiers as vf
from datasets import Dataset

CONSONANTS, VOWELS = "bdfgklmnprst", "aeiou"


def invented(count: int, seed: int) -> list[str]:
    """Distinct words of two or three syllables."""
    draw, words = random.Random(seed), set()
    while len(words) < count:
        words.add("".join(draw.choice(CONSONANTS) + draw.choice(VOWELS) for _ in range(draw.randint(2, 3))))
    return sorted(words)


def load_environment(train: int = 200, held_out: int = 50, seed: int = 0) -> vf.Environment:
    """The words of training and evaluation are distinct."""
    words = invented(train + held_out, seed)
    random.Random(seed).shuffle(words)
    rows = [{"question": f"Say: {word}", "answer": word} for word in words]

    def exact(completion, answer) -> float:
        return float(completion[-1]["content"].strip().strip(".\"'").lower() == answer)

    def said(completion, answer) -> float:
        return float(answer in completion[-1]["content"].lower())

    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows[:train]),
        eval_dataset=Dataset.from_list(rows[train:]),
        system_prompt="Repeat the word.",
        rubric=vf.Rubric(funcs=[exact, said], weights=[1.0, 0.0]),
    )
