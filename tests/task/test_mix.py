"""Shares of a mix, and that it is one data set."""

import re
from collections import Counter

import pytest

from proxima.cli.explanation import facts_of, text_of
from proxima.config.batch_arithmetic import batch_of
from proxima.config.describe import kind_of
from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima.config.resolved import dump
from proxima.config.sections.data import longest_completion
from proxima.config.sections.eval import parts_of
from proxima.config.validate import check, warnings
from proxima.data import FieldError, FieldErrors
from proxima.task.generated import Arithmetic
from proxima.task.local_files import Jsonl
from proxima.task.mix import Mix, WeightedTask


def mix(*parts, **fields):
    """Of sources of so many rows and such weights."""
    operators = "+-*/"
    sources = [
        WeightedTask(name=operators[i], weight=weight, task=Arithmetic(operators=(operators[i],), size=size))
        for i, (size, weight) in enumerate(parts)
    ]
    return Mix(tasks=sources, **fields)


def named(rows):
    return [rows[i].metadata["source"] for i in range(len(rows))]


@pytest.mark.parametrize(
    ("parts", "size", "counts"),
    [
        (((70, 0.7), (30, 0.3)), None, [70, 30]),
        (((50, 3), (50, 1)), None, [150, 50]),
        (((10, 1), (100, 1)), None, [100, 100]),
        (((10, 1), (10, 1), (10, 1)), 10, [4, 3, 3]),
        (((100, 0.9), (100, 0.1)), 20, [18, 2]),
    ],
)
def test_shares_are_those_of_the_weights(parts, size, counts):
    rows = mix(*parts, size=size).rows(1)
    assert list(Counter(named(rows)).values()) == counts
    running, share = 0, counts[0] / sum(counts)
    for number, name in enumerate(named(rows), 1):
        running += name == "+"
        assert abs(running - number * share) <= 1  # of any first rows too


def test_every_row_is_used_as_often_as_the_others_or_once_more():
    rows = mix((40, 3), (40, 1)).rows(1)
    uses = Counter((rows[i].metadata["source"], rows[i].messages[0]["content"]) for i in range(len(rows)))
    assert len(uses) == 80 and Counter(uses.values()) == {3: 40, 1: 40}
    rows = mix((40, 1), (40, 1), size=100).rows(1)
    uses = Counter(rows[i].messages[0]["content"] for i in range(100))
    assert Counter(uses.values()) == {1: 60, 2: 20}


def test_the_rest_is_drawn_by_the_seed_alone():
    some = [
        {rows[i].answer for i in range(40)} for rows in (mix((200, 1), (200, 1), size=40).rows(s) for s in (1, 1, 2))
    ]
    assert some[0] == some[1] != some[2]


def test_a_row_keeps_its_columns_and_gets_its_source():
    inner, outer = mix((5, 1)), WeightedTask(name="sums", task=Arithmetic(size=5))
    row = Mix(tasks=[outer]).rows(1)[0]
    assert row.metadata == {**Arithmetic(size=5).rows(1)[0].metadata, "source": "sums"}
    nested = Mix(tasks=[WeightedTask(name="inner", task=inner), outer], column="of")
    assert {(r.metadata["of"], r.metadata.get("source")) for r in map(nested.rows(1).__getitem__, range(10))} == {
        ("inner", "+"),
        ("sums", None),
    }
    assert parts_of(nested) == [inner.tasks[0].task, outer.task]
    with pytest.raises(FieldError, match="is a column of inner already"):
        Mix(tasks=[WeightedTask(name="inner", task=inner)]).rows(1)[0]


def test_what_makes_no_mix_is_refused(tmp_path):
    task = Arithmetic(size=5)
    with pytest.raises(FieldError, match="tasks=\\[\\].*at least one source"):
        Mix(tasks=[])
    with pytest.raises(FieldError, match="different names"):
        Mix(tasks=[WeightedTask(name="a", task=task)] * 2)
    for weight in (0, -1, float("inf"), float("nan")):
        with pytest.raises(FieldError, match="weight"):
            WeightedTask(name="a", task=task, weight=weight)
    with pytest.raises(FieldError, match="tasks.1.weight=0.001 leaves this source none of 10 rows"):
        mix((5, 1), (5, 0.001), size=10).rows(1)
    with pytest.raises(FieldError, match="size=None would be 50,000,050"):
        mix((5, 1), (50, 1e-6)).rows(1)
    with pytest.raises((FieldError, FieldErrors), match="tasks.0.task.path"):
        Mix(tasks=[WeightedTask(name="a", task=Jsonl(path=str(tmp_path / "no.jsonl")))]).rows(1)


RECIPE = {
    "model": {"path": "no-such-model"},
    "reward": "number",
    "algorithm": "grpo",
    "task": {
        "kind": "mix",
        "tasks": [
            {"name": "easy", "weight": 3, "task": {"kind": "arithmetic", "size": 30}},
            {"name": "hard", "task": {"kind": "arithmetic", "operators": ["*"], "size": 30}},
        ],
    },
}


def test_explain_shows_the_shares_and_a_recipe_comes_back_from_its_dump(tmp_path):
    resolved = resolve(RECIPE, ["task.tasks.1.weight=1"])
    words = "an epoch of the mix has 120 rows: easy 75.0% (3 x its 30 rows), hard 25.0% (1 x its 30 rows)"
    assert words in " ".join(text_of(resolved).split())
    (tmp_path / "again.yaml").write_text(dump(resolved))
    assert resolve(tmp_path / "again.yaml").config.task == resolved.config.task


def test_a_source_that_is_held_out_too_is_pointed_out():
    asked = {"task": RECIPE["task"]["tasks"][1]["task"]}
    assert "has the same questions as `task`" in text_of(resolve(RECIPE | {"eval": asked}))


def written(path, questions):
    path.write_text("".join(f'{{"question": "{q}", "q": "{q}", "answer": "1"}}\n' for q in questions))
    return str(path)


def test_a_source_that_asks_what_another_one_holds_out_is_pointed_out(tmp_path):
    whole = written(tmp_path / "whole.jsonl", [f"What is {i}?" for i in range(50)])
    some = written(tmp_path / "some.jsonl", [f" What  is {i}?" for i in range(25)])
    held_out = len(Jsonl(path=whole, held_out=0.3, part="held_out").rows(0))
    holder = {"name": "a", "task": {"kind": "jsonl", "path": whole, "held_out": 0.3}}

    def notes(*sources):
        resolved = resolve(RECIPE | {"task": {"kind": "mix", "tasks": [holder, *sources]}})
        rows = resolved.config.task.rows(0)
        assert all(f"task: {note}" in facts_of(resolved)["warnings"] for note in rows.notes)
        return list(rows.notes)

    other = {"name": "b", "task": {"kind": "jsonl", "path": whole, "question": "q"}}
    (note,) = notes(other)
    assert note == (
        f"{held_out} of the 50 rows of b ask questions that a holds out for evaluation, and the run trains on "
        "them; set held_out=0.3 in both"
    )
    (note,) = notes({"name": "c", "task": {"kind": "jsonl", "path": some}})
    assert "of the 25 rows of c" in note
    for share in (0.3, 0.5):
        other["task"]["held_out"] = share
        assert bool(notes(other)) == (share > 0.3)  # b then holds out what a trains on
    assert notes({"name": "d", "task": {"kind": "arithmetic", "size": 5}}) == []
    inner = {"kind": "mix", "tasks": [{"name": "e", "task": {"kind": "jsonl", "path": some}}]}
    assert len(notes({"name": "nested", "task": inner})) == 1


def test_a_wrong_field_of_a_source_is_named():
    for override, line in (
        ("task.tasks.1.weight=-1", "task.tasks.1.weight=-1 (command line): must be > 0"),
        ("task.tasks.0.task.sise=3", "did you mean 'size'?"),
        ("task.tasks.0.task=arithmetics", "task.tasks.0.task.kind"),
    ):
        with pytest.raises(ConfigError, match=re.escape(line)):
            resolve(RECIPE, [override])


def test_weights_by_row_give_every_row_equally_often():
    parts = [WeightedTask(name=str(size), task=Arithmetic(size=size)) for size in (2, 6)]
    assert Mix(tasks=parts, weights="row").counts([2, 6]) == [2, 6]
    assert Mix(tasks=parts).counts([2, 6]) == [6, 6]
    heavier = [parts[0], WeightedTask(name="6", task=Arithmetic(size=6), weight=2)]
    assert Mix(tasks=heavier, weights="row").counts([2, 6]) == [2, 12]


def test_settings_of_a_source_are_checked_where_they_are_written():
    recipe = RECIPE | {"task": RECIPE["task"]}
    for override, line in (
        ("task.tasks.1.sampling.top_p=2", "task.tasks.1.sampling.top_p=2 (command line): must be in (0, 1]"),
        ("task.tasks.1.sampling.temperature=0", "task.tasks.1.sampling.temperature=0"),
        ("task.tasks.1.episode.turns=3", "limits episodes, and this source has none"),
        ("task.tasks.1.task.environment=calculatr", "task.tasks.1.task.environment"),
        ("task.tasks.1.reward=[environment]", "task.tasks.1.reward.0.kind"),
        ("task.tasks.1.sampling.top_pp=1", "did you mean 'top_p'?"),
    ):
        resolved = None
        try:
            resolved = resolve(recipe, [override])
        except ConfigError as error:
            assert line in str(error), override
            continue
        assert any(line in str(problem) for problem in check(resolved)), override


TAUGHT = "task.tasks.1.learns_from=teacher"
TEACHER = "algorithm.distillation.path=m"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([TAUGHT], f"{TAUGHT} (command line): is 'teacher', and the run has none; set algorithm.distillation.path"),
        ([f"{TAUGHT}s"], f"{TAUGHT}s (command line): must be one of rewards, teacher"),
        ([TEACHER, "task.tasks.1.learns_from=rewards"], "only beside a source that learns from the teacher; remove it"),
        ([TEACHER, TAUGHT, "algorithm.surrogate=null"], "is null, which is rewards beside a teacher, and nothing t"),
        ([TEACHER, TAUGHT, "task.tasks.0.learns_from=teacher"], "is 'teacher' in every source, and algorithm.surrog"),
        ([TEACHER, TAUGHT, "algorithm.reward_kl.coefficient=0.1"], "rewards of their own, which a source that learns"),
        ([TEACHER, TAUGHT, "algorithm.advantage=reinforce_pp"], "rewards of their own, which a source that learns"),
        ([TEACHER, TAUGHT], None),
        ([TEACHER, TAUGHT, "task.tasks.0.learns_from=rewards"], None),
        ([TEACHER, TAUGHT, "task.tasks.1.task.held_out=0.2"], None),
        (
            ["eval.task={kind: mix, tasks: [{name: a, task: arithmetic, learns_from: teacher}]}"],
            "eval.task.tasks.0.learns_from=teacher (command line): has no effect in an evaluation; remove it",
        ),
    ],
)
def test_a_source_learns_from_what_the_run_has(overrides, line):
    try:
        problems = [str(problem) for problem in check(resolve(RECIPE, overrides))]
    except ConfigError as error:
        problems = [str(error)]
    about = [problem for problem in problems if "learns_from" in problem]
    assert any(line in problem for problem in about) if line else not about, problems


OWN_REWARDS = [
    {"name": "easy", "task": {"kind": "arithmetic", "size": 30}, "reward": "number"},
    {"name": "hard", "task": {"kind": "arithmetic", "size": 30}, "reward": ["exact", {"kind": "number", "weight": 2}]},
]
WITHOUT = {key: value for key, value in RECIPE.items() if key != "reward"}


def test_the_reward_of_the_run_is_not_needed_where_every_source_has_its_own(tmp_path):
    """A bare word is a list of one, as in the run's `reward`."""
    of_mix = {"kind": "mix", "tasks": OWN_REWARDS}
    outer = {"kind": "mix", "tasks": [{"name": "inner", "task": of_mix}]}
    for task in (of_mix, outer):
        resolved = resolve(WITHOUT | {"task": task, "eval": {"task": task}})
        assert resolved.config.reward == ()
        (tmp_path / "again.yaml").write_text(dump(resolved))
        assert resolve(tmp_path / "again.yaml").config == resolved.config
    easy, hard = resolve(WITHOUT | {"task": of_mix}).config.task.tasks
    assert [[kind_of(reward) for reward in source.reward] for source in (easy, hard)] == [
        ["number"],
        ["exact", "number"],
    ]
    for needing in (
        {"task": of_mix | {"tasks": [OWN_REWARDS[0], RECIPE["task"]["tasks"][1]]}},
        {"task": of_mix, "eval": {"task": RECIPE["task"]["tasks"][0]["task"]}},
        {"task": of_mix, "eval": {"sets": [{"name": "a", "task": RECIPE["task"]}]}},
    ):
        with pytest.raises(ConfigError, match="reward: is missing: named scores"):
            resolve(WITHOUT | needing)


def test_what_reads_the_longest_completion_reads_that_of_the_longest_source():
    words = ["sampling.max_tokens=12", "task.tasks.0.sampling.max_tokens=8", "task.tasks.1.sampling.max_tokens=300"]
    config = resolve(RECIPE, words).config
    assert longest_completion(config.task, config.sampling) == 300 and batch_of(config, 20).longest == 320
    assert batch_of(resolve(RECIPE, words[:2]).config, 20).longest == 32
    of_all = ["reward=[number, {kind: overlong, max_tokens: 280, buffer_tokens: 20}]"]
    assert not [each for each in warnings(resolve(RECIPE, [*words, *of_all])) if "penalty" in each.message]
    (unreached,) = (each for each in warnings(resolve(RECIPE, [*words[:2], *of_all])) if "penalty" in each.message)
    assert (unreached.path, unreached.message.partition("never")[2]) == (
        "reward.1.max_tokens",
        " reached with sampling.max_tokens=12",
    )
    own = "task.tasks.0.reward=[{kind: overlong, max_tokens: 280, buffer_tokens: 20}]"
    (unreached,) = (each for each in warnings(resolve(RECIPE, [*words, own])) if "penalty" in each.message)
    assert unreached.path == "task.tasks.0.reward.0.max_tokens"
    assert unreached.message.endswith("never reached with task.tasks.0.sampling.max_tokens=8")
    (over,) = (each for each in warnings(resolve(RECIPE, [*words, "train.tokens_per_micro_batch=200"])))
    assert "may have 300 tokens (task.tasks.1.sampling.max_tokens)" in over.message
