"""Data that `proxima data prepare` made."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from proxima.data import FieldError, require
from proxima.task.columns import fill, template_fields
from proxima.task.local_files import Parquet
from proxima.task.protocol import Row, Rows

PREPARED = (
    "aime24",
    "aime25",
    "amc23",
    "dapo-math",
    "gsm8k",
    "math",
    "math500",
)  # folders that the command knows how to make


def how_to_make(path: str | Path) -> str | None:
    """The command that makes a prepared folder, or the folder of a file; None where the name is not of one."""
    place = Path(path)
    names = (place.name, place.parent.name if place.suffix else "")
    known = next((name for name in names if name in PREPARED), None)
    return None if known is None else f"proxima data prepare {known}"


@dataclass(frozen=True, kw_only=True)
class PreparedTask:
    """A folder that `proxima data prepare` made: each question in the prompt that its card names.

    Args:
        path: the folder.
        split: `train` or `test`.
        template: another prompt than the card's, with `{question}`; its system prompt is left out then; none: the
            card's.
        metadata: columns kept for rewards and reports, as `level`, `subject`, `solution`.
    Returns: rows whose answer is the canonical answer as text; the metadata asked for.
    Raises: ValueError for no such folder or side, with the command that makes it.
    """

    path: str
    split: Literal["train", "test"] = "train"
    template: str | None = None
    metadata: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", tuple(self.metadata))
        require(bool(self.path), "path", self.path, "must name a folder")
        require(self.split in ("train", "test"), "split", self.split, "must be 'train' or 'test'")
        fits = self.template is None or template_fields(self.template, "template") == {"question"}
        require(fits, "template", self.template, "must hold {question} and nothing else in braces")

    def problem(self) -> str | None:
        """Why the data can't be read, with the remedy; None where they are there."""
        folder = Path(self.path).expanduser()
        command = how_to_make(folder) or "proxima data prepare"
        if not folder.is_dir():
            return f"no such folder; make it: {command}" + (" --from FILE" if folder.is_file() else "")
        if not (folder / f"{self.split}.parquet").is_file():
            other = "test" if self.split == "train" else "train"
            if (folder / f"{other}.parquet").is_file():
                return f"has no {self.split} side, only {other}; set split: {other}, or name another folder"
            return f"holds no {self.split}.parquet; make it: {command}"
        return None

    def rows(self, seed: int) -> Rows:
        """The rows in the order of the data; the seed changes nothing."""
        if problem := self.problem():
            raise FieldError("path", self.path, problem)
        file = str(Path(self.path).expanduser() / f"{self.split}.parquet")
        if self.template is None:
            return Parquet(path=file, messages="messages", metadata=self.metadata).rows(seed)
        return _Reworded(Parquet(path=file, metadata=self.metadata).rows(seed), self.template)


@dataclass(frozen=True)
class _Reworded:
    """Rows of bare questions, each put into a template on access."""

    source: Rows
    template: str

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Row:
        row = self.source[index]
        text = fill(self.template, {"question": row.messages[-1]["content"]})
        return Row(messages=({"role": "user", "content": text},), answer=row.answer, metadata=row.metadata)
