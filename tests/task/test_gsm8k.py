import pytest

from proxima.task.hub import Gsm8kTask
from tests.prepare.published import write_jsonl, write_parquet

ROWS = [
    {
        "question": "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
        "May. How many in all?",
        "answer": "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nNatalia sold 48+24 = <<48+24=72>>72 clips "
        "altogether.\n#### 72",
    },
    {"question": "How much is the house {now}?", "answer": "It is 2*$35,000=$<<2*35000=70000>>70,000\n#### 70,000"},
    {"question": "By how much did it change?", "answer": "It fell by 5.\n#### -5 "},
]


def folder_of(path, split="train", rows=ROWS, form="jsonl"):
    if form == "jsonl":
        write_jsonl(path / f"{split}.jsonl", rows)
    else:
        write_parquet(path / f"{split}-00000-of-00001.parquet", rows)
    return path


@pytest.mark.parametrize(("form", "inside"), [("jsonl", "."), ("parquet", "."), ("parquet", "main")])
def test_folders(tmp_path, form, inside):
    folder_of(tmp_path / inside, form=form)
    folder_of(tmp_path / inside, "test", ROWS[:1], form)
    rows = Gsm8kTask(path=str(tmp_path)).rows(1)
    assert [rows[i].answer for i in range(len(rows))] == ["72", "70000", "-5"]
    assert rows[1].messages == ({"role": "user", "content": "How much is the house {now}?"},)
    assert rows[2].metadata == {"solution": "It fell by 5."}
    assert len(Gsm8kTask(path=str(tmp_path), split="test").rows(1)) == 1


def test_a_file_and_a_template(tmp_path):
    path = folder_of(tmp_path) / "train.jsonl"
    row = Gsm8kTask(path=str(path), template="{question}\nEnd with #### and the number.").rows(1)[1]
    assert row.messages[0]["content"] == "How much is the house {now}?\nEnd with #### and the number."


def test_what_is_not_gsm8k(tmp_path):
    folder_of(tmp_path, rows=[{"question": "?", "answer": "42"}])
    with pytest.raises(ValueError, match=r"gsm8k row 0: the answer .* has no number after '####'; is this GSM8K\?"):
        Gsm8kTask(path=str(tmp_path)).rows(1)[0]
    with pytest.raises(ValueError, match=r"holds neither test.jsonl nor test\*.parquet"):
        Gsm8kTask(path=str(tmp_path), split="test").rows(1)
    with pytest.raises(ValueError, match="names a file that does not exist"):
        Gsm8kTask(path=str(tmp_path / "nope.jsonl")).rows(1)
    with pytest.raises(ValueError, match="names a folder that does not exist"):
        Gsm8kTask(path=str(tmp_path / "nope")).rows(1)
