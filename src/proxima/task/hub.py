"""Hugging Face data sets, by name or folder."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from proxima.data import FieldError, UserError, require
from proxima.task.columns import Columns
from proxima.task.protocol import Row, Rows


@dataclass(frozen=True, kw_only=True)
class Dataset(Columns):
    """Rows of a Hugging Face data set: a hub name, a folder of data files, or a folder that `save_to_disk` wrote.

    Args:
        path: hub name (`openai/gsm8k`) or folder.
        subset: the configuration of the data set (`main`); none: its only one.
        split: which part, in the data set's own names; slices such as `train[:100]` work.
        revision: branch, tag or commit on the hub; none: the newest.
        question: column with the question, or a template over several, as "{question}\\n{hint}".
        messages: column with a whole chat, a list of {role, content}, in place of `question`; none: off.
        answer: column with the answer, or a template; none: the rows have no answer.
        metadata: columns kept for rewards and reports.
    Raises: ValueError when the data can't be had (offline and not cached, no such name, subset or split), an absent
        column, no rows.
    """

    path: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.path), "path", self.path, "must be a hub name or a folder")

    def rows(self, seed: int) -> Rows:
        """The rows in the data set's order; the seed changes nothing."""
        data = load(self.path, self.subset, self.split, self.revision)
        self.check(data.column_names, f"data set {self.path!r}")
        require(len(data) > 0, "split", self.split, f"of data set {self.path!r} holds no rows")
        return HubRows(self, data)


@dataclass(frozen=True)
class HubRows:
    """Rows of a Hugging Face data set by number."""

    task: Dataset
    data: Any

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.task.row(self.data[index], f"data set {self.task.path!r}, row {index}")


def load(path: str, subset: str | None, split: str, revision: str | None = None) -> Any:
    """The data set as the `datasets` library opens it.

    Raises:
        ValueError: it can't; one line with the reason and the remedy.
    """
    try:
        import datasets
    except ImportError:
        raise UserError("Hugging Face data sets need the package datasets: pip install 'proxima-rl[data]'") from None
    folder = Path(path)
    if not folder.exists() and (path.startswith(("/", ".", "~")) or path.count("/") > 1):
        raise FieldError("path", path, "names a folder that does not exist")
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            stored = datasets.load_from_disk(path)
            return stored[split] if isinstance(stored, datasets.DatasetDict) else stored
        with offline_unless_reachable():
            return datasets.load_dataset(path, subset, split=split, revision=revision)
    except Exception as problem:  # the library and the network below it raise dozens of kinds; each means: no data
        reason = next(iter(str(problem).strip().splitlines()), "") or type(problem).__name__
        remedy = "" if folder.exists() else "without a network, name a folder or a data set in the cache"
        what = f"data set {path!r} (subset {subset}, split {split})"
        message = f"{what} can't be opened: {type(problem).__name__}: {reason[:200]}"
        raise UserError(message, remedy=remedy) from None


@contextmanager
def offline_unless_reachable() -> Iterator[None]:
    """Where the hub's name doesn't resolve, use the cache at once instead of retrying for half a minute."""
    import datasets.config
    from huggingface_hub import constants

    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
    else:
        yield
