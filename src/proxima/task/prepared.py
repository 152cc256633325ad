"""Data prepared by `proxima data prepare`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from proxima.data import FieldError, require
from proxima.task.local_files import Parquet
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows, user_message
from proxima.task.template import fill, require_question_template

# folders that the command can create
PREPARED = ("aime24", "aime25", "aime26", "amc23", "dapo-math", "gsm8k", "math", "math500")


def prepare_command(path: str | Path) -> str | None:
    """Return the command that creates a prepared folder, or the folder of a file; None for an unknown name."""
    place = Path(path)
    names = (place.name, place.parent.name if place.suffix else "")
    name = next((name for name in names if name in PREPARED), None)
    return None if name is None else f"proxima data prepare {name}"


@dataclass(frozen=True, kw_only=True)
class PreparedTask(PlayedTask):
    """A folder created by `proxima data prepare`: each question in the prompt that its card names.

    Args:
        path: the folder.
        split: `train` or `test`.
        template: a prompt that replaces the card's and its system prompt, with `{question}`; null: the card's.
        metadata: columns that are passed to rewards and reports, as `level`, `subject`, `solution`; null: all.
    Returns: rows whose answer is the canonical answer as text.
    Raises: FieldError for a missing folder or split, with the command that creates it.
    """

    path: str
    split: Literal["train", "test"] = "train"
    template: str | None = None
    metadata: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        require(bool(self.path), "path", self.path, "must name a folder")
        require(self.split in ("train", "test"), "split", self.split, "must be 'train' or 'test'")
        if self.template is not None:
            require_question_template(self.template)

    def missing(self) -> str | None:
        """Return the reason why the data can't be read, with the remedy; None if it can."""
        folder = Path(self.path).expanduser()
        command = prepare_command(folder) or "proxima data prepare"
        if not folder.is_dir():
            return f"no such folder; make it: {command}" + (" --from FILE" if folder.is_file() else "")
        if not (folder / f"{self.split}.parquet").is_file():
            other = "test" if self.split == "train" else "train"
            if (folder / f"{other}.parquet").is_file():
                return f"has no {self.split} split, only {other}; set split: {other}, or name another folder"
            return f"holds no {self.split}.parquet; make it: {command}"
        return None

    def rows(self, seed: int) -> Rows:
        """Return the rows in the order of the data; the seed is ignored."""
        if missing := self.missing():
            raise FieldError("path", self.path, missing)
        file = str(Path(self.path).expanduser() / f"{self.split}.parquet")
        if self.template is None:
            return Parquet(path=file, messages="messages", metadata=self.metadata).rows(seed)
        return MappedRows(Parquet(path=file, metadata=self.metadata).rows(seed), self._row)

    def _row(self, index: int, row: Row) -> Row:
        text = fill(self.template or "", {"question": row.messages[-1]["content"]})
        return Row(messages=user_message(text), answer=row.answer, metadata=row.metadata)
