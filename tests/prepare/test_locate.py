"""Where the files are, which of them are for testing, and what a user reads when there are none."""

from pathlib import Path

import pytest

from proxima.prepare.locate import DataNotFound, locate_files

from .published import PARTS, go_offline

COMMIT = "e53f048856ff4f594e959d75785d2c2d37b678ee"
ONE = "00000-of-00001"


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    go_offline(monkeypatch, tmp_path)


def touch(folder, *files):
    """A folder with these files: their names say all."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def snapshot(tmp_path, name):
    return tmp_path / "hub" / f"datasets--{name.replace('/', '--')}" / "snapshots" / COMMIT


def cached(tmp_path, name, *files):
    """A snapshot as `hf download --repo-type dataset` leaves it."""
    folder = touch(snapshot(tmp_path, name), *files)
    (refs := folder.parent.parent / "refs").mkdir()
    (refs / "main").write_text(COMMIT)


def names(origin):
    return {side: [name for _, name in files] for side, files in origin.sides.items()}


SHARDS = ("main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet")
SUBSETS = (*SHARDS, f"main/test-{ONE}.parquet", f"socratic/train-{ONE}.parquet")
BY_SUBJECT = tuple(f"test/algebra/{number}.json" for number in (1, 10, 2))


@pytest.mark.parametrize(
    ("part", "files", "place", "sides"),
    [
        (  # other files beside the sides
            "gsm8k",
            ("train.jsonl", "test.jsonl", "model_solutions.jsonl", "LICENSE"),
            "",
            {"train": ["train.jsonl"], "test": ["test.jsonl"]},
        ),
        ("gsm8k", SUBSETS, "", {"train": [*SHARDS], "test": [f"main/test-{ONE}.parquet"]}),
        ("gsm8k", SUBSETS, "main/train-*.parquet", {"train": [Path(shard).name for shard in SHARDS]}),
        ("math", (*BY_SUBJECT, "train/algebra/1.json"), "", {"train": ["train/algebra/1.json"], "test": [*BY_SUBJECT]}),
        ("dapo-math", ("trainer.parquet",), "", {"train": ["trainer.parquet"]}),  # a side is a word of its own
        ("aime24", ("trainer.parquet",), "", {"test": ["trainer.parquet"]}),  # every row is a question
        # a test set whose only split is called train
        ("aime24", (f"data/train-{ONE}.parquet",), "", {"test": [f"data/train-{ONE}.parquet"]}),
    ],
)
def test_which_files_are_of_which_side(part, files, place, sides, tmp_path):
    origin = locate_files(PARTS[part], str(touch(tmp_path / "given", *files) / place))
    assert names(origin) == sides
    assert (origin.kind, origin.revision, origin.license) == ("files", None, PARTS[part].license)


def test_a_subset_is_named(tmp_path):
    folder = str(touch(tmp_path / "given", *SUBSETS))
    only = locate_files(PARTS["gsm8k"], folder, subset="socratic")
    assert names(only) == {"train": [f"socratic/train-{ONE}.parquet"]}
    with pytest.raises(ValueError, match="holds 0 of the subsets en"):
        locate_files(PARTS["gsm8k"], folder, subset="en")


def test_the_cache_of_the_hub(tmp_path):
    cached(tmp_path, "openai/gsm8k", *(f"main/{side}-{ONE}.parquet" for side in ("train", "test")))
    origin = locate_files(PARTS["gsm8k"])
    assert (origin.kind, origin.name, origin.revision, origin.license) == ("hub", "openai/gsm8k", COMMIT, "MIT")
    assert set(names(origin)) == {"train", "test"}
    assert locate_files(PARTS["gsm8k"], "openai/gsm8k") == origin


@pytest.mark.parametrize("part", ["aime24", "aime26"])  # the second place of the one, the first of the other
def test_the_first_data_set_that_is_cached(part, tmp_path):
    cached(tmp_path, f"math-ai/{part}", "test.jsonl")
    assert locate_files(PARTS[part]).name == f"math-ai/{part}"


def test_configurations_that_are_files(tmp_path):
    files = ["aime2025-I.jsonl", "aime2025-II.jsonl"]
    cached(tmp_path, "opencompass/AIME2025", *files)
    assert names(locate_files(PARTS["aime25"], "opencompass/AIME2025")) == {"test": files}


def test_a_download_that_was_cut_off(tmp_path):
    touch(tmp_path, "train-00001-of-00002.parquet")
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
    cached(tmp_path, "math-ai/aime25", "test.jsonl")
    network = Network(monkeypatch, fetch=lambda: None)
    assert locate_files(PARTS["aime25"]).revision == COMMIT
    assert network.asked == [("math-ai/aime25", "cache")]


def test_half_of_it_in_the_cache_is_fetched_whole(tmp_path, monkeypatch):
    cached(tmp_path, "openai/gsm8k", f"main/train-{ONE}.parquet")
    place = snapshot(tmp_path, "openai/gsm8k")
    network = Network(monkeypatch, fetch=lambda: touch(place, f"main/test-{ONE}.parquet"))
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
            "aime24",
            None,
            r"aime_2024 is not in the cache.*\(nor Maxwell-Jia/AIME_2024, .*hf download --repo-type dataset",
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
    touch(tmp_path / "done", "train.parquet", "card.json")
    with pytest.raises(ValueError, match=message) as caught:
        locate_files(PARTS[part], given)
    assert "\n" not in str(caught.value)


def test_a_path_has_no_revision(tmp_path):
    with pytest.raises(ValueError, match="revision='main' is for data sets on the hub"):
        locate_files(PARTS["dapo-math"], str(touch(tmp_path, "d.parquet") / "d.parquet"), revision="main")
