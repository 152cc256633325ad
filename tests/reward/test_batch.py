"""Rewards that look at the whole batch of a step: what they add to scores that are there, and what their failures
cost."""

import asyncio
import textwrap
import threading
from dataclasses import dataclass, replace

import pytest

from proxima.data.flow import Group, Score
from proxima.reward.base import NOT_APPLICABLE, WeightedReward
from proxima.reward.function import FunctionBatch
from proxima.reward.length import Length
from proxima.reward.math.numbers import Number
from proxima.reward.repetition import Diversity
from proxima.reward.text import Exact
from tests.reward.make import SHORT, completions, hurry, prompt, runner

pytestmark = pytest.mark.usefixtures("lent_servers")


def groups_of(made, *texts, answer="42"):
    """A group for each list of texts, scored by the rewards that need no batch."""

    async def main():
        rows = [replace(prompt(answer), uid=i) for i in range(len(texts))]
        scores = [await made.score(row, completions(*own)) for row, own in zip(rows, texts, strict=True)]
        return [
            Group(prompt=row, completions=tuple(completions(*own)), scores=tuple(said))
            for row, own, said in zip(rows, texts, scores, strict=True)
        ]

    return asyncio.run(main())


def batch(rewards, *texts, answer="42", **options):
    with runner(*rewards, **options) as made:
        return asyncio.run(made.score_batch(groups_of(made, *texts, answer=answer)))


def values(groups):
    return [[score.value if score.valid else None for score in group.scores] for group in groups]


GATE = threading.Event()


@dataclass(frozen=True, kw_only=True)
class Rank(WeightedReward):
    """0 to the shortest text of the batch, 1 to the longest; `correct` where it is."""

    whole_batch = True
    knows: bool = False

    def score_batch(self, groups):
        texts = [c.text for group in groups for c in group.completions]
        if "raise" in texts:
            raise RuntimeError("no order")
        if "hang" in texts:
            GATE.wait()
        if "few" in texts:
            return [[Score(value=0.0)]]
        lengths = sorted({len(text) for text in texts})
        top = max(1, len(lengths) - 1)

        def one(text):
            if text == "nan":
                return Score(value=float("nan"))
            if text == "failed":
                return Score.failed("no opinion")
            correct = len(text) == 1 if self.knows else None
            return Score(value=lengths.index(len(text)) / top, correct=correct, parts={"n": len(texts)})

        return [[one(c.text) for c in group.completions] for group in groups]


def test_what_the_batch_says_is_weighted_and_added():
    scored = batch([Number(), Rank(name="rank", weight=-2.0)], ["42", "no"], ["the answer is 42"])
    assert values(scored) == [[1.0, 0.0], [-1.0]]
    assert [score.parts for group in scored for score in group.scores] == [
        {"number": 1.0, "rank": 0.0, "rank/n": 3.0},
        {"number": 0.0, "rank": 0.0, "rank/n": 3.0},
        {"number": 1.0, "rank": 1.0, "rank/n": 3.0},
    ]
    assert [score.correct for group in scored for score in group.scores] == [True, False, True]


def test_score_leaves_them_out_and_without_them_nothing_changes():
    with runner(Number(), Rank()) as made:
        (group,) = groups_of(made, ["42"])
        assert made.has_batch and group.scores == (Score(value=1.0, parts={"number": 1.0}, correct=True),)
        assert asyncio.run(made.score_batch([])) == []
    with runner(Number()) as made:
        groups = groups_of(made, ["42"])
        assert not made.has_batch and asyncio.run(made.score_batch(groups)) == groups


def test_a_batch_reward_alone_sets_correct():
    with runner(Rank(knows=True)) as made:
        groups = groups_of(made, ["a", "bb"])
        assert groups[0].scores == (Score(value=0.0),) * 2
        longest = Score(value=1.0, parts={"rank": 1.0, "rank/n": 2.0}, correct=False)
        assert asyncio.run(made.score_batch(groups))[0].scores[1] == longest


@dataclass(frozen=True, kw_only=True)
class OnRows(WeightedReward):
    """1, on completions with its letter; it does not apply to others."""

    letter: str

    def score(self, prompt, completions):
        return [Score(value=1.0) if self.letter in c.text else NOT_APPLICABLE for c in completions]


@dataclass(frozen=True, kw_only=True)
class OnRowsOfBatch(OnRows):
    whole_batch = True

    def score_batch(self, groups):
        return [self.score(group.prompt, group.completions) for group in groups]


def test_a_completion_to_which_no_reward_that_counts_applies_has_no_score():
    texts = ["a", "b", "ab", "-"]
    logged = [Rank(name="rank", weight=0.0), Length(name="length", weight=0.0)]
    (alone,) = batch([OnRows(letter="a")], texts)
    (beside,) = batch([OnRows(letter="a"), *logged], texts)
    assert values([alone]) == values([beside]) == [[1.0, None, 1.0, None]]
    assert {s.error for s in beside.scores if not s.valid} == {"no reward applies to this row"}
    assert [sorted(s.parts) for s in beside.scores][1] == ["length", "rank", "rank/n"]  # still logged

    both = [OnRows(name="one", letter="a", weight=2.0), OnRowsOfBatch(name="all", letter="b", weight=5.0)]
    assert values(batch([*both, *logged], texts)) == [[2.0, 5.0, 7.0, None]]
    assert values(batch([OnRowsOfBatch(letter="b")], texts)) == [[None, 1.0, 1.0, None]]


def test_correct_is_kept_where_it_is_known():
    scored = batch([Exact(), Rank(knows=True)], ["a", "bb"], answer="bb")
    assert [score.correct for score in scored[0].scores] == [False, True]


def test_failures_of_one_completion_and_of_the_call():
    single = batch([Length(), Rank()], ["nan", "a"], ["failed"])
    assert values(single) == [[None, 0.0], [None]]
    assert single[0].scores[0].error == "rank: ValueError: returned nan, expected a finite number"
    assert single[1].scores[0].error == "rank: no opinion" and single[1].scores[0].parts == {"length": 0.0}
    whole = batch([Length(), Rank()], ["raise", "a"], ["b"])
    assert values(whole) == [[None, None], [None]]
    assert {score.error for group in whole for score in group.scores} == {"rank: RuntimeError: no order"}
    few = batch([Length(), Rank()], ["few", "a"], ["b"])
    message = "rank: ValueError: returned 1 lists with 1 scores, expected 2 lists with one score for each completion"
    assert {score.error for group in few for score in group.scores} == {message}
    assert values(batch([Length(), Rank(weight=0.0)], ["raise", "a"])) == [[0.0, 0.0]]


@pytest.mark.slow
def test_a_batch_reward_that_hangs_has_the_time_of_all_its_groups():
    scored = batch([Length(), Rank()], ["hang"], ["a"], ["b"], timeout=0.1)
    GATE.set()
    assert {score.error for group in scored for score in group.scores} == {"rank: timed out after 0.3 s"}


def test_what_is_invalid_already_stays_so_and_keeps_both_reasons():
    scored = batch([Number(), Rank()], ["42"], answer="many")
    (score,) = scored[0].scores
    assert score.error.startswith("number: ValueError: answer 'many'")
    assert not score.valid and score.parts["rank"] == 0.0
    (score,) = batch([Number(), Rank()], ["raise"], answer="many")[0].scores
    assert score.error.endswith("; rank: RuntimeError: no order")


DIVERSE = [
    (["we add three and four", "we add three and five"], [1 / 3, 1 / 3]),
    (["we add three and four", "we add three and four"], [0.0, 0.0]),
    (["we add three and four", "the sum is easily seen"], [1.0, 1.0]),
    (["WE add\nthree", "we add three"], [0.0, 0.0]),
    (["a b a b a b a b", "nothing of the kind"], [1.0, 1.0]),
    (["a b c", "a b c d e f"], [0.0, 3 / 4]),
    (["", "two words", "three words now"], [0.0, 0.0, 1.0]),
]


@pytest.mark.parametrize(("texts", "shares"), DIVERSE)
def test_diversity_is_what_no_other_says_in_the_group_or_beside_it(texts, shares):
    together = batch([Diversity()], texts)
    apart = batch([Diversity()], *([text] for text in texts))
    assert values(together)[0] == pytest.approx(shares) and [row[0] for row in values(apart)] == pytest.approx(shares)


def test_diversity_of_tokens_and_of_one():
    assert values(batch([Diversity(unit="tokens", n=1)], ["a", "b"])) == [[0.0, 0.0]]
    assert values(batch([Diversity(n=1)], ["a b"])) == [[1.0]]


SOURCE = """
import asyncio, os, time
from proxima.data.flow import Group, Score

def rank(groups: tuple[Group, ...]):
    texts = [c.text for group in groups for c in group.completions]
    if "raise" in texts: raise KeyError("gone")
    if "die" in texts: os._exit(1)
    if "hang" in texts: time.sleep(6000)
    if "few" in texts: return [[1.0]]
    best = max(map(len, texts))
    return [[float(len(c.text) == best) for c in group.completions] for group in groups]

async def facts(groups):
    await asyncio.sleep(0)
    group = groups[-1]
    kinds = type(groups), type(group.completions), type(group.prompt.messages), type(group.completions[0].tokens)
    assert [kind.__name__ for kind in kinds] == ["tuple", "tuple", "tuple", "ndarray"]
    first, second = group.scores
    assert first.valid and first.value == 1.0 and first.parts == {"number": 1.0} and first.correct is True
    assert second.value == 0.0
    said = [Score(value=0.5, correct=False, parts={"a": 2.0}), {"value": len(groups), "n": group.prompt.uid}]
    return [[Score.failed("no opinion"), float("nan")] for _ in groups[:-1]] + [said]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    made = tmp_path_factory.mktemp("batch") / "my_batch.py"
    made.write_text(textwrap.dedent(SOURCE))
    return made


def test_your_function_gets_groups_and_may_return_what_function_may(file):
    scored = batch([Number(), FunctionBatch(path=f"{file}:facts")], ["1", "2"], ["42", "0"])
    assert values(scored) == [[None, None], [1.5, 2.0]]
    errors = ["RuntimeError: no opinion", "ValueError: returned nan, expected a finite number"]
    assert [score.error for score in scored[0].scores] == [f"facts: {error}" for error in errors]
    first, second = scored[1].scores
    assert first.parts == {"number": 1.0, "facts": 0.5, "facts/a": 2.0} and first.correct is True
    assert second.parts["facts/n"] == 1.0


@pytest.mark.slow
def test_a_failing_function_costs_the_step_and_the_next_continues(file, monkeypatch):
    hurry(monkeypatch, "hang")
    errors = {"raise": "KeyError: 'gone' (my_batch.py:7)", "die": "its worker ended"}
    errors["hang"] = f"timed out after {2 * SHORT:g} s"  # of two groups
    errors["few"] = "ValueError: returned 1 lists with 1 scores, expected 2 lists with one score for each completion"
    with runner(Length(), FunctionBatch(path=f"{file}:rank")) as made:
        for text, error in errors.items():
            scored = asyncio.run(made.score_batch(groups_of(made, [text, "a"], ["b"])))
            assert values(scored) == [[None, None], [None]], text
            assert {score.error for group in scored for score in group.scores} == {f"rank: {error}"}
        assert values(asyncio.run(made.score_batch(groups_of(made, ["aa", "b"])))) == [[1.0, 0.0]]
