import json

import pytest

from proxima.reward.workers.graders import decode_json
from proxima.task.reasoning_gym import ReasoningGymTask, encode_json

pytest.importorskip("reasoning_gym")


@pytest.mark.slow
def test_rows_carry_the_entry_that_the_scorer_reads():
    from reasoning_gym import create_dataset

    rows = ReasoningGymTask(task="countdown", size=3, config={"min_numbers": 3, "max_numbers": 3}).rows(5)
    assert len(rows) == 3 and rows[0].answer and rows[0].messages[0]["content"] != rows[1].messages[0]["content"]
    source = json.loads(json.dumps(rows[2].metadata))["reasoning_gym"]
    assert source["task"] == "countdown"
    entry = create_dataset("countdown", size=3, **decode_json(source["config"]))[2]
    assert decode_json(source["entry"]) == entry
    assert rows[2].messages[0]["content"] == entry["question"] and rows[2].answer == entry["answer"]


def test_seeds_and_sides_differ_and_nothing_else():
    def first(seed, split="train"):
        return ReasoningGymTask(task="chain_sum", size=2, split=split).rows(seed)[1]

    assert first(1) == first(1)
    assert len({first(seed, split).messages[0]["content"] for seed in (1, 2) for split in ("train", "test")}) == 4


@pytest.mark.parametrize(
    "value",
    [(1, (2, [3])), {"a": (1,), "b": {1: (2,), (3, 4): None}}, [True, None, 1.5, "x"], {"__tuple__": [1], "b": 1}, {}],
)
def test_frozen_values_survive_json(value):
    assert decode_json(json.loads(json.dumps(encode_json(value)))) == value


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"task": "countdown", "config": {"min_number": 3}},
            "is not a setting of the reasoning_gym task 'countdown'; did you mean 'min_numbers'",
        ),
        ({"task": "countdown", "config": {"zzz": 3}}, "known: max_numbers, max_target"),
        (
            {"task": "countdown", "config": {"min_numbers": 0}},
            "is refused by the reasoning_gym task 'countdown': min_numbers must be greater than 1",
        ),
        ({"task": "composite"}, "is not a reasoning_gym task"),
    ],
)
def test_bad_settings_of_a_task(fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        ReasoningGymTask(**fields).rows(1)
    assert "\n" not in str(caught.value)
