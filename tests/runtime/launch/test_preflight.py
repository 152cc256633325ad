"""Gold answers before the run: which no reward can read, and when that refuses the run."""

import json
from dataclasses import dataclass, field

import pytest

from proxima.config import resolve
from proxima.config.sections.data_section import DataConfig
from proxima.data import FieldError
from proxima.reward import Exact, Gsm8kReward, Http, Length, Math, Number, RewardRunner
from proxima.runtime.launch.preflight import ReferenceAnswers, unreadable, validate_answers
from proxima.runtime.launch.run_data import load_run_data
from proxima.task.protocol import Row
from tests.reward.server import lengths, scorer
from tests.runtime.tiny_run import Watcher, go, recipe

pytestmark = pytest.mark.usefixtures("shared_math_workers")


@dataclass
class Listed:
    """Rows of given answers, which remember who was looked at."""

    answers: list
    read: list = field(default_factory=list)

    def __len__(self):
        return len(self.answers)

    def __getitem__(self, index):
        self.read.append(index)
        return Row(messages=({"role": "user", "content": "?"},), answer=self.answers[index])


def reasons(rewards, answers):
    made = RewardRunner(rewards)
    try:
        return (
            made.unreadable(answers),
            made.needs_answers,
            {name for name, pool in made._pools.items() if pool.started},
        )
    finally:
        made.close()


def test_what_each_reward_can_read():
    assert reasons([Number()], ["42", 42, "1,000", "4.5e3", "many", None, True, "1/2"])[0] == [
        *[None] * 4,
        "number: not a number; use 'exact' or 'math'",
        "number: the row has no answer; map the task's answer column",
        "number: not a number; use 'exact' or 'math'",
        "number: not a number; use 'exact' or 'math'",
    ]
    assert reasons([Gsm8kReward()], ["so 9 * 2\n#### 18", "18", "#### many"])[0] == [
        None,
        None,
        "gsm8k: not a number after '####'",
    ]
    assert reasons([Exact()], ["any text", None])[0] == [
        None,
        "exact: the row has no answer; map the task's answer column",
    ]
    assert reasons([Length()], [None, "x"]) == ([None, None], False, set())


@pytest.mark.parametrize(
    "answer", [r"\text{even}", "B", "(3, 4)", "x^2+1", r"50\%", r"\emptyset", "yes", r"12{,}000", r"1 \le x < 3"]
)
def test_math_takes_words_and_sets_for_mathematics(answer):
    pytest.importorskip("math_verify")
    assert Math().unreadable(answer) is None


@pytest.mark.parametrize("answer", [r"\frac{1}{", "x^2 +", r"\begin{matrix}", "----", "\\", " ", "\u4f60"])
def test_math_does_not_take_broken_latex(answer):
    pytest.importorskip("math_verify")
    assert Math().unreadable(answer) == "can't be read as mathematics"


def test_math_reads_in_a_worker_what_is_no_plain_number():
    pytest.importorskip("math_verify")
    assert reasons([Math()], ["42", "-3", r"\frac{1}{2}", "7/3"]) == ([None] * 4, True, set())
    answers = [r"\sqrt{2}", "(1, 2]", r"\left(\right}", "", r"9^{9^{9}}", "(" * 900, None, r"\sqrt{2}", "0.5"]
    problems, _, workers = reasons([Math()], answers)
    assert workers == {"text"}
    assert [why is None for why in problems] == [True, True, False, False, False, False, False, True, True], problems
    assert problems[2] == problems[3] == "math: can't be read as mathematics"
    assert problems[4] == "math: not evaluated: an exponent of more than 9999"
    assert problems[6] == "math: the row has no answer; map the task's answer column"


def test_the_first_reward_that_counts_and_fails_is_named_and_each_answer_is_read_once():
    seen = []

    @dataclass(frozen=True, kw_only=True)
    class Counting(Number):
        def unreadable(self, answer):
            seen.append(answer)
            return super().unreadable(answer)

    problems, _, _ = reasons(
        [Counting(name="logged", weight=0.0), Counting(name="first"), Exact()], ["42", "many", "42", "many", None]
    )
    assert problems == [None, "first: not a number; use 'exact' or 'math'"] * 2 + [
        "first: the row has no answer; map the task's answer column"
    ]
    assert seen == ["42", "many", None]


def test_all_rows_or_a_sample_drawn_by_the_seed():
    answers = ["1"] * 50 + ["x"] * 50
    for limit, seed, looked in ((0, 1, 100), (100, 1, 100), (20, 1, 20), (20, 2, 20)):
        rows = Listed(answers)
        count, unread = unreadable(
            ReferenceAnswers(name="task", rows=rows, count=100), RewardRunner(NUMBER), limit, seed
        )
        assert count == looked == len(rows.read) and rows.read == sorted(set(rows.read))
        assert [answer.row for answer in unread] == [row for row in rows.read if row >= 50]
    first, again, other = (
        [
            answer.row
            for answer in unreadable(
                ReferenceAnswers(name="task", rows=Listed(answers), count=100), RewardRunner(NUMBER), 20, s
            )[1]
        ]
        for s in (1, 1, 2)
    )
    assert first == again != other
    rows = Listed(answers)
    assert (
        unreadable(ReferenceAnswers(name="eval.task", rows=rows, count=60), RewardRunner(NUMBER), 0, 1)[0] == 60
        and max(rows.read) == 59
    )


@dataclass(frozen=True)
class Config:
    """What the survey reads of a config."""

    reward: tuple
    data: DataConfig
    seed: int = 1
    runtime: object = field(default_factory=lambda: type("Runtime", (), {"reward_timeout": 10.0})())


NUMBER = (Number(),)


def survey(*answers, rewards=NUMBER, **data):
    rows = Listed(list(answers))
    return validate_answers(
        Config(reward=rewards, data=DataConfig(**data)), [ReferenceAnswers(name="task", rows=rows, count=len(rows))]
    ), rows.read


def test_unreadable_answers_are_listed_and_kept():
    assert survey(*["1"] * 100) == ([], list(range(100)))
    (note,), _ = survey(*["1"] * 7, "many", *["1"] * 1992)
    assert note == (
        "task: 1 of 2,000 answers can't be read: row 7 \"many\" (number: not a number; use 'exact' or 'math'); "
        "these rows are generated like the others, and none of their completions will have a score"
    )
    (note,), _ = survey(*["1"] * 1000, *["x\n" * 200] * 9)
    assert note.count("; row ") == 4 and "; and 4 more; these rows" in note and "\n" not in note and len(note) < 900
    (note,), _ = survey(*["1"] * 200, "many", check_answers=201, max_unreadable=1.0)
    assert note.startswith("task: 1 of 201 answers")
    with pytest.raises(ValueError, match="task: 10 of 10 checked, of 2,000, answers can't be read"):
        survey(*["many"] * 2000, check_answers=10)


@pytest.mark.parametrize(
    ("bad", "share", "refused"),
    [(1, 0.01, False), (2, 0.01, True), (2, 0.02, False), (1, 0.0, True), (100, 1.0, False)],
)
def test_above_the_share_the_run_is_refused(bad, share, refused):
    answers = ["many"] * bad + ["1"] * (100 - bad)
    if not refused:
        assert len(survey(*answers, max_unreadable=share)[0]) == 1
        return
    with pytest.raises(ValueError) as caught:
        survey(*answers, max_unreadable=share)
    line = str(caught.value)
    assert line.startswith(
        f'data.max_unreadable={share} is exceeded: task: {bad} of 100 answers can\'t be read: row 0 "many" (number: '
    )
    assert (
        line.endswith("; repair or remove these rows, use a reward that reads them, or raise data.max_unreadable")
        and "\n" not in line
    )


def test_rows_are_not_read_where_no_reward_compares():
    assert survey("many", None, rewards=(Length(),)) == ([], [])
    assert survey("many", None, rewards=(Length(), Number(weight=0.0))) == ([], [])


def test_a_scorer_that_is_not_there_is_said_before_any_row_is_read():
    with scorer(lengths) as server:
        url = server.url
        assert survey("1", rewards=(Http(url=url),)) == ([], [])
    with pytest.raises(
        ValueError, match="reward 'http': .* can't be reached: Connection refused; start the scorer before the run"
    ):
        survey("1", rewards=(Http(url=url, retries=0),))


def _rows(tmp_path, *answers):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"question": f"{i} + 1?", "answer": answer}) + "\n" for i, answer in enumerate(answers))
    )
    return {"kind": "jsonl", "path": str(file)}


def test_both_data_sets_are_looked_at_before_weights_are_loaded(tiny_model, tmp_path):
    bad = _rows(tmp_path, "1", "two", "3", "4", "5", "6", "7", "8")
    model = tiny_model("llama")
    tree = recipe(model, reward=["number"], eval__task=bad)
    with pytest.raises(
        ValueError, match=r'data.max_unreadable=0.01 is exceeded: eval.task: 1 of 8 answers can\'t be read: row 1 "two"'
    ):
        load_run_data(resolve(tree).config)
    opened = load_run_data(resolve({**tree, "data": {"max_unreadable": 0.2}}).config)
    assert [len(held_out.prompts) for held_out in opened.held_out] == [8]
    assert opened.notes == [
        "eval.task: 1 of 8 answers can't be read: row 1 \"two\" (number: not a number; use 'exact' or 'math'); "
        "these rows are generated like the others, and none of their completions will have a score"
    ]
    tree["eval"]["limit"] = 1
    assert load_run_data(resolve(tree).config).notes == []
    with pytest.raises(ValueError, match="data.max_unreadable=0.01 is exceeded: task: 1 of 8 answers"):
        load_run_data(resolve(recipe(model, reward=["number"], task=bad, eval__task=None)).config)


def test_a_column_that_a_reward_asks_for_is_missed_before_weights_are_loaded(tiny_model, tmp_path):
    (tmp_path / "mine.py").write_text("def near(completion: str, answer, level): return 1.0\n")
    rewards, rows = [{"kind": "function", "path": f"{tmp_path}/mine.py:near", "weight": 0}], tmp_path / "rows.jsonl"
    tree = recipe(tiny_model("llama"), reward=rewards, task={"kind": "jsonl", "path": str(rows)}, eval__task=None)
    for more, message in (
        ([{}, {}], "not a column of task, row 0; columns: question, answer"),
        ([{"levle": 1}] * 2, "not a column of task, row 0; did you mean 'levle'\\? columns: question, answer, levle"),
        ([{"level": 1}, {}], "not a column of task, row 1; columns"),
    ):
        rows.write_text("".join(json.dumps({"question": "1 + 1?", "answer": "2", **row}) + "\n" for row in more))
        with pytest.raises(
            FieldError, match=f"^reward.0.path='.*:near' names a .* has the parameter 'level', .* {message}"
        ):
            load_run_data(resolve(tree).config)
    rows.write_text('{"question": "1 + 1?", "answer": "2", "level": 1}\n')
    assert load_run_data(resolve(tree).config).notes == []
    tree["eval"]["task"] = {"kind": "arithmetic", "low": 1, "high": 9, "size": 5}
    with pytest.raises(FieldError, match="not a column of eval.task, row 0; columns: operator, operands, answer"):
        load_run_data(resolve(tree).config)


def test_a_run_says_it_and_continues(tiny_model, tmp_path):
    answers = [str(i) for i in range(4)]
    tree = recipe(
        tiny_model("llama"),
        reward=["number", "tests.runtime.tiny_run:Even"],
        task=_rows(tmp_path, *answers, "many"),
        eval__task=None,
    )
    tree |= {"data": {"max_unreadable": 0.5}}
    tree["train"] |= {"steps": 2}
    watcher = Watcher()
    summary = go(tmp_path / "run", tree, observer=watcher)
    assert summary.status == "done"
    assert watcher.warnings[0].startswith('task: 1 of 5 answers can\'t be read: row 4 "many" (number: ')
    records = [record for record in watcher.records if record["kind"] == "train"]
    assert sum(record["reward/invalid"] for record in records) in (4, 8)  # its group, in each epoch that reached it
