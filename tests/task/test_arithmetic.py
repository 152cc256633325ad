import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.task.generated import Arithmetic


def questions(task, seed=1):
    rows = task.rows(seed)
    return [rows[i].messages[0]["content"] for i in range(len(rows))]


def test_the_first_rows_are_these():
    task = Arithmetic(operators=("+", "-", "*", "/"), high=99, size=8)
    rows = task.rows(1)
    assert [(rows[i].messages[0]["content"], rows[i].answer) for i in range(8)] == FIRST
    assert rows[1].metadata["operator"] == "-" and rows[1].metadata["operands"] == [86, 22]
    assert questions(task, 1) != questions(task, 2)


FIRST = [
    ("What is 85 + 1?", "86"),
    ("What is 86 - 22?", "64"),
    ("What is 65 * 17?", "1105"),
    ("What is 222 / 37?", "6"),
    ("What is 59 + 33?", "92"),
    ("What is 3 - 39?", "-36"),
    ("What is 6 * 14?", "84"),
    ("What is 296 / 4?", "74"),
]


@pytest.mark.slow
@given(
    operators=st.sets(st.sampled_from("+-*/"), min_size=1).map(tuple),
    low=st.integers(-30, 5),
    width=st.integers(6, 60),
    seed=st.integers(0, 2**63),
    split=st.sampled_from(["train", "test"]),
)
def test_answers_are_right_and_operands_in_range(operators, low, width, seed, split):
    rows = Arithmetic(operators=operators, low=low, high=low + width, size=4, held_out=0.5, split=split).rows(seed)
    for i in range(len(rows)):
        a, op, b = re.fullmatch(r"What is (-?\d+) ([-+*/]) (-?\d+)\?", rows[i].messages[0]["content"]).groups()
        assert (
            int(rows[i].answer)
            == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / (int(b) or 1)}[op]
        )
        assert low <= int(b) <= low + width and (op != "/" or int(b) != 0)
        assert low <= (int(rows[i].answer) if op == "/" else int(a)) <= low + width


def canonical(question):
    a, op, b = re.fullmatch(r"What is (-?\d+) ([-+*/]) (-?\d+)\?", question).groups()
    return (op, *sorted((int(a), int(b)))) if op in "+*" else (op, int(a), int(b))


@pytest.mark.parametrize("held_out", [0.1, 0.5])
def test_no_test_question_is_trained_on_whatever_the_seeds(held_out):
    common = {"operators": ("+", "-", "*", "/"), "high": 30, "held_out": held_out}
    train = {canonical(q) for seed in (1, 2) for q in questions(Arithmetic(**common, size=1000), seed)}
    test = {canonical(q) for seed in (1, 3) for q in questions(Arithmetic(**common, size=200, split="test"), seed)}
    assert len(train) > 500 and len(test) > 150
    assert not train & test


def test_the_sides_together_are_all_questions():
    train = questions(Arithmetic(high=12, size=107, held_out=0.2))
    test = questions(Arithmetic(high=12, size=37, held_out=0.2, split="test"))
    assert sorted({*train, *test}) == sorted(f"What is {a} + {b}?" for a in range(1, 13) for b in range(1, 13))


def test_too_small_a_range_names_the_counts():
    with pytest.raises(ValueError) as caught:
        Arithmetic(high=12, size=108, held_out=0.2).rows(1)
    assert str(caught.value) == (
        "size=108 must be <= 107, the number of distinct questions that operands 1…12 and 1…12 with + give on the "
        "train side (held_out=0.2); widen the range or lower size"
    )


@pytest.mark.slow
@pytest.mark.parametrize("digits", [4, 9])
def test_ranges_too_large_to_list(digits):
    asked = questions(Arithmetic(operators=("+", "-"), digits=digits, size=1000))
    assert len(set(asked)) == 1000
    assert max(len(re.findall(r"\d+", q)[0]) for q in asked) == digits
    tested = questions(Arithmetic(operators=("+", "-"), digits=digits, size=300, split="test", held_out=0.01), 2)
    assert len(set(tested)) == 300


def test_operators_take_turns_and_fill_each_other_up():
    asked = questions(
        Arithmetic(operators=("+", "/"), low=1, high=9, second_low=2, second_high=3, size=36, held_out=0.0)
    )
    operators = [q.split()[3] for q in asked]
    assert operators[:6] == ["+", "/"] * 3
    assert (operators.count("+"), operators.count("/")) == (18, 18)
    asked = questions(
        Arithmetic(operators=("+", "/"), low=1, high=9, second_low=0, second_high=1, size=27, held_out=0.0)
    )
    assert [q.split()[3] for q in asked].count("/") == 9


def test_digits_second_range_and_template():
    task = Arithmetic(
        digits=2, low=10, second_low=1, second_high=9, operators=("*",), template="{b} times {a}", size=30
    )
    assert task.ranges == ((10, 99), (1, 9))
    row = task.rows(1)[0]
    a, b = row.metadata["operands"]
    assert row.messages[0]["content"] == f"{b} times {a}" and 10 <= a <= 99 and 1 <= b <= 9


def test_pairs_are_the_result_against_a_number_near_it():
    """The same for a question whatever the seed, so that a held-out pair is one in every run."""
    task = Arithmetic(operators=("+", "-"), high=30, size=200, pairs=True)
    pairs = {}
    for seed in (1, 2):
        rows = task.rows(seed)
        for row in map(rows.__getitem__, range(len(rows))):
            chosen, rejected = row.metadata["chosen"], row.metadata["rejected"]
            assert chosen == row.answer and int(rejected) - int(chosen) in (-10, -2, -1, 1, 2, 10)
            assert pairs.setdefault(row.messages[0]["content"], rejected) == rejected
    assert len({int(rejected) for rejected in pairs.values()}) > 40
    assert "chosen" not in Arithmetic(size=1).rows(1)[0].metadata
