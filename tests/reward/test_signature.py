"""What a function gets by its signature: texts, objects, columns; TRL's lists and verl's names."""

import asyncio
import textwrap
from dataclasses import replace
from typing import Optional

import pytest

from proxima.data.episode import Episode, Span
from proxima.data.flow import Score
from proxima.reward.function import CallShape, Function, FunctionBatch, messages_of
from proxima.reward.length import Length
from tests.reward.make import completion, completions, prompt, runner, scored, values

pytestmark = pytest.mark.usefixtures("lent_servers")

SOURCE = """
from __future__ import annotations
import numpy as np
from proxima.data.episode import Episode, Span
from proxima.data.flow import Score

def objects(prompt, completion, level):
    return prompt.uid + len(completion.tokens) + level

def texts(prompt: str, completion: str, gold: str, level=0):
    return {"value": float(completion == gold), "level": level, "prompt": float(prompt == "?")}

def mixed(completion: str, prompt, **columns):
    return prompt.uid + len(completion) + sum(columns[name] for name in ("level", "answer"))

def by_place(p, c, *, gold="none"):
    return p.uid + len(c.text) + len(gold)

def truth(prompt, completion: str, gold):
    return completion == gold

def numpy_truth(prompt, completion):
    return np.bool_(completion.text == "a")

def verdict(prompt, completion):
    return {"value": True}

def trl(prompts, completions, gold, **columns):
    assert prompts == ["?"] * len(completions) and sorted(columns) == ["answer", "completion_ids", "level"]
    assert columns["level"] == [3] * len(completions) and all(ids == [5, 5, 5] for ids in columns["completion_ids"])
    return [None if text == "skip" else float(text == right) for text, right in zip(completions, gold)]

def trl_chat(prompts, completions, trainer_state=None, **columns):
    assert prompts[0] == [{"role": "user", "content": "?"}] and trainer_state is None
    return [float(len(one[0]["content"])) for one in completions]

async def trl_ids(completion_ids, level):
    return np.array([len(ids) + level[0] for ids in completion_ids])

def trl_kinds(completions, **columns):
    known = {"a": True, "b": Score(value=2.0, correct=False), "c": {"value": 3, "x": 1}, "d": "text"}
    return [known[text] for text in completions]

def trl_few(completions, **columns):
    return [1.0]

def trl_none(completions, **columns):
    print("no return")

def trl_raises(completions, **columns):
    return [float(text["content"]) for text in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "mine" and extra_info["index"] == 4
    right = solution_str == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}

def verl_number(solution_str, ground_truth, extra_info, **columns):
    return len(extra_info) + (solution_str == ground_truth)

def perhaps(prompt: str | None, completion: Optional[str]):
    return len(prompt) + len(completion)

def named(completion: str, path, values, count, positional, verl, arguments, grader):
    return path + values + count + positional + verl + arguments + grader

def by_role(episode, gold="none"):
    return {"value": len(episode), gold: sum(len(told["content"]) for told in episode if told["role"] == "assistant")}

def verl_episode(solution_str, ground_truth, episode):
    return len(solution_str) + len(episode)

def trl_episode(completions, episode):
    return [len(one) + 10 * len(told) for one, told in zip(completions, episode)]

def everything(completion: str, prompt: str, **columns):
    return sum(columns.values())

def trl_everything(completions, **columns):
    del columns["completion_ids"], columns["prompts"]
    return [sum(one) for one in zip(*columns.values())]

def noargs(): return 1.0
def one(groups): return 1.0
def keyword(prompt, *, completion): return 1.0
def before(prompt, completion, gold, /): return 1.0
def several(*args, **kwargs): return 1.0
class Judge:
    def __call__(self, prompt, completion): return 1.0
judge = Judge()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(textwrap.dedent(SOURCE))
    return path


def run(file, name, *texts, answer="2", chat=None, **columns):
    """The scores, of calls in this process."""
    return Function(path=f"{file}:{name}", chat=chat).score(prompt(answer, **columns), completions(*texts))


def in_workers(file, name, *texts, rewards=(), chat=None, **columns):
    return scored([Function(path=f"{file}:{name}", chat=chat), *rewards], prompt("2", **columns), *texts)


def test_an_object_a_text_a_column_and_all_columns(file):
    assert values(run(file, "objects", "a", level=10)) == [7 + 3 + 10]
    (score,) = in_workers(file, "texts", "a", gold="a")
    assert score.parts == {"texts": 1.0, "texts/level": 0.0, "texts/prompt": 1.0}
    assert run(file, "texts", "b", gold="a", level=4)[0].parts["level"] == 4.0
    assert values(run(file, "mixed", "four", answer=2, level=5)) == [7 + 4 + 5 + 2]
    assert values(run(file, "by_place", "ab", gold="six")) == [7 + 2 + 3]


def test_only_what_the_function_asks_for_is_sent(file):
    reward = Function(path=f"{file}:texts")
    arguments = reward.job(prompt("2", gold="a", other=[1] * 100), completion("b")).arguments
    assert arguments["values"] == {"prompt": "?", "completion": "b", "gold": "a"} and "completion_ids" not in arguments


def test_a_bool_sets_correct_and_no_other_number_does(file):
    assert [(s.value, s.correct) for s in run(file, "truth", "a", "b", gold="a")] == [(1.0, True), (0.0, False)]
    assert [(s.value, s.correct) for s in run(file, "numpy_truth", "a", "b")] == [(1.0, True), (0.0, False)]
    assert [(s.value, s.correct) for s in run(file, "verdict", "a")] == [(1.0, None)]
    assert [(s.value, s.correct) for s in run(file, "objects", "a", level=0)] == [(10.0, None)]


def test_a_function_of_trl_gets_lists_and_none_adds_nothing(file):
    scores = in_workers(file, "trl", "a", "skip", "b", gold="a", level=3, rewards=[Length(tokens=2, weight=2.0)])
    length = {"length": -0.5}
    assert [score.parts for score in scores] == [{"trl": 1.0, **length}, length, {"trl": 0.0, **length}]
    assert values(scores) == [0.0, -1.0, -1.0]


@pytest.mark.slow
def test_messages_where_the_row_holds_messages(file):
    held = replace(prompt("2"), chat=True)
    assert values(Function(path=f"{file}:trl_chat").score(held, completions("a", "bbb"))) == [1.0, 3.0]
    assert values(run(file, "trl_chat", "a", "bbb", chat=True)) == [1.0, 3.0]
    (error,) = values(in_workers(file, "trl_raises", "a"))
    assert error == (
        "trl_raises: TypeError: string indices must be integers, not 'str' (mine.py:51) "
        "(it got texts; chat: true passes messages)"
    )
    (error,) = values(in_workers(file, "trl_raises", "a", chat=True))
    assert error.endswith("(it got messages; chat: false passes texts)")


def episode_of(*message, sampled=True, earlier=()):
    """A completion of an episode with these messages, of which every second is the model's."""
    spans = [
        Span(role="user" if i % 2 else "assistant", tokens=1, text=text, sampled=sampled and not i % 2, turn=i // 2)
        for i, text in enumerate(message)
    ]
    whole, own = completion(message[-1], tokens=len(message)), [i % 2 == 0 for i in range(len(message))]
    return replace(whole, sampled=own, episode=Episode(spans=spans), earlier=earlier)


@pytest.mark.slow
def test_the_messages_of_an_episode_for_a_function_that_names_them(file):
    played = replace(episode_of("first", "more", "last"), sample=1)
    both = [completion("alone"), played]
    for name, expected in {"by_role": [1.0, 3.0], "verl_episode": [5 + 1, 4 + 3], "trl_episode": [15.0, 34.0]}.items():
        with runner(Function(path=f"{file}:{name}")) as made:
            assert values(asyncio.run(made.score(prompt("2"), both))) == expected
    assert values(Function(path=f"{file}:trl_episode", chat=True).score(prompt("2"), both)) == [11.0, 33.0]
    call = CallShape.of(lambda episode: 0.0)
    assert call.for_one(prompt("2", episode=5), played)["values"] == {"episode": 5}  # a column goes before
    assert call.problem(()) is None and not call.gets_tokens


def test_the_message_of_a_rewritten_turn_is_what_the_model_wrote():
    rewritten = replace(episode_of("short", "more", "last").episode.spans[0], sampled=False)
    old = episode_of("thought and short")
    new = episode_of("short", "more", "last", earlier=(old,))
    new = replace(new, episode=replace(new.episode, spans=(rewritten, *new.episode.spans[1:])))
    assert [message["content"] for message in messages_of(new)] == ["thought and short", "more", "last"]


@pytest.mark.slow
def test_what_a_list_may_hold(file):
    assert values(run(file, "trl_ids", "a", "b", level=4)) == [7.0, 7.0]
    scores = run(file, "trl_kinds", "a", "b", "c", "d")
    assert [(s.value, s.correct) for s in scores[:3]] == [(1.0, True), (2.0, False), (3.0, None)]
    assert scores[2].parts == {"x": 1.0}
    assert scores[3].error == "ValueError: returned value='text', expected a number"
    for name, error in (
        ("trl_few", "returned 1 scores for 2 completions"),
        ("trl_none", "returned None, expected a list of 2 numbers"),
    ):
        assert values(in_workers(file, name, "a", "b")) == [f"{name}: ValueError: {error}"] * 2


def test_a_group_called_directly(file):
    reward = Function(path=f"{file}:trl")
    scores = reward.score(prompt("2", gold="a", level=3), completions("a", "skip"))
    assert scores[0] == Score(value=1.0)
    assert (scores[1].valid, scores[1].error) == (False, "it does not apply to this row")


@pytest.mark.parametrize(
    "row", [{"answer": "a"}, {"ground_truth": "a"}, {"reward_model": {"ground_truth": "a", "style": "rule"}}]
)
def test_a_function_of_verl(file, row):
    columns = {"data_source": "mine", "extra_info": {"index": 4}, "answer": None, **row}
    scores = run(file, "compute_score", "a", "b", **columns)
    assert [(s.value, s.correct, s.parts) for s in scores] == [(1.0, True, {"acc": 1.0}), (-1.0, False, {"acc": 0.0})]
    assert values(run(file, "verl_number", "a", answer="a")) == [1.0]


PROBLEMS = [  # a function, columns, and the parameter that is none of them
    ("texts", ("glod", "level"), "gold", "did you mean 'glod'? columns: glod, level"),
    ("objects", ("question",), "level", "columns: question"),
    ("trl", (), "gold", "columns: none"),
    ("compute_score", ("answer",), "data_source", "columns: answer"),
    ("verl_number", ("gt",), "ground_truth", "map the answer with task.answer=COLUMN; columns: gt"),
]


@pytest.mark.parametrize(("name", "columns", "missing", "remedy"), PROBLEMS)
def test_columns_that_are_not_there(file, name, columns, missing, remedy):
    problem = Function(path=f"{file}:{name}").call.problem(columns)
    assert problem == (f"has the parameter '{missing}', which is not a column", remedy)


def test_columns_that_a_function_may_have(file):
    for name, columns in (("texts", ("gold",)), ("mixed", ()), ("verl_number", ("ground_truth",))):
        assert Function(path=f"{file}:{name}").call.problem(columns) is None
    assert Function(path=f"{file}:by_place").call.problem(("gold", "c")) == (
        "has the parameter 'c' in the place of prompt or completion, and it is a column",
        "name those two parameters prompt and completion",
    )


@pytest.mark.parametrize("name", ["named", "everything", "trl_everything"])
def test_a_column_may_have_any_name(file, name):
    names = ("path", "values", "count", "positional", "verl", "arguments", "grader")
    columns = {column: 10**place for place, column in enumerate(names)}
    row = replace(prompt(), metadata=columns)
    assert values(scored([Function(path=f"{file}:{name}")], row, "a")) == [1111111.0]


def test_a_text_that_may_be_none(file):
    def typed(prompt: str | None, completion: Optional[str]) -> float:  # noqa: UP045
        return 0.0

    assert values(run(file, "perhaps", "four")) == [5.0]  # there, types are texts
    assert CallShape.of(typed).texts == {"prompt", "completion"}
    assert CallShape.of(lambda completion: 0).texts == frozenset()


def test_verls_ground_truth_is_a_column_where_the_row_has_one(file):
    call = Function(path=f"{file}:compute_score").call
    for row in ({"gt": 1}, {"answer": 1}, {"reward_model": {"style": "rule"}}):
        assert tuple(call.columns(replace(prompt(), metadata=row))) == tuple(row)
    row = {"reward_model": {"ground_truth": 1}}
    assert tuple(call.columns(replace(prompt(), metadata=row))) == ("reward_model", "ground_truth")
    assert "ground_truth" in call.columns(prompt("2"))


def test_a_column_named_like_an_argument_does_not_replace_it(file):
    assert values(run(file, "mixed", "four", answer=2, level=5, completion="no", prompt="no")) == [18]
    row = replace(prompt(2), metadata={"prompts": "no", "completions": "no", "level": 1})
    lists = CallShape.of(lambda completions, **columns: []).for_group(row, completions("a"), None)
    given = {"prompts": ["?"], "completions": ["a"], "completion_ids": [[5, 5, 5]]}
    assert lists == given | {"level": [1], "answer": [2]}


@pytest.mark.parametrize("name", ["numpy_truth", "objects", "keyword", "named", "by_place", "several", "judge"])
def test_a_function_that_takes_them(file, name):
    reward = Function(path=f"{file}:{name}")
    reward.check_code()
    assert reward.source == file.read_text()  # an edit during a run does not change the reward


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("noargs", "name a parameter completion"),
        ("one", "name a parameter completion"),
        ("before", "'gold' is positional-only, but columns are passed by name"),
    ],
)
def test_a_function_that_does_not(file, name, why):
    called = r"calls with \(prompt, completion\) and columns by name, and it is defined with \(.*\)"
    with pytest.raises(ValueError, match=rf"mine.py:{name}' names a function that 'function' {called}: {why}$"):
        Function(path=f"{file}:{name}").check_code()


def test_a_function_of_the_whole_batch(file):
    for name in ("one", "several"):
        FunctionBatch(path=f"{file}:{name}").check_code()
    wrong = {"noargs": r"\(\): too many positional arguments", "verdict": "missing a required argument: 'completion'"}
    for name, message in wrong.items():
        with pytest.raises(ValueError, match=rf"'function_batch' calls with \(groups\), .*{message}"):
            FunctionBatch(path=f"{file}:{name}").check_code()
