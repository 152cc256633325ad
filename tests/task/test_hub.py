import json

import pytest

from proxima.data import UserError
from proxima.task.hub import Dataset

datasets = pytest.importorskip("datasets")

ROWS = [{"problem": f"{i}?", "solution": i} for i in range(4)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    for split, rows in {"train": ROWS, "test": ROWS[:1]}.items():
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "data"


@pytest.mark.slow
def test_a_folder_of_files(folder):
    rows = Dataset(path=str(folder), question="{problem} Think.", answer="solution").rows(1)
    assert len(rows) == 4 and rows[3].messages[0]["content"] == "3? Think." and rows[3].answer == 3
    assert len(Dataset(path=str(folder), split="test", question="problem", answer=None).rows(1)) == 1
    assert len(Dataset(path=str(folder), split="train[:2]", question="problem", answer=None).rows(1)) == 2


@pytest.mark.parametrize("nested", [False, True])
def test_what_save_to_disk_wrote(tmp_path, nested):
    data = datasets.Dataset.from_list(ROWS)
    (datasets.DatasetDict(train=data) if nested else data).save_to_disk(str(tmp_path / "saved"))
    rows = Dataset(path=str(tmp_path / "saved"), question="problem", answer="solution").rows(1)
    assert [rows[i].answer for i in range(4)] == [0, 1, 2, 3]


@pytest.mark.slow
def test_what_can_go_wrong_is_a_line_each(folder, tmp_path):
    for fields, message in (
        ({"path": str(folder)}, r"data set '.*data' has no column 'question'; .*columns: problem, solution"),
        ({"path": str(folder), "question": "problm"}, "did you mean 'problem'"),
        (
            {"path": str(folder), "split": "dev", "question": "problem", "answer": None},
            'split dev.*can\'t be opened: ValueError: Unknown split "dev"',
        ),
        (
            {"path": str(folder), "split": "train[:0]", "question": "problem", "answer": None},
            "split train.*corresponds to no data",
        ),
        ({"path": str(folder / "train.jsonl")}, "is a file; read it with kind: files, or name its folder"),
        ({"path": str(tmp_path / "nope")}, "names a folder that does not exist"),
        (
            {"path": "nobody/nothing-at-all"},
            "data set 'nobody/nothing-at-all' .*can't be opened: .*without a network, name a folder",
        ),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            Dataset(**fields).rows(1)
        lines = str(caught.value).splitlines()  # one for each column that is missing
        assert all(" names no column: " in line for line in lines) or len(lines) == 1


def test_a_hub_that_does_not_resolve_is_left_alone_at_once(monkeypatch):
    import socket

    from huggingface_hub import constants

    from proxima.task.hub import offline_unless_reachable

    def unresolved(*_):
        raise socket.gaierror("no name")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    with offline_unless_reachable():
        assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    with offline_unless_reachable():
        assert not constants.HF_HUB_OFFLINE


def test_an_item_that_can_not_be_decoded_is_named_with_its_row(tmp_path):
    import pyarrow as pa

    texts = pa.array([b"1 + 1?", b"caf\xe9"], pa.binary()).view(pa.string())
    table = pa.table({"question": texts, "answer": ["2", "4"]})
    data = datasets.Dataset(datasets.table.InMemoryTable(table))
    data.save_to_disk(str(tmp_path / "saved"))
    rows = Dataset(path=str(tmp_path / "saved")).rows(1)
    assert rows[0].answer == "2"
    with pytest.raises(UserError, match=r"data set '.*saved', row 1 can't be read: .*utf-8.*; remove the row"):
        rows[1]
