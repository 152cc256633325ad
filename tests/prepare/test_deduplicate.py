"""Each question once, every row accounted for."""

import pytest

from proxima.prepare.deduplicate import Deduplicator
from proxima.prepare.read_files import SourceQuestion, SourceRow

from .published import AFTER, BEFORE


def fed(rows, kind="integer", rule="drop"):
    distinct = Deduplicator(kind, rule)
    for number, row in enumerate(rows):
        distinct.add(row if isinstance(row, SourceRow) else SourceRow(SourceQuestion(*row), 0, number))
    return distinct


def written(distinct):
    return [(entry.kept.question, entry.kept.answer, entry.repeats) for entry in distinct.questions() if entry.kept]


def test_repeats_meet_whatever_their_spaces_and_instructions():
    distinct = fed(
        [("1 + 1?", "2"), (BEFORE + "1 + 1?" + AFTER, "2"), ("1  +\n1?", " 2.0 "), ("2 + 2?", "4"), ("1 + 1?", 2)]
    )
    assert written(distinct) == [("1 + 1?", "2", 4), ("2 + 2?", "4", 1)]
    assert distinct.counts == {
        "rows": 5, "unreadable_rows": 0, "unreadable": 0, "repeats": 3, "questions": 2, "conflicts": 0,
    }  # fmt: skip


def test_the_first_row_is_the_one_that_is_kept():
    distinct = fed([("b?", "1", "first", "s", 2, "id-0"), ("a?", "1"), ("b?", "1", "second")])
    first, second = (entry.kept for entry in distinct.questions())
    assert (first.solution, first.subject, first.level, first.source_id, first.row) == ("first", "s", 2, "id-0", 0)
    assert (second.question, second.row) == ("a?", 1)


CONFLICT = [("x?", "1"), ("x?", "2", "two"), ("y?", "5"), ("x?", "2"), ("x?", "2"), ("z?", "3"), ("z?", "4")]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ("drop", [("y?", "5", 1)]),
        ("first", [("x?", "1", 4), ("y?", "5", 1), ("z?", "3", 2)]),
        ("majority", [("x?", "2", 4), ("y?", "5", 1)]),  # z: one against one
    ],
)
def test_conflicts(rule, kept):
    distinct = fed(CONFLICT, rule=rule)
    assert written(distinct) == kept
    assert distinct.counts["conflicts"] == 2
    if rule == "majority":  # it brings its own solution
        first = next(iter(distinct.questions())).kept
        assert (first.solution, first.row) == ("two", 1)
    answers = {entry.question: entry.answers for entry in distinct.questions()}
    assert answers == {"x?": {"1": 1, "2": 3}, "y?": {"5": 1}, "z?": {"3": 1, "4": 1}}
    assert distinct.counts["rows"] == distinct.counts["repeats"] + distinct.counts["questions"]


@pytest.mark.parametrize(
    "same",
    [
        (r"\frac{1}{2}", r"\frac12", r"\dfrac{1}{2}", r"\tfrac12", r"\frac1{2}", r"\frac 1 2", r"$\frac{1}{2}$"),
        (r"(1, 2)", r"\left(1,2\right)", r"\left( 1,\, 2 \right)", "(1,2)."),
        ("5", r"\$5", "5.", "$5$"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ],
)
def test_one_answer_in_other_clothes_is_no_conflict(same):
    distinct = fed([("x?", answer) for answer in same], "expression")
    assert (distinct.counts["conflicts"], written(distinct)) == (0, [("x?", same[0], len(same))])


def test_other_answers_stay_others():
    for pair in (
        (r"\frac12", r"\frac21"),
        (r"\leftarrow", "arrow"),
        (".5", "5"),
        (r"\frac{12}{3}", r"\frac1{23}"),
        ("1.0", "10"),
    ):
        assert fed([("x?", answer) for answer in pair], "expression").counts["conflicts"] == 1, pair


def test_what_is_unreadable_is_listed_once_and_is_no_conflict():
    distinct = fed(
        [
            ("x?", "1"),
            ("x?", "one"),
            ("x?", "one"),
            ("", "1"),
            (BEFORE + AFTER, "1"),
            ("y?", None),
            ("z?", ["1"]),
            ("z?", True),
            SourceRow(None, 0, 8, "has no 'answer'"),
        ]
    )
    assert written(distinct) == [("x?", "1", 1)]
    assert distinct.counts["conflicts"] == 0
    assert (distinct.counts["rows"], distinct.counts["unreadable_rows"], distinct.counts["unreadable"]) == (9, 8, 6)
    assert [(entry["reason"], entry["row"], entry["rows"]) for entry in distinct.unreadable] == [
        ("has an answer that is not a number", 1, 2),
        ("has no question", 3, 2),
        ("has no answer", 5, 1),
        ("has an answer that is neither text nor number", 6, 1),
        ("has an answer that is neither text nor number", 7, 1),
        ("has no 'answer'", 8, 1),
    ]


def test_hostile_text_passes():
    distinct = fed(
        [("half \ud83d", "1"), ("half \ud83d", "1"), ("null \x00", "1"), ("line \u2028 end", "1"), ("x" * 100_000, "1")]
    )
    assert [row[0][:8] for row in written(distinct)] == ["half ?", "null \x00", "line \u2028 e", "xxxxxxxx"]
