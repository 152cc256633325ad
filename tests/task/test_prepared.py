import pytest

from proxima.task.local_files import PreparedTask, prepare_command
from tests.prepare.published import write_parquet

ROWS = [
    {
        "question": f"{i} {{}}?",
        "answer": str(i),
        "level": i,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Solve: {i} {{}}?"}],
    }
    for i in range(3)
]


@pytest.fixture
def folder(tmp_path):
    write_parquet(tmp_path / "train.parquet", ROWS)
    return tmp_path


def test_the_prompt_is_the_cards_or_a_template_and_rewards_get_all_columns(folder):
    rows = PreparedTask(path=str(folder), metadata=("level",)).rows(1)
    assert [rows[i].messages for i in range(3)] == [tuple(row["messages"]) for row in ROWS]
    assert (rows[2].answer, rows[2].metadata) == ("2", {"level": 2})
    assert PreparedTask(path=str(folder)).rows(1)[2].metadata == ROWS[2]
    row = PreparedTask(path=str(folder), template="{question}\nAnswer in \\boxed{{}}.").rows(1)[1]
    assert row.messages == ({"role": "user", "content": "1 {}?\nAnswer in \\boxed{}."},)
    assert row.metadata == ROWS[1]


@pytest.mark.parametrize(
    ("path", "split", "message"),
    [
        ("data/gsm8k", "train", r"path='data/gsm8k' no such folder; make it: proxima data prepare gsm8k"),
        ("data/aime24", "test", "make it: proxima data prepare aime24"),
        ("data/mine", "train", "no such folder; make it: proxima data prepare"),
        ("made", "test", "has no test split, only train; set split: train, or name another folder"),
        ("empty/math", "train", r"holds no train.parquet; make it: proxima data prepare math"),
    ],
)
def test_what_is_missing(path, split, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "math").mkdir(parents=True)
    write_parquet(tmp_path / "made" / "train.parquet", ROWS)
    with pytest.raises(ValueError, match=message) as caught:
        PreparedTask(path=path, split=split).rows(1)
    assert "\n" not in str(caught.value)
    assert prepare_command("data/mine/train.parquet") is None
    assert prepare_command("data/math/train.parquet") == "proxima data prepare math"
