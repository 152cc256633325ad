"""Search in a small corpus as a tool."""

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from proxima.data import FieldError, require
from proxima.data.json_reader import load_json
from proxima.environment.protocol import Environment


class Search(Environment):
    """A tool `search`, which finds passages by the words that they share with a query (BM25).

    Args:
        corpus: a JSONL file; each line has a `text` and optionally a `title`. All episodes of a worker share it.
        top: maximum number of passages that a search returns.
        characters: maximum length of a passage shown to the model.
    """

    def __init__(self, corpus: str, top: int = 3, characters: int = 500) -> None:
        require(top >= 1, "top", top, "must be >= 1")
        require(characters >= 1, "characters", characters, "must be >= 1")
        require(Path(corpus).is_file(), "corpus", corpus, "does not exist", remedy="name a JSONL file of passages")
        self.passages, self.index = read_corpus(str(Path(corpus).resolve()))
        self.top, self.characters = min(top, len(self.passages)), characters

    def search(self, query: str) -> str:
        """Search for passages.

        Args:
            query: some words that the passage should have
        """
        import bm25s

        words = bm25s.tokenize([query[:1000]], return_ids=False, show_progress=False)
        numbers, scores = self.index.retrieve(words, k=self.top, show_progress=False)
        best = [self.passages[number] for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]
        lines = [f"[{i}] {passage[: self.characters]}" for i, passage in enumerate(best, 1)]
        return "\n".join(lines) or "nothing was found"


@lru_cache(maxsize=4)
def read_corpus(path: str) -> tuple[list[str], Any]:
    """Read the passages of a file and index them; FieldError if a line is not a passage."""
    missing = "is searched with the package bm25s, which is missing"
    require(find_spec("bm25s") is not None, "corpus", path, missing, remedy="pip install 'proxima-rl[search]'")
    import bm25s

    passages = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = load_json(line)
                passages.append(f"{row['title']}: {row['text']}" if row.get("title") else str(row["text"]))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                bound = f"has a line {number} that is not a passage: {type(error).__name__}: {error}"
                raise FieldError("corpus", path, bound, remedy='write {"text": ...} in each line') from error
    require(bool(passages), "corpus", path, "is empty")
    index = bm25s.BM25()
    index.index(bm25s.tokenize(passages, show_progress=False), show_progress=False)
    return passages, index
