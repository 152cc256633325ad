"""GSM8K, grade-school mathematics."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from proxima.data import FieldError, UserError, require
from proxima.task.file_formats import SUFFIXES, data_suffix
from proxima.task.hub import Dataset
from proxima.task.local_files import Files
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows, Task, user_message
from proxima.task.template import require_question_template


@dataclass(frozen=True, kw_only=True)
class Gsm8kTask(PlayedTask):
    """GSM8K from the hub or from files: 7,473 training and 1,319 test questions; the answer follows `####`.

    Args:
        path: hub name, a .jsonl or .parquet file, or a folder with `train.jsonl` and `test.jsonl` (or Parquet files
            whose names begin like these, also in a subfolder `main`).
        split: `train` or `test`; ignored for a single file.
        template: the prompt, with `{question}`, as "{question}\\nGive the final answer after ####."
    Returns: rows whose answer is the final number as text, without commas; metadata `solution`, the text before it.
    Raises: UserError if the data can't be opened, or a solution has no `####`; names the row.
    Source: Cobbe et al., arXiv 2110.14168; MIT licence.
    """

    path: str = "openai/gsm8k"
    split: Literal["train", "test"] = "train"
    template: str = "{question}"

    def __post_init__(self) -> None:
        require(bool(self.path), "path", self.path, "must be a hub name, a folder or a file")
        require(self.split in ("train", "test"), "split", self.split, "must be 'train' or 'test'")
        require_question_template(self.template)

    def rows(self, seed: int) -> Rows:
        """Return the rows in the order of the data; the seed is ignored."""
        return MappedRows(self._source().rows(seed), self._row)

    def _source(self) -> Task:
        place = Path(self.path).expanduser()
        if place.is_file():
            return Files(path=str(place))
        if place.is_dir():
            for folder in (place, place / "main"):
                if (folder / f"{self.split}.jsonl").is_file():
                    return Files(path=str(folder / f"{self.split}.jsonl"))
                if parts := sorted(str(part) for part in folder.glob(f"{self.split}*.parquet")):
                    return Files(path=tuple(parts))
            raise FieldError("path", self.path, f"holds neither {self.split}.jsonl nor {self.split}*.parquet")
        if data_suffix(place) in SUFFIXES:
            raise FieldError("path", self.path, "names a file that does not exist")
        return Dataset(path=self.path, subset="main", split=self.split)

    def _row(self, index: int, row: Row) -> Row:
        solution, marker, final = str(row.answer).rpartition("####")
        answer = final.strip().replace(",", "").lstrip("$")
        if not marker or not answer:
            shown = json.dumps(row.answer)[-60:]
            raise UserError(f"gsm8k row {index}: the answer {shown} has no number after '####'; is this GSM8K?")
        question = self.template.format(question=row.messages[-1]["content"])
        return Row(messages=user_message(question), answer=answer, metadata={"solution": solution.strip()})
