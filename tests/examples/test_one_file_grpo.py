"""The teaching loop runs as it stands, and learns."""

import asyncio
from pathlib import Path

import pytest

from examples import one_file_grpo as example
from proxima.data.flow import Score
from tests.tiny import VOCABULARY

FILE = Path(__file__).resolve().parents[2] / "examples" / "one_file_grpo.py"


def test_it_fits_on_a_few_screens():
    assert len(FILE.read_text().splitlines()) <= 250


def test_no_question_is_both_trained_and_held_out():
    training, held_out = example.arithmetic(seed=1)
    assert len(training) == 300 and len(held_out) == 100
    assert not {q.text for q in training} & {q.text for q in held_out}


@pytest.mark.slow
def test_the_policy_learns_what_is_rewarded(tiny_model, capsys):
    """On a random model: tokens of the upper half of the vocabulary. One update a batch, so the ratio is 1 and nothing
    is masked."""

    def upper_half(prompt, completion):
        return Score(value=sum(token >= VOCABULARY // 2 for token in completion.tokens) / len(completion.tokens))

    settings = example.Settings(steps=24, prompts=4, completions=16, max_tokens=8, lr=1e-2, dtype="float32")
    questions = [
        example.Question(f"Say {word}", "") for word in ("one", "two", "three", "four", "five", "six", "seven")
    ]
    _, engine, history = asyncio.run(example.learn(str(tiny_model("llama")), questions, upper_half, settings))
    reward = [m["reward"] for m in history]
    assert sum(reward[-3:]) / 3 > sum(reward[:3]) / 3 + 0.3, reward
    # engine and trainer agree on every log-prob, so the behavior policy is the proximal one to float32 rounding, each
    # step anew
    assert max(m["mismatch/log_prob_absdiff_mean"] for m in history) < 1e-4
    assert all(abs(m["ratio_mean"] - 1) < 1e-4 and m["masked_fraction"] == 0 for m in history)
    assert engine.scheduler.version == 24
    assert capsys.readouterr().out.count("step ") == 24
