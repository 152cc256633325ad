"""Where the files are, which of them are for testing, and what a user reads when there are none."""

import json

import pytest

from proxima.prepare.locate import DataNotFound, locate_files

from .published import (
    GSM8K_TEST,
    GSM8K_TRAIN,
    PARTS,
    go_offline,
    gsm8k_folder,
    math_row,
    write_dapo,
    write_jsonl,
    write_parquet,
)

COMMIT = "e53f048856ff4f594e959d75785d2c2d37b678ee"


def names(origin):
    return {side: [name for _, name in files] for side, files in origin.sides.items()}


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    go_offline(monkeypatch, tmp_path)


def cached(tmp_path, name, write):
    """A snapshot as `hf download --repo-type dataset` leaves it."""
    repo = tmp_path / "hub" / f"datasets--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    folder = repo / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    write(folder)


def test_a_folder_with_other_files_beside_the_sides(tmp_path):
    folder = gsm8k_folder(tmp_path / "g")
    write_jsonl(folder / "model_solutions.jsonl", GSM8K_TEST)
    (folder / "LICENSE").write_text("MIT")
    origin = locate_files(PARTS["gsm8k"], str(folder))
    assert names(origin) == {"train": ["train.jsonl"], "test": ["test.jsonl"]}
    assert (origin.kind, origin.revision, origin.license) == ("files", None, "MIT")


def test_shards_patterns_and_folders_named_by_side(tmp_path):
    for i in range(2):
        write_parquet(tmp_path / "s" / "main" / f"train-0000{i}-of-00002.parquet", GSM8K_TRAIN)
    write_parquet(tmp_path / "s" / "main" / "test-00000-of-00001.parquet", GSM8K_TEST)
    write_parquet(tmp_path / "s" / "socratic" / "train-00000-of-00001.parquet", GSM8K_TRAIN)
    assert names(locate_files(PARTS["gsm8k"], str(tmp_path / "s"))) == {
        "train": ["main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"],
        "test": ["main/test-00000-of-00001.parquet"],
    }
    only = locate_files(PARTS["gsm8k"], str(tmp_path / "s"), subset="socratic")
    assert names(only) == {"train": ["socratic/train-00000-of-00001.parquet"]}
    assert (
        names(locate_files(PARTS["gsm8k"], str(tmp_path / "s" / "main" / "train-*.parquet")))["train"][1]
        == "train-00001-of-00002.parquet"
    )
    for side in ("train", "test"):
        for i in (1, 10, 2):
            (tmp_path / "m" / side / "algebra").mkdir(parents=True, exist_ok=True)
            (tmp_path / "m" / side / "algebra" / f"{i}.json").write_text(json.dumps(math_row(f"{side} {i}?", i)))
    assert names(locate_files(PARTS["math"], str(tmp_path / "m")))["test"] == [
        f"test/algebra/{i}.json" for i in (1, 10, 2)
    ]


def test_a_side_is_a_word_of_its_own(tmp_path):
    write_parquet(tmp_path / "trainer.parquet", GSM8K_TRAIN)
    assert names(locate_files(PARTS["dapo-math"], str(tmp_path))) == {"train": ["trainer.parquet"]}
    assert names(locate_files(PARTS["aime24"], str(tmp_path))) == {
        "test": ["trainer.parquet"]
    }  # every row is a question


def test_a_test_set_whose_only_split_is_called_train(tmp_path):
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", [{"problem": "1?", "answer": "1"}])
    assert names(locate_files(PARTS["aime24"], str(tmp_path))) == {"test": ["data/train-00000-of-00001.parquet"]}


def test_the_cache_of_the_hub(tmp_path):
    def write(folder):
        for side, rows in (("train", GSM8K_TRAIN), ("test", GSM8K_TEST)):
            write_parquet(folder / "main" / f"{side}-00000-of-00001.parquet", rows)

    cached(tmp_path, "openai/gsm8k", write)
    origin = locate_files(PARTS["gsm8k"])
    assert (origin.kind, origin.name, origin.revision, origin.license) == ("hub", "openai/gsm8k", COMMIT, "MIT")
    assert set(names(origin)) == {"train", "test"}
    assert locate_files(PARTS["gsm8k"], "openai/gsm8k") == origin


@pytest.mark.parametrize(
    ("part", "row"),  # the second place of the one, the first of the other
    [("aime24", {"problem": "1?", "solution": "\\boxed{204}"}), ("aime26", {"problem": "1?", "answer": "7"})],
)
def test_the_first_data_set_that_is_cached(part, row, tmp_path):
    cached(tmp_path, f"math-ai/{part}", lambda folder: write_jsonl(folder / "test.jsonl", [row]))
    assert locate_files(PARTS[part]).name == f"math-ai/{part}"


def test_configurations_that_are_files(tmp_path):
    def write(folder):
        for name in ("aime2025-I", "aime2025-II"):
            write_jsonl(folder / f"{name}.jsonl", [{"question": f"{name}?", "answer": "1"}])

    cached(tmp_path, "opencompass/AIME2025", write)
    assert names(locate_files(PARTS["aime25"], "opencompass/AIME2025")) == {
        "test": ["aime2025-I.jsonl", "aime2025-II.jsonl"]
    }


def test_a_download_that_was_cut_off(tmp_path):
    write_parquet(tmp_path / "train-00001-of-00002.parquet", GSM8K_TRAIN)
    with pytest.raises(DataNotFound, match=r"holds 1 of the 2 files train-\*-of-00002"):
        locate_files(PARTS["gsm8k"], str(tmp_path))


class Network:
    """A hub that can be reached: `fetch` fills the cache, or raises."""

    def __init__(self, monkeypatch, fetch):
        import huggingface_hub
        from huggingface_hub import constants

        from proxima.prepare import locate as origin

        self.asked = []
        cache_only = huggingface_hub.snapshot_download

        def snapshot_download(name, *, local_files_only, **options):
            self.asked.append((name, "cache" if local_files_only else "hub"))
            if not local_files_only:
                fetch()
            return cache_only(name, local_files_only=True, **options)

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(origin, "hub_is_reachable", lambda: True)


def test_what_the_cache_has_is_not_fetched_again(tmp_path, monkeypatch):
    cached(
        tmp_path,
        "math-ai/aime25",
        lambda folder: write_jsonl(folder / "test.jsonl", [{"problem": "1?", "answer": "1"}]),
    )
    network = Network(monkeypatch, fetch=lambda: None)
    assert locate_files(PARTS["aime25"]).revision == COMMIT
    assert network.asked == [("math-ai/aime25", "cache")]


def test_half_of_it_in_the_cache_is_fetched_whole(tmp_path, monkeypatch):
    def half(folder):
        write_parquet(folder / "main" / "train-00000-of-00001.parquet", GSM8K_TRAIN)

    def whole():
        folder = tmp_path / "hub" / "datasets--openai--gsm8k" / "snapshots" / COMMIT
        write_parquet(folder / "main" / "test-00000-of-00001.parquet", GSM8K_TEST)

    cached(tmp_path, "openai/gsm8k", half)
    network = Network(monkeypatch, whole)
    assert set(names(locate_files(PARTS["gsm8k"]))) == {"train", "test"}
    assert network.asked == [("openai/gsm8k", "cache"), ("openai/gsm8k", "hub")]


def test_a_hub_that_refuses(monkeypatch):
    def refused():
        raise ConnectionError("503 Service\nUnavailable")

    Network(monkeypatch, refused)
    with pytest.raises(
        ValueError,
        match="gsm8k: openai/gsm8k can't be fetched: ConnectionError: 503 Service Unavailable; give a copy with",
    ):
        locate_files(PARTS["gsm8k"])


@pytest.mark.parametrize(
    ("part", "given", "message"),
    [
        (
            "gsm8k",
            None,
            r"gsm8k: openai/gsm8k is not in the cache, and the hub is off \(HF_HUB_OFFLINE\); give a copy with "
            r"--from PATH",
        ),
        (
            "aime24",
            None,
            r"HuggingFaceH4/aime_2024 is not in the cache.*\(nor Maxwell-Jia/AIME_2024, .*hf download --repo-type "
            r"dataset Hugging",
        ),
        ("gsm8k", "someone/else", "someone/else is not in the cache"),
        ("gsm8k", "./nowhere", "'./nowhere': no such file or folder, and no name on the hub"),
        ("gsm8k", "nowhere.parquet", "no such file or folder"),
        ("gsm8k", "empty", r"empty holds no train side \(no data file\)"),
        ("gsm8k", "done", "is prepared already"),
    ],
)
def test_nothing_there_is_one_line(part, given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_parquet(tmp_path / "done" / "train.parquet", GSM8K_TRAIN)
    (tmp_path / "done" / "card.json").write_text("{}")
    with pytest.raises(ValueError, match=message) as caught:
        locate_files(PARTS[part], given)
    assert "\n" not in str(caught.value)


def test_a_revision_of_a_path_and_a_subset_that_is_not_there(tmp_path):
    path = write_dapo(tmp_path / "d.parquet", [("1?", "1")])
    with pytest.raises(ValueError, match="revision='main' is for data sets on the hub"):
        locate_files(PARTS["dapo-math"], str(path), revision="main")
    with pytest.raises(ValueError, match="holds 0 of the subsets en"):
        locate_files(PARTS["dapo-math"], str(tmp_path), subset="en")
