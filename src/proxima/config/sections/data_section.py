"""The `data` section, and the check of the files that tasks read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from proxima.config.resolved import Findings, Resolved
from proxima.config.slots import require_at_least
from proxima.data import require
from proxima.model.hub_names import did_you_mean
from proxima.model.pretrained import UnloadedModel
from proxima.model.template_clock import require_moment
from proxima.reward.runner import RewardRunner
from proxima.rollout.reference_answers import ReferenceAnswers, validate_answers
from proxima.task import TASKS
from proxima.task.file_formats import SUFFIXES
from proxima.task.local_files import prepare_command
from proxima.task.prompts import Cursor, PromptSource
from proxima.task.protocol import Rows
from proxima.task.template_traps import template_notes


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """Fields common to all training that reads rows."""

    system: Annotated[str | None, "system prompt put before each row that has none"] = None
    template_arguments: Annotated[
        Mapping[str, Any], "what the chat template reads beside the messages, as {enable_thinking: false} for Qwen3"
    ] = field(default_factory=dict)
    template_date: Annotated[
        str | None,
        "today for the chat template, as 2024-07-26; null: the day of the run's start, if it reads the clock",
    ] = None
    shuffle: Annotated[bool, "shuffle each epoch by the run's seed"] = True

    def __post_init__(self) -> None:
        require_moment(self.template_date)

    def template_notes(self, model: UnloadedModel, rows: Rows, stop_texts: Sequence[str] = ()) -> list[str]:
        """Warnings about what the model's chat template does to the rows; `stop_texts`: at which an answer ends."""
        return template_notes(
            model.tokenizer,
            model.path,
            rows,
            system=self.system,
            arguments=self.template_arguments,
            stops=model.stop_tokens,
            stop_texts=stop_texts,
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig(RowsConfig):
    over_length: Annotated[Literal["skip", "refuse"], "a prompt that leaves no room for one new token"] = "skip"
    check_answers: Annotated[int, "rows, drawn by the seed, whose answers are read before the run; 0: all"] = 10_000
    max_unreadable: Annotated[float, "share of unreadable ones above which the run is refused; 1: never"] = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 0, "check_answers", remedy="0 reads all")
        share = self.max_unreadable
        require(0 <= share <= 1, "max_unreadable", share, "must be a share in [0, 1]", remedy="1 never refuses")

    def answer_notes(self, rewards: RewardRunner, sets: Sequence[ReferenceAnswers], seed: int) -> list[str]:
        """Check the rewards and the answers that they will read; returns warnings, and raises as `validate_answers`."""
        limit, share = self.check_answers, self.max_unreadable
        return validate_answers(rewards, sets, limit=limit, most_unreadable=share, seed=seed)

    def prompt_source(self, rows: Rows, model: UnloadedModel, seed: int, *, shuffle: bool = False) -> PromptSource:
        """The prompts of a task, in the order of its rows or, with `shuffle`, in that of the seed."""
        return PromptSource(
            rows,
            model.tokenizer,
            context=model.context,
            cursor=Cursor(len(rows), seed, shuffle),
            system=self.system,
            template_arguments=self.template_arguments,
            over_length=self.over_length,
        )


DATA_SUFFIXES = (*SUFFIXES, ".gz", ".arrow")


def tasks_of(config: Any) -> dict[str, Any]:
    """The tasks of a config by their dotted paths."""
    sets = getattr(getattr(config, "eval", None), "all_sets", None) or {}
    return {"task": getattr(config, "task", None)} | {f"{path}.task": spec.task for path, spec in sets.items()}


def scorers_of(r: Resolved[Any], reward: Sequence[Any]) -> dict[str, tuple[str, Sequence[Any]]]:
    """The rewards that score the answers to each task of `tasks_of`, with the dotted path of their list."""
    sets = r.get("eval.all_sets") or {}
    own = {f"{path}.task": (f"{path}.reward", held_out.reward) for path, held_out in sets.items() if held_out.reward}
    return dict.fromkeys(tasks_of(r.config), ("reward", reward)) | own


def data_files_exist(r: Resolved[Any]) -> Findings:
    """Data files and prepared data that a task names must exist."""
    for slot, task in tasks_of(r.config).items():
        if slot == "task" and r.get("rollouts"):  # a replay reads no training questions
            continue
        if TASKS.holds(task, "prepared") and (missing := task.missing()):
            yield f"{slot}.path", missing
        for name, value in vars(task).items() if task is not None else ():
            if isinstance(value, str) and value.endswith(DATA_SUFFIXES) and "://" not in value and "*" not in value:
                place = Path(value).expanduser()
                if not place.is_file():
                    make = prepare_command(place)
                    remedy = f"{did_you_mean(place)}give a path relative to the current folder"
                    yield f"{slot}.{name}", f"no such file; {f'make it: {make}' if make else remedy}"
