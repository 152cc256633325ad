"""Gold answers before the run: which no reward can read, and when that refuses the run."""

from dataclasses import dataclass, field

import pytest

from proxima.config.resolution import resolve
from proxima.config.sections.data import DataConfig
from proxima.data import FieldError, UserError
from proxima.reward.length import Length
from proxima.reward.math.marked import Gsm8kReward
from proxima.reward.math.numbers import Number
from proxima.reward.math.symbolic import Math
from proxima.reward.runner import RewardRunner
from proxima.reward.text import Exact
from proxima.rollout.reward_checks import ReferenceAnswers, validate_answers
from proxima.runtime.launch.run_data import load_run_data
from proxima.task.protocol import Row
from tests.prepare.published import write_jsonl
from tests.runtime.tiny_run import recipe

pytestmark = pytest.mark.usefixtures("lent_servers")


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


NO_NUMBER = "not a number; use 'exact' or 'math'"
NO_ANSWER = "the row has no answer; map the task's answer column"


def reasons(rewards, answers):
    """Why each answer can't be read, whether any is needed, and the pools that were started."""
    made = RewardRunner(rewards)
    try:
        unread = made.unreadable(answers)
        return unread, bool(made.comparing), {name for name, pool in made._pools.items() if pool.started}
    finally:
        made.close()


BOXED = "is a whole solution; for the answer in its \\boxed{2}, use 'math' or 'boxed' with answer_in_box=true"


@pytest.mark.parametrize(
    ("reward", "read", "problems"),
    [
        (Number(), ["42", 42, "1,000", "4.5e3"], dict.fromkeys(["many", True, "1/2"], NO_NUMBER) | {None: NO_ANSWER}),
        (
            Gsm8kReward(),
            ["so 9 * 2\n#### 18", "18"],
            {"#### many": "not a number after '####'", "so \\boxed{2}": BOXED},
        ),
        (Exact(), ["any text"], {None: NO_ANSWER}),
        (Length(), [None, "x"], {}),
    ],
)
def test_what_each_reward_can_read(reward, read, problems):
    found, needs, pools = reasons([reward], [*read, *problems])
    assert found == [None] * len(read) + [f"{reward.label}: {why}" for why in problems.values()]
    assert needs == (not isinstance(reward, Length)) and pools == set()


def test_math_reads_in_a_worker_what_is_no_plain_number():
    pytest.importorskip("math_verify")
    assert reasons([Math()], ["42", "-3", r"\frac{1}{2}", "7/3"]) == ([None] * 4, True, set())
    problems = {
        r"\sqrt{2}": None,
        "(1, 2]": None,
        r"\left(\right}": "can't be read as mathematics",
        "": "can't be read as mathematics",
        r"9^{9^{9}}": "not evaluated: an exponent of more than 9999",
        None: NO_ANSWER,
        "0.5": None,
    }
    found, _, workers = reasons([Math()], [*problems, r"\sqrt{2}", "(" * 900])
    assert workers == {"text"} and found[-2] is None and found[-1] is not None
    assert found[:-2] == [why and f"math: {why}" for why in problems.values()]


def test_the_first_failing_reward_is_named_and_answers_are_read_once():
    seen = []

    @dataclass(frozen=True, kw_only=True)
    class Counting(Number):
        def unreadable(self, answer):
            seen.append(answer)
            return super().unreadable(answer)

    rewards = [Counting(name="logged", weight=0.0), Counting(name="first"), Exact()]
    problems, _, _ = reasons(rewards, ["42", "many", "42", "many", None])
    assert problems == [None, f"first: {NO_NUMBER}"] * 2 + [f"first: {NO_ANSWER}"]
    assert seen == ["42", "many", None]


NUMBER = (Number(),)


def test_all_rows_or_a_sample_drawn_by_the_seed():
    def look(limit, seed, count=100):
        """The rows that were read."""
        rows = Listed(["1"] * 50 + ["x"] * 50)
        answers = ReferenceAnswers(name="task", rows=rows, count=count)
        (note,) = validate_answers(RewardRunner(NUMBER), [answers], limit=limit, most_unreadable=1.0, seed=seed)
        unread = [row for row in rows.read if row >= 50]
        assert rows.read == sorted(set(rows.read)) and note.startswith(f"task: {len(unread)} of {len(rows.read)} ")
        assert all(f'row {row} "x" ' in note for row in unread[:5])
        return rows.read

    assert look(0, 1) == look(100, 1) == [*range(100)] and look(0, 1, count=60) == [*range(60)]
    assert len(look(20, 1)) == 20 and look(20, 1) == look(20, 1) != look(20, 2)


def survey(*answers, rewards=NUMBER, **data):
    """The notes, and the rows that were read."""
    rows = Listed(list(answers))
    asked = [ReferenceAnswers(name="task", rows=rows, count=len(rows))]
    return DataConfig(**data).answer_notes(RewardRunner(rewards), asked, 1), rows.read


MANY = f'row 7 "many" (number: {NO_NUMBER})'
KEPT = "these rows are generated like the others, but their completions get no score unless the reason names one"


def test_unreadable_answers_are_listed_and_kept():
    assert survey(*["1"] * 100) == ([], list(range(100)))
    (note,), _ = survey(*["1"] * 7, "many", *["1"] * 1992)
    assert note == f"task: 1 of 2,000 answers can't be read: {MANY}; {KEPT}"
    (note,), _ = survey(*["1"] * 1000, *["x\n" * 200] * 9)
    assert note.count("; row ") == 4 and "; and 4 more; these rows" in note and "\n" not in note and len(note) < 900
    (note,), _ = survey(*["1"] * 200, "many", check_answers=201, max_unreadable=1.0)
    assert note.startswith("task: 1 of 201 answers")
    with pytest.raises(ValueError, match="task: 10 of 10 checked, of 2,000, answers can't be read"):
        survey(*["many"] * 2000, check_answers=10)


def test_only_rows_that_all_lack_an_answer_ask_for_its_column():
    with pytest.raises(UserError, match="^task: no row has an answer, and the reward number needs one"):
        survey(None, None)
    with pytest.raises(FieldError, match=r"data.max_unreadable=.* is exceeded: task: 2 of 2 answers can't be read: "):
        survey(None, "many")


@pytest.mark.parametrize(
    ("bad", "share", "refused"),
    [(1, 0.01, False), (2, 0.01, True), (2, 0.02, False), (1, 0.0, True), (100, 1.0, False)],
)
def test_above_the_share_the_run_is_refused(bad, share, refused):
    answers = ["many"] * bad + ["1"] * (100 - bad)
    if not refused:
        assert len(survey(*answers, max_unreadable=share)[0]) == 1
        return
    with pytest.raises(ValueError, match=f"{share} is exceeded: task: {bad} of 100 answers can't be read"):
        survey(*answers, max_unreadable=share)


def test_rows_are_not_read_where_no_reward_compares():
    assert survey("many", None, rewards=(Length(),)) == ([], [])
    assert survey("many", None, rewards=(Length(), Number(weight=0.0))) == ([], [])


def _rows(tmp_path, *answers, more=()):
    """A task with these answers, and more columns of the first rows."""
    rows = [{"question": f"{i} + 1?", "answer": answer} for i, answer in enumerate(answers)]
    for row, columns in zip(rows, more, strict=False):
        row |= columns
    return {"kind": "jsonl", "path": str(write_jsonl(tmp_path / "rows.jsonl", rows))}


def test_both_data_sets_are_looked_at_before_weights_are_loaded(tiny_model, tmp_path):
    bad, model = _rows(tmp_path, *"1234567", "many"), tiny_model("llama")
    tree = recipe(model, reward=["number"], eval__task=bad)
    exceeded = 'data.max_unreadable=0.01 is exceeded: {}: 1 of 8 answers can\'t be read: row 7 "many"'
    with pytest.raises(ValueError, match=exceeded.format("eval.task")):
        load_run_data(resolve(tree).config)
    opened = load_run_data(resolve({**tree, "data": {"max_unreadable": 0.2}}).config)
    assert [len(held_out.prompts) for held_out in opened.held_out] == [8]
    assert opened.notes == [f"eval.task: 1 of 8 answers can't be read: {MANY}; {KEPT}"]
    tree["eval"]["limit"] = 1
    assert load_run_data(resolve(tree).config).notes == []
    with pytest.raises(ValueError, match=exceeded.format("task")):
        load_run_data(resolve(recipe(model, reward=["number"], task=bad, eval__task=None)).config)


def test_a_missing_column_of_a_reward_is_found_before_weights_are_loaded(tiny_model, tmp_path):
    (tmp_path / "mine.py").write_text("def near(completion: str, answer, level): return 1.0\n")
    rewards = [{"kind": "function", "path": f"{tmp_path}/mine.py:near", "weight": 0}]
    missed = "^reward.0.path='.*:near' names a .* has the parameter 'level', .* not a column of "

    def load(*more, eval_task=None):
        task = _rows(tmp_path, "2", "2", more=more)
        return load_run_data(
            resolve(
                recipe(tiny_model("llama"), reward=rewards, task=task, eval__task=eval_task, train__prompts_per_step=2)
            ).config
        )

    for more, message in (
        ([{}, {}], "task, row 0; columns: question, answer"),
        ([{"levle": 1}] * 2, "task, row 0; did you mean 'levle'\\? columns: question, answer, levle"),
        ([{"level": 1}, {}], "task, row 1; columns"),
    ):
        with pytest.raises(FieldError, match=missed + message):
            load(*more)
    assert load({"level": 1}, {"level": 1}).notes == []
    with pytest.raises(FieldError, match=missed + "eval.task, row 0; columns: operator, operands, answer"):
        load({"level": 1}, {"level": 1}, eval_task={"kind": "arithmetic", "low": 1, "high": 9, "size": 5})
