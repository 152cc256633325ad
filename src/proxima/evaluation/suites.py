r"""Evaluation sets by name: data, prompt template, rewards, length limit.

The prompt of a suite is part of the measurement: it is fixed here and recorded in every result, and results with
different prompts are never compared silently. Data come from the first of these that applies: the path given for the
suite, `--data FOLDER`, `data/<suite>` (written by `proxima data prepare`), the hub or its cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from proxima.data import UserError, require
from proxima.data.errors import suggestion
from proxima.task import TASKS
from proxima.task.file_formats import SUFFIXES, data_suffix

STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
HASHES = "\nThink step by step, then give the final number after ####."
METADATA = ("id", "level", "source", "source_id", "subject", "unique_id", "year")  # columns copied into the result


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One evaluation set.

    Args:
        name: key of `SUITES`, and the folder below `data/`.
        hub: hub name; `subset` and `split` in the hub's own names.
        question, answer: columns of the hub's data. Prepared data have the columns `question` and `answer`.
        template: the text after the question in the prompt, with braces doubled.
        reward: kind of the reward that scores the answers.
        max_tokens: default length limit of an answer.
    """

    name: str
    hub: str
    split: str = "test"
    subset: str | None = None
    question: str = "question"
    answer: str = "answer"
    template: str = STEP_BY_STEP
    reward: str = "math"
    max_tokens: int = 4096

    def at(self, place: Path) -> Any | None:
        """The task spec for a file, or for a folder with a `test` file, there or in `main` or `data`; None if there is
        no such file."""
        if place.is_file():
            return self._table(place)
        for folder in (place, place / "main", place / "data"):
            for name in TEST_FILES:
                if (folder / name).is_file():
                    return self._table(folder / name)
            parts = sorted(str(part) for part in folder.glob("test-*.parquet"))
            if parts:
                return self._mapped(TASKS["files"](path=tuple(parts)))
        return None

    def on_the_hub(self) -> Any:
        """The task spec that reads the data from the hub or its cache."""
        question = f"{{{self.question}}}{self.template}"
        return TASKS["dataset"](
            path=self.hub, subset=self.subset, split=self.split, question=question, answer=self.answer, metadata=()
        )

    def _table(self, file: Path) -> Any:
        kinds = f"{', '.join(SUFFIXES)} file, possibly with .gz"
        require(data_suffix(file) in SUFFIXES, "task", f"{self.name}={file}", f"must be a {kinds}, or a folder")
        return self._mapped(TASKS["files"](path=str(file)))

    def _mapped(self, task: Any) -> Any:
        """The task with the columns of prepared data, or with the hub's names for a raw copy of its data. If a file
        can't be read, the columns are those of prepared data; opening the task reports the error."""
        try:
            present = task.columns() or ()
        except (OSError, UserError):
            present = ("question", "answer")
        question = "question" if "question" in present else self.question
        answer = "answer" if "answer" in present else self.answer
        return replace(
            task,
            question=f"{{{question}}}{self.template}",
            answer=answer,
            metadata=tuple(name for name in METADATA if name in present),
        )

    def find(self, given: Path | None, data: Path | None, json_columns: Sequence[str] = ()) -> tuple[Any, str]:
        """Find the suite's data; return the task spec, which parses the texts of `json_columns`, and the location.

        Args:
            given: the path of this suite's data; if not None, the only place that is searched.
            data: a folder of prepared sets, or the prepared set itself.
        Raises: UserError if there is no data in `given` or `data`.
        """
        task, place = self._find(given, data)
        return replace(task, json_columns=tuple(json_columns)), place

    def _find(self, given: Path | None, data: Path | None) -> tuple[Any, str]:
        if given is not None:
            task = self.at(given)
            if task is None:
                if given.is_dir():
                    reason = "has no test.parquet or test.jsonl"
                else:
                    reason = "does not exist"
                raise UserError(f"task {self.name}={given} {reason}; {self.remedy}")
            return task, str(given)
        if data is not None:
            for place in (data / self.name, data):
                task = self.at(place) if place.exists() else None
                if task is not None:
                    return task, str(place)
            raise UserError(f"--data {data} has no {self.name}/test.parquet; {self.remedy} --out {data / self.name}")
        place = Path("data") / self.name
        task = self.at(place)
        if task is not None:
            return task, str(place)
        return self.on_the_hub(), self.hub

    @property
    def remedy(self) -> str:
        """The remedy for missing data."""
        return f"download the data with: proxima data prepare {self.name}"


TEST_FILES = tuple(f"test{suffix}" for suffix in SUFFIXES)  # of a folder
_SUITES = (
    # American Invitational Mathematics Examination I and II, Mathematical Association of America: 30 questions each
    Suite(name="aime24", hub="HuggingFaceH4/aime_2024", split="train", question="problem", max_tokens=8192),
    Suite(name="aime25", hub="math-ai/aime25", question="problem", max_tokens=8192),
    Suite(name="aime26", hub="math-ai/aime26", question="problem", max_tokens=8192),
    # American Mathematics Competitions 12A and 12B of 2023, without the choices: 40 questions
    Suite(name="amc23", hub="math-ai/amc23"),
    # Cobbe et al., arXiv 2110.14168; MIT licence: 1,319 questions
    Suite(name="gsm8k", hub="openai/gsm8k", subset="main", template=HASHES, reward="gsm8k", max_tokens=512),
    # 500 test questions of MATH (Hendrycks et al., arXiv 2103.03874; MIT licence), chosen in arXiv 2305.20050
    Suite(name="math500", hub="HuggingFaceH4/MATH-500", question="problem", max_tokens=2048),
)
SUITES: dict[str, Suite] = {suite.name: suite for suite in _SUITES}


def suite(name: str) -> Suite:
    """Return the suite with this name; if it is unknown, raise UserError with the nearest name or all names."""
    if name not in SUITES:
        remedy = suggestion(name, SUITES, "a recipe with eval.task for your own questions")
        raise UserError(f"task={name!r} is not an evaluation set", remedy=remedy)
    return SUITES[name]


def parse_tasks(texts: Sequence[str]) -> dict[str, Path | None]:
    """Parse `gsm8k,aime24` and `math500=PATH` (repeated, or with commas) into suite → its path; UserError for an
    unknown or repeated suite, and for an empty name or path."""
    paths: dict[str, Path | None] = {}
    for word in chain.from_iterable(text.split(",") for text in texts):
        name, equals, path = word.strip().partition("=")
        name = name.strip()
        if name:
            name = suite(name).name
        if not name or (equals and not path.strip()):
            raise UserError(f"task={','.join(texts)!r} must name evaluation sets: gsm8k,aime24 or gsm8k=PATH")
        if name in paths:
            raise UserError(f"task={','.join(texts)!r} names {name} twice; keep one")
        paths[name] = None
        if equals:
            paths[name] = Path(path.strip()).expanduser()
    return paths
