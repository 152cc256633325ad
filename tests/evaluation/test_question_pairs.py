"""Two results compared by what their answers have: accuracy, reward, a part of it, length."""

from dataclasses import replace

import pytest

from proxima.data import UserError
from proxima.data.episode import Episode, Span, ToolCall
from proxima.data.flow import Score
from proxima.evaluation.group_metrics import eval_metrics
from proxima.evaluation.intervals import wilson
from proxima.evaluation.question_pairs import changed_questions, compare_results, metrics_of
from proxima.evaluation.results import read_result
from proxima.runtime.state.rollouts import write_evals
from proxima.task.mix import Mix, WeightedTask, sources_of
from tests.evaluation.test_group_metrics import group

WORDS = ("aa", "bbb", "c", "dd")


def results(tmp_path, *sides):
    """Of each side the score of each question's only answer, as a run writes them."""
    collected = []
    for i, scores in enumerate(sides):
        folder = tmp_path / str(i) / "evals"
        folder.mkdir(parents=True)
        text = [word * (i + 1) for word in WORDS]
        write_evals(folder / "000004-after.parquet", 4, [group(uid, (text[uid], s)) for uid, s in enumerate(scores)])
        collected.append(read_result(tmp_path / str(i)))
    return collected


def test_episodes_are_compared_by_turns_calls_and_written_length(tmp_path):
    said = Span(role="assistant", tokens=1, sampled=True, calls=(ToolCall(name="add"),))
    spans = (said, Span(role="tool", tokens=1), replace(said, turn=1, calls=()))
    plain, played = group(0, ("abc", Score(value=1.0))), Episode(spans=spans, reward=1.0)
    completion = replace(plain.completions[0], sampled=(True, False, True), episode=played)
    folder = tmp_path / "evals"
    folder.mkdir()
    write_evals(folder / "000004-after.parquet", 4, [replace(plain, completions=(completion,))])
    question = read_result(tmp_path).suites["held-out"][0]
    assert [question.values(name) for name in ("turns", "calls", "length")] == [(2.0,), (1.0,), (2.0,)]
    metrics = eval_metrics([replace(plain, completions=(completion,))], samples=1)
    assert metrics["episodes"]["episode/turns/mean"] == 2 and metrics["episodes"]["episode/calls"] == 1
    assert "episodes" not in eval_metrics([plain], samples=1)


def test_a_run_is_compared_set_by_set(tmp_path):
    """The last evaluation has a file of each set; `eval.task` and a further set are not mixed up."""
    (folder := tmp_path / "evals").mkdir()
    for step, label, word in (
        (2, "step", "a"),
        (2, "step-hard-ones", "b"),
        (4, "after", "c"),
        (4, "after-hard-ones", "d"),
    ):
        file = folder / f"{step:06d}-{label}.parquet"
        write_evals(file, step, [group(0, (word, Score(value=1.0, correct=True)))])
    found = read_result(tmp_path).suites
    assert {name: questions[0].texts for name, questions in found.items()} == {"held-out": ("c",), "hard-ones": ("d",)}
    assert list(read_result(folder / "000002-step-hard-ones.parquet").suites) == ["hard-ones"]
    assert list(read_result(folder / "000002-step.parquet").suites) == ["held-out"]
    assert [c.name for c in compare_results(*[read_result(tmp_path)] * 2)][:2] == ["held-out", "hard-ones"]


def test_rewards_are_compared_where_nothing_is_right_or_wrong(tmp_path):
    """By hand: differences .5, .25, 1 and one unknown. All one way: 2 of the 8 signs reach the sum, p = 1/4."""
    first = [Score(value=v, parts={"style": v, "style/near": -v}) for v in (0.0, 0.5, -1.0, 2.0)]
    second = [Score(value=v, parts={"style": v, "style/near": -v}) for v in (0.5, 0.75, 0.0)] + [Score.failed("no")]
    a, b = results(tmp_path, first, second)
    (comparison,) = compare_results(a, b)
    assert (comparison.metric, comparison.test) == ("reward", "sign flips")
    assert (comparison.questions, comparison.left_out) == (3, 1)
    assert (comparison.won, comparison.lost, comparison.tied, comparison.p) == (3, 0, 0, 0.25)
    assert comparison.difference.value == pytest.approx(1.75 / 3) and comparison.difference.method == "bootstrap"
    assert comparison.first.value == pytest.approx(-0.5 / 3) and comparison.first.low == -1.0  # not cut to [0, 1]
    (near,) = compare_results(a, b, metric="style/near")
    assert (near.won, near.lost, near.difference.value) == (0, 3, pytest.approx(-1.75 / 3))
    (length,) = compare_results(a, b, metric="length")
    assert (length.questions, length.difference.value) == (4, 2.0)  # a failed score has a length all the same
    assert metrics_of(a) == {"accuracy", "reward", "style", "style/near", "length", "truncated"}
    with pytest.raises(UserError, match="held-out: no question has a known accuracy on both sides"):
        compare_results(a, b, metric="accuracy")


def test_equal_rewards_are_no_difference_of_no_width(tmp_path):
    (comparison,) = compare_results(*results(tmp_path, *[[Score(value=3.0)] * 4] * 2))
    difference = comparison.difference
    assert (comparison.p, difference.low, difference.high, difference.method) == (1.0, 0.0, 0.0, "constant")


def test_one_known_verdict_makes_it_accuracy(tmp_path):
    judged = [Score(value=0.3, correct=True), *[Score(value=0.1)] * 3]
    (comparison,) = compare_results(*results(tmp_path, judged, judged))
    assert (comparison.metric, comparison.test, comparison.questions) == ("accuracy", "McNemar, exact", 1)


def test_single_answers_are_compared_by_mcnemar_and_have_wilsons_intervals(tmp_path):
    right, wrong = Score(value=1.0, correct=True), Score(value=0.0, correct=False)
    (comparison,) = compare_results(*results(tmp_path, [right, wrong, wrong, wrong], [right, right, wrong, wrong]))
    assert (comparison.first.low, comparison.first.high) == wilson(1, 4)
    assert (comparison.second.low, comparison.second.high) == wilson(2, 4) and comparison.test == "McNemar, exact"


def test_changed_questions_begin_with_the_largest_change(tmp_path):
    a, b = results(
        tmp_path, *([Score(value=v) for v in side] for side in ((0.0, 0.5, 1.0, 1.0), (0.5, 0.5, 0.25, 3.0)))
    )
    (comparison,) = compare_results(a, b)
    changed = changed_questions(a, b, comparison)
    sides = {
        name: [(x["first"][0], x["second"][0]) for x in changed.as_json(of)]
        for name, of in vars(changed).items()
        if name in ("lost", "gained")
    }
    assert sides == {"lost": [((1.0,), (0.25,))], "gained": [((1.0,), (3.0,)), ((0.0,), (0.5,))]}


def of_mix(path, scores):
    """An evaluation of two questions of each of two sources, the first of which has episodes."""
    sources = sources_of(Mix(tasks=[WeightedTask(name=name, task=None) for name in ("game", "sums")]))
    groups = []
    for uid, score in enumerate(scores):
        plain = group(uid, (WORDS[uid], score))
        named = {"source": "game" if uid < 2 else "sums"}
        completion = plain.completions[0]
        if uid < 2:
            span = Span(role="assistant", tokens=len(completion.tokens), sampled=True)
            completion = replace(completion, episode=Episode(spans=(span,), reward=1.0))
        prompt = replace(plain.prompt, metadata=named)
        groups.append(replace(plain, prompt=prompt, completions=(completion,)))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_evals(path, 4, groups, sources)


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("a/evals/000004-after.parquet", "b.parquet")])
def test_two_runs_on_a_mix_are_compared_source_by_source(tmp_path, first, second):
    """As folders of runs, and as files of any names; a metric that a source lacks is compared on the others."""
    right = [Score(value=1.0, correct=True)] * 4
    wrong_sums = right[:2] + [Score(value=0.0, correct=False)] * 2
    of_mix(tmp_path / "a" / "evals" / "000004-after.parquet", right)
    for file in ("b/evals/000004-after.parquet", "b.parquet"):
        of_mix(tmp_path / file, wrong_sums)
    a, b = read_result(tmp_path / first), read_result(tmp_path / second)
    compared = {each.name: (each.questions, each.lost) for each in compare_results(a, b)}
    assert compared == {"held-out": (4, 2), "held-out/game": (2, 0), "held-out/sums": (2, 2)}
    assert [each.name for each in compare_results(a, b, metric="turns")] == ["held-out", "held-out/game"]
