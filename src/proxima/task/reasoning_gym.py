"""Every task of reasoning_gym, by its name."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from proxima.data import FieldError, UserError, require
from proxima.data.random import mix
from proxima.task.columns import as_text
from proxima.task.protocol import Row, Rows


@dataclass(frozen=True, kw_only=True)
class ReasoningGymTask:
    """Puzzles of one reasoning_gym task (`basic_arithmetic`, `countdown`, `sudoku` …), made on access from the seed.

    Each row carries its entry, so that the reward `reasoning_gym` scores it with the task's own scorer. Training and
    test rows come from different seeds; tasks with few possible puzzles may still repeat some.

    Args:
        task: name of the task in reasoning_gym.
        size: rows; >= 1.
        split: `train` or `test`: different puzzles at the same seed.
        config: the task's own settings by name, as `{min_terms: 2, max_terms: 4}`; the task `composite` mixes others,
            as `{datasets: [{name: chain_sum, weight: 2, config: {}}, {name: countdown, weight: 1, config: {}}]}`.
    Returns: rows whose answer is the task's reference answer, None where the task has none; metadata `reasoning_gym`.
    Raises: ValueError for an unknown task or setting (with the nearest name), or a setting that the task refuses.
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
        _known_task(self.task)

    def rows(self, seed: int) -> Rows:
        """The puzzles of this seed."""
        settings = {**self.config, "seed": mix(seed, self.split == "test") % 2**31}
        return ReasoningGymRows(self.task, settings, _create(self.task, {**settings, "size": self.size}))


class ReasoningGymRows:
    """Puzzles by number."""

    def __init__(self, task: str, settings: Mapping[str, Any], dataset: Any) -> None:
        self._task, self._settings, self._dataset = task, dict(settings), dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        entry = self._dataset[index]
        answer = entry.get("answer")
        source = {"task": self._task, "config": encode_json(self._settings), "entry": encode_json(entry)}
        return Row(
            messages=({"role": "user", "content": entry["question"]},),
            answer=None if answer is None else as_text(answer),
            metadata={"reasoning_gym": source},
        )


def encode_json(value: Any) -> Any:
    """A value of tuples, lists, dicts and scalars as JSON; tuples and keys that are no text are tagged.

    The reward's worker turns it back exactly: some scorers tell a tuple from a list.
    """
    if isinstance(value, tuple):
        return {"__tuple__": [encode_json(item) for item in value]}
    if isinstance(value, list):
        return [encode_json(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: encode_json(item) for key, item in value.items()}
        return {"__pairs__": [[encode_json(key), encode_json(item)] for key, item in value.items()]}
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _tables() -> tuple[Mapping[str, Any], Callable[..., Any]]:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise UserError("task 'reasoning_gym' needs the package reasoning_gym: pip install 'proxima-rl[gym]'") from None
    return DATASETS, reasoning_gym.create_dataset


def _known_task(name: str) -> None:
    known, _ = _tables()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(sorted(known))}"
        raise FieldError("task", name, "is not a reasoning_gym task", remedy=hint)


def _create(name: str, settings: Mapping[str, Any]) -> Any:
    tables, create = _tables()
    known = [entry.name for entry in fields(tables[name][1])]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(set(known) - {'seed', 'size'}))}"
            )
            message = f"is not a setting of the reasoning_gym task {name!r}"
            raise FieldError(f"config.{key}", settings[key], message, remedy=hint)
    try:
        return create(name, **_with_specs(name, settings))
    except Exception as problem:  # the tasks check their settings by assertions of their own
        reason = " ".join(str(problem).split()) or type(problem).__name__
        message = f"is refused by the reasoning_gym task {name!r}: {reason[:200]}"
        raise FieldError("config", dict(settings), message) from None


def _with_specs(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the parts of a `composite` as reasoning_gym's own objects."""
    if name != "composite" or not settings.get("datasets"):
        return dict(settings)
    from reasoning_gym.composite import DatasetSpec

    for part in settings["datasets"]:
        _known_task(part.get("name", ""))
    return {
        **settings,
        "datasets": [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in settings["datasets"]],
    }
