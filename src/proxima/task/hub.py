"""Hugging Face data sets, by name or folder; GSM8K among them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from proxima.data import FieldError, MissingDataError, MissingFileError, UserError, require
from proxima.model.files import hub_is_reachable
from proxima.system.user_modules import require_package
from proxima.task.column_mapping import ColumnMapping
from proxima.task.file_formats import SUFFIXES, data_suffix
from proxima.task.local_files import Files
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows, Task, user_message
from proxima.task.template import require_question_template


@dataclass(frozen=True, kw_only=True)
class Dataset(ColumnMapping):
    """Rows of a Hugging Face data set: a hub name, a folder of data files, or a folder written by `save_to_disk`.

    Args:
        path: hub name (`openai/gsm8k`) or folder.
        subset: the configuration of the data set (`main`); null: its only one.
        split: the part, in the data set's own names; slices such as `train[:100]` work.
        revision: branch, tag or commit on the hub; null: the newest.
    Raises: UserError if the data can't be opened (offline and not cached, unknown name, subset or split), a column is
        missing, or there are no rows.
    """

    path: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.path), "path", self.path, "must be a hub name or a folder")

    def all_rows(self, seed: int) -> Rows:
        """Return the rows in the data set's order; the seed is ignored."""
        data = load_hub_dataset(self.path, self.subset, self.split, self.revision)
        source = f"data set {self.path!r}"
        self.require_columns(data.column_names, source)
        self.refuse_media(data.column_names, source)
        require(len(data) > 0, "split", self.split, f"of {source} holds no rows")
        items = _ReadableItems(data, source)
        return MappedRows(items, lambda index, values: self.row(values, f"{source}, row {index}", fills_nulls=True))


@dataclass(frozen=True)
class _ReadableItems:
    """The items of a data set. If the library can't decode one, such as a damaged image or a text that is not UTF-8, a
    `UserError` names its row."""

    data: Any
    source: str

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        try:
            return self.data[index]
        except Exception as error:  # of Arrow, PIL, audio decoders …
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            raise UserError(f"{self.source}, row {index} can't be read: {reason}", remedy="remove the row") from None


def load_hub_dataset(path: str, subset: str | None, split: str, revision: str | None = None) -> Any:
    """Open a data set with the `datasets` library; UserError, with the reason and the remedy, if that fails."""
    require_package("datasets", "Hugging Face data sets need", "proxima-rl[data]")
    import datasets

    folder = Path(path).expanduser()
    require(not folder.is_file(), "path", path, "is a file", remedy="read it with kind: files, or name its folder")
    if not folder.exists() and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
        raise MissingFileError("path", path, "names a folder that does not exist")
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            stored = datasets.load_from_disk(str(folder))
            if isinstance(stored, datasets.DatasetDict):
                return stored[split]
            return stored
        name = str(folder) if folder.exists() else path
        with offline_unless_reachable():
            return datasets.load_dataset(name, subset, split=split, revision=revision)
    except Exception as error:  # the library and the network code below it raise dozens of types
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        what = f"data set {path!r} (subset {subset}, split {split}) can't be opened"
        what = f"{what}: {type(error).__name__}: {reason[:200]}"
        if folder.exists():
            raise UserError(what) from None
        remedy = "without a network, name a folder or a data set in the cache"
        raise MissingDataError(what, remedy=remedy) from None


@contextmanager
def offline_unless_reachable() -> Iterator[None]:
    """If the hub's name does not resolve, use the cache at once instead of retrying for half a minute."""
    import datasets.config
    from huggingface_hub import constants

    hub_is_off = constants.HF_HUB_OFFLINE
    datasets_are_offline = datasets.config.HF_HUB_OFFLINE
    if not hub_is_reachable():
        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = hub_is_off
        datasets.config.HF_HUB_OFFLINE = datasets_are_offline


@dataclass(frozen=True, kw_only=True)
class Gsm8kTask(PlayedTask):
    """GSM8K from the hub or from files: 7,473 training and 1,319 test questions; the answer follows `####`.

    Args:
        path: hub name, a .jsonl or .parquet file, or a folder with `train.jsonl` and `test.jsonl` (or Parquet files
            whose names begin like these, also in a subfolder `main`).
        split: `train` or `test`; ignored for a single file.
        template: the prompt, with `{question}`, as "{question}\\nGive the final answer after ####."
    Returns: rows whose answer is the text after `####` without commas and leading `$`; metadata `solution`, the text
        before.
    Raises: UserError if the data can't be opened, or a solution has no answer after `####`; names the row.
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
                parts = sorted(str(part) for part in folder.glob(f"{self.split}*.parquet"))
                if parts:
                    return Files(path=tuple(parts))
            raise FieldError("path", self.path, f"holds neither {self.split}.jsonl nor {self.split}*.parquet")
        if data_suffix(place) in SUFFIXES:
            raise MissingFileError("path", self.path, "names a file that does not exist")
        return Dataset(path=self.path, subset="main", split=self.split)

    def _row(self, index: int, row: Row) -> Row:
        solution, marker, final = str(row.answer).rpartition("####")
        answer = final.strip().replace(",", "").lstrip("$")
        if not marker or not answer:
            shown = json.dumps(row.answer)[-60:]
            raise UserError(f"gsm8k row {index}: the answer {shown} has no number after '####'; is this GSM8K?")
        question = self.template.format(question=row.messages[-1]["content"])
        return Row(messages=user_message(question), answer=answer, metadata={"solution": solution.strip()})
