"""Every task of reasoning_gym, by its name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

from proxima.data import FieldError, require
from proxima.data.errors import suggestion
from proxima.data.random import mix
from proxima.system.user_modules import require_package
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows, user_message
from proxima.task.template import as_text


@dataclass(frozen=True, kw_only=True)
class ReasoningGymTask(PlayedTask):
    """Puzzles of one reasoning_gym task (`basic_arithmetic`, `countdown`, `sudoku` …), generated on access by seed.

    Each row contains its entry, so that the reward `reasoning_gym` can call the task's own scorer. Training and test
    rows come from different seeds, but tasks with few possible puzzles may repeat some in both.

    Args:
        task: name of the task in reasoning_gym.
        size: number of rows; >= 1.
        split: `train` or `test`, which use different seeds.
        config: the task's own settings by name, as `{min_terms: 2, max_terms: 4}`. To mix tasks, use the kind `mix`;
            reasoning_gym's own `composite` is refused.
    Returns: rows whose answer is the task's reference answer, None without one; metadata `reasoning_gym`.
    Raises: FieldError for an unknown task or setting (with the nearest name), or a setting that the task refuses.
    """

    task: str
    size: int = 1000
    split: Literal["train", "test"] = "train"
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.size >= 1, "size", self.size, "must be >= 1")
        require(self.split in ("train", "test"), "split", self.split, "must be 'train' or 'test'")
        taken = sorted({"seed", "size"} & set(self.config))
        require(not taken, "config", taken, "is set by the run's seed and by `size`")
        _require_task(self.task)

    def rows(self, seed: int) -> Rows:
        """Return the puzzles of this seed."""
        settings = {**self.config, "seed": mix(seed, self.split == "test") % 2**31}
        return MappedRows(_create(self.task, {**settings, "size": self.size}), partial(self._row, settings))

    def _row(self, settings: Mapping[str, Any], index: int, entry: Mapping[str, Any]) -> Row:
        answer = entry.get("answer")
        source = {"task": self.task, "config": encode_json(settings), "entry": encode_json(entry)}
        if answer is not None:
            answer = as_text(answer)
        return Row(messages=user_message(entry["question"]), answer=answer, metadata={"reasoning_gym": source})


def encode_json(value: Any) -> Any:
    """Encode tuples, lists, dicts and scalars as JSON values. Tuples, and dicts with keys that are not texts, are
    tagged, so that the reward's worker decodes them exactly: some scorers distinguish tuples from lists."""
    if isinstance(value, tuple):
        return {"__tuple__": [encode_json(item) for item in value]}
    if isinstance(value, list):
        return [encode_json(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: encode_json(item) for key, item in value.items()}
        return {"__pairs__": [[encode_json(key), encode_json(item)] for key, item in value.items()]}
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def _tables() -> tuple[Mapping[str, Any], Callable[..., Any]]:
    require_package("reasoning_gym", "task 'reasoning_gym' needs", "proxima-rl[gym]")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    return DATASETS, reasoning_gym.create_dataset


def _require_task(name: str) -> None:
    tasks = _tables()[0].keys() - {"composite"}
    require(name in tasks, "task", name, "is not a reasoning_gym task", remedy=suggestion(name, tasks))


def _create(name: str, settings: Mapping[str, Any]) -> Any:
    tables, create = _tables()
    names = {field.name for field in fields(tables[name][1])}
    for key in settings:
        remedy = suggestion(key, names - {"seed", "size"})
        message = f"is not a setting of the reasoning_gym task {name!r}"
        require(key in names, f"config.{key}", settings[key], message, remedy=remedy)
    try:
        return create(name, **settings)
    except Exception as error:  # the tasks check their settings with assertions
        reason = " ".join(str(error).split()) or type(error).__name__
        message = f"is refused by the reasoning_gym task {name!r}: {reason[:200]}"
        raise FieldError("config", dict(settings), message) from None
