"""Search in a corpus: the passage with the words comes first."""

import json
import sys

import pytest

from proxima.data import FieldError
from proxima.environment.builtin import Search, read_corpus

PASSAGES = [
    {"title": "Bern", "text": "The capital of Switzerland, on the river Aare."},
    {"title": "Lyon", "text": "A city in France where Rhône and Saône meet."},
    {"text": "Cheese is made of milk."},
    {"title": "Rivers", "text": "The Aare flows through Bern. " + "x" * 1000},
]


@pytest.fixture
def corpus(tmp_path):
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps(passage) + "\n" for passage in PASSAGES))
    return str(file)


def test_passages_by_their_words(corpus):
    pytest.importorskip("bm25s")
    search = Search(corpus, top=2, characters=60).search
    assert search("capital of Switzerland") == "[1] Bern: The capital of Switzerland, on the river Aare."
    assert search("What is cheese made of?") == "[1] Cheese is made of milk."
    first, second = search("Aare Bern").splitlines()
    assert {first[4:8], second[4:8]} == {"Bern", "Rive"} and len(first) <= 64 and len(second) <= 64
    for nothing in ("", "the", "zebra", "🙂", "\0" * 100_000):
        assert search(nothing) == "nothing was found"
    assert search("Rhône") == "[1] Lyon: A city in France where Rhône and Saône meet."


BAD = {
    "": "is empty",
    "{": "has a line 1 that is not a passage: JSONDecodeError",
    '{"text": "a"}\n{"title": "b"}': "has a line 2 that is not a passage: KeyError: 'text'",
    "3": "has a line 1 that is not a passage",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_corpora(tmp_path, text):
    pytest.importorskip("bm25s")
    (tmp_path / "corpus.jsonl").write_text(text)
    with pytest.raises(FieldError, match=BAD[text]):
        Search(str(tmp_path / "corpus.jsonl"))


def test_bad_arguments(corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    read_corpus.cache_clear()
    for path, top, message in (
        ("none", 1, "corpus='none' does not exist"),
        (corpus, 0, "top=0 must be"),
        (corpus, 1, "bm25s, which is not installed; pip install 'proxima-rl"),
    ):
        with pytest.raises(FieldError, match=message):
            Search(path, top=top)
