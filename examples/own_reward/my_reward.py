"""Three custom rewards, each in another form. docs/rewards.md walks through them.

proxima reward score examples/own_reward/answers.jsonl --reward examples/own_reward/my_reward.py:near
proxima train examples/own_reward/recipe.yaml
"""

import re


def near(completion: str, gold, difficulty):
    """Score from 0 to 1 how near the last number is to the right one. A miss costs less on a harder question.

    `gold` and `difficulty` are columns of the data.
    """
    numbers = re.findall(r"-?\d+", completion)
    if not numbers:
        return 0.0
    miss = abs(int(numbers[-1]) - int(gold))
    return 1 / (1 + miss / difficulty)


def brief(completions, **columns):
    """Score 1 up to 12 characters, less for longer texts. TRL's form: all completions of a prompt, a list of floats."""
    return [min(1.0, 12 / max(1, len(text))) for text in completions]


def right(completion: str, gold):
    """Return True if the last number is the right one; as it is a bool, reports show it as accuracy."""
    return re.findall(r"-?\d+", completion)[-1:] == [gold]
