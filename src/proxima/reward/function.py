"""Rewards that call a user's Python function, and the calling convention that its signature implies."""

import difflib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from proxima.data import FieldError, require
from proxima.data.episode import Span
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.process.sandbox import Sandbox, fallback_note
from proxima.reward.base import Job, PooledReward
from proxima.reward.sandboxed import function_sandbox, require_choice, sandbox_kind
from proxima.reward.workers.user_function import load_function, module_file, read_source
from proxima.system.user_modules import user_module_file

LISTS = ("prompts", "completions", "completion_ids")  # TRL's names; a function with one of them takes lists
PASSED = {"each": ("prompt", "completion"), "lists": LISTS, "verl": ("solution_str", "extra_info")}
EPISODE = "episode"  # in each style: the messages after the prompt, if the function names it


@dataclass(frozen=True, kw_only=True)
class UserFunction(PooledReward):
    """Base of the rewards that call a user's function.

    Args:
        path: `package.module:function`, or a file as `./my_reward.py:function`.
        name: key among the parts; null: the function's own name.
        sandbox: `bubblewrap`, `auto`, `none`, or a kind of another package: where its workers run. In a sandbox a
            function has no network and none of the run's variables and folders; it can read only Python's files, the
            packages and the Python files beside its own.
    """

    path: str
    sandbox: str = "none"

    where = "function"
    warm_up = "proxima.reward.workers.user_function"
    called_with: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        module, _, name = self.path.rpartition(":")
        require(bool(module and name), "path", self.path, "must be 'package.module:function' or './file.py:function'")
        require_choice(self.sandbox)

    def check_code(self) -> None:
        """Import the function and check that it can be called. The constructor imports nothing, because some commands
        read a recipe but must not run the code that it names.

        Raises: FieldError if the module, file or function does not exist (names the nearest), or the function can't be
            called with the arguments of this kind.
        """
        load_function.cache_clear()  # a notebook may have changed the file since another run
        self.check()
        _ = self.source

    @property
    def pool(self) -> str:
        if self.workers_sandbox is None:
            return self.where
        return f"{self.where} in a sandbox"

    @cached_property
    def workers_sandbox(self) -> Sandbox | None:
        if self.sandbox == "none":
            return None
        file = self.file or user_module_file(self.path.rpartition(":")[0])  # the latter if nothing has imported it
        return function_sandbox(self.sandbox, file)

    def notes(self) -> list[str]:
        note = fallback_note(self.sandbox)
        return [note] if note else []

    def check(self) -> None:
        sandbox_kind(self.sandbox)
        file = self.file
        if file is not None and not file.exists():
            bound = f"names a file that does not exist, {str(file)!r}"
            raise FieldError("path", self.path, bound, remedy="give a path that exists from the current folder")
        try:
            function = self.function
        except ValueError as error:
            raise FieldError("path", self.path, str(error)) from error
        try:
            self.bind(function)
        except TypeError as error:
            defined = f"and it is defined with {inspect.signature(function)}: {error}"
            problem = f"names a function that '{self.kind}' calls with {self.called_with}, {defined}"
            raise FieldError("path", self.path, problem) from None

    def bind(self, function: Callable[..., Any]) -> None:
        """Raise TypeError if the function can't be called with the arguments of this kind."""
        raise NotImplementedError

    @property
    def function(self) -> Callable[..., Any]:
        return load_function(self.absolute_path)

    @property
    def label(self) -> str:
        return self.name or self.path.rpartition(":")[2]

    @property
    def absolute_path(self) -> str:
        """`path` with its file, if any, made absolute: workers need not share the working directory."""
        module, _, function = self.path.rpartition(":")
        if module.endswith(".py"):
            return f"{Path(module).resolve()}:{function}"
        return self.path

    @property
    def file(self) -> Path | None:
        """The file that defines the function; None for a module without a file."""
        module = self.absolute_path.rpartition(":")[0]
        file = module if module.endswith(".py") else module_file(sys.modules.get(module))
        if file is None:
            return None
        return Path(file)

    @cached_property
    def source(self) -> str | None:
        """The file's text when the function was checked, so that an edit during the run does not change the reward."""
        _ = self.function  # the file of a module is known once it is imported
        return read_source(self.file)

    def setup_job(self) -> Job:
        return Job(grader="load", arguments={"path": self.absolute_path, "source": self.source})


@dataclass(frozen=True, kw_only=True)
class Function(UserFunction):
    """The value that your function returns in a separate worker process. Its signature determines how it is called.

        fn(prompt, completion, gold)          once per completion; `gold` is a column of the row
        fn(completions, gold, **columns)      once per group, with a list of each, as TRL calls it
        fn(data_source, solution_str, ground_truth, extra_info)     once per completion, as verl calls it

    `prompt` and `completion` are a `proxima.data.flow.Prompt` and a `Completion`, or their texts if annotated `str`; if
    neither name occurs, the first two parameters get them. `episode` gets the messages after the prompt, of model,
    tools and environment, each with role and content. Any other parameter is a column of the row, and `**columns` gets
    all of them; `answer` is the column that the task maps as the answer. A parameter without a default that is not a
    column is refused before the run.

    The function returns a number; a bool, which sets `correct`; a `Score`; or a dict with `value`, optionally
    `correct`, and any other numbers, which are logged as parts `<name>/<key>`. A function that gets lists returns a
    list of these, with None where it does not apply; only the other rewards count there, and without any the completion
    has no score. It may be `async def`. If it raises, hangs or crashes, only that completion is invalid, or that group
    for a function of lists. Module-level state lives as long as the worker; standard output is discarded.

    Args:
        chat: true passes prompts and completions to a function of lists as lists of messages, false as texts; null: as
            in the data, as messages if the task maps a column of them (`task.messages`).
    Returns: Score as returned; NaN and infinities are failures, as value and as part. Omit a part without a value.
    Edge cases: a process that the function forks must exit with `os._exit`; one that returns is killed. A function that
        writes to the worker's socket invalidates its completion. A dict in verl's style has `score` and perhaps `acc`;
        texts in it are dropped.
    Raises: FieldError before the run; see `check_code`.
    Differs: TRL calls a function with the completions of several prompts, and counts a completion to which no function
        applies as 0.
    """

    chat: bool | None = None

    kind = "function"
    called_with = "(prompt, completion) and columns by name"

    def bind(self, function: Callable[..., Any]) -> None:
        CallShape.of(function)

    @cached_property
    def call(self) -> "CallShape":
        """The calling convention of the function."""
        return CallShape.of(self.function)

    @property
    def completions_per_call(self) -> int:
        return 0 if self.call.style == "lists" else 1

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        return Job(grader="function", arguments={"path": self.absolute_path, **self.call.for_one(prompt, completion)})

    def batch_job(self, groups: Sequence[Group]) -> Job:
        """The call of a function that takes lists, for a single group."""
        (group,) = groups
        values = self.call.for_group(group.prompt, group.completions, self.chat)
        count = len(group.completions)
        return Job(grader="function_lists", arguments={"path": self.absolute_path, "values": values, "count": count})


@dataclass(frozen=True, kw_only=True)
class FunctionBatch(UserFunction):
    """The values that your function `fn(groups)` returns, called once per generated batch in a separate worker process.

    It gets a tuple of `Group` (`proxima.data.flow`), each a prompt with its completions and their scores by the other
    rewards, and returns one list for each group, in the same order, with a value for each completion as for `function`.
    It can thus rank, normalise or compare over all prompts. It may be `async def`. If it raises, hangs or crashes, all
    completions of the batch are invalid. With dynamic sampling a step may generate several batches; the function is
    called for each.

    Returns: Score as returned; NaN, infinities and numbers too large for a float, as value or as part, invalidate only
        their completion.
    Raises: FieldError before the run; see `check_code`.
    """

    kind = "function_batch"
    whole_batch = True
    called_with = "(groups)"

    def bind(self, function: Callable[..., Any]) -> None:
        with suppress(ValueError):  # some functions written in C have no signature; a mismatch shows at the first call
            inspect.signature(function).bind("groups")

    def batch_job(self, groups: Sequence[Group]) -> Job:
        sent = [
            {
                "prompt": group.prompt.to_json(),
                "completions": [completion.to_json() for completion in group.completions],
                "scores": [score.facts() for score in group.scores],
            }
            for group in groups
        ]
        return Job(grader="function_batch", arguments={"path": self.absolute_path, "groups": sent})


@dataclass(frozen=True)
class CallShape:
    """The calling convention of a function: once for each completion, or as TRL or verl call it.

    Args:
        style: `each`: per completion; `lists`: per group, in TRL's names; `verl`: per completion, in verl's names.
        leading: parameters that get prompt and completion by position: the first two if none has either name.
        named: parameters that are passed by name.
        required: those in `named` without a default that only a column can supply.
        everything: the function has `**columns` and gets all values.
        texts: parameters annotated `str` or `str | None`, which get the text of a prompt or completion.
    """

    style: Literal["each", "lists", "verl"]
    leading: tuple[str, ...]
    named: frozenset[str]
    required: frozenset[str]
    everything: bool
    texts: frozenset[str]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "CallShape":
        """Read the signature; TypeError, with the reason, if the function can't be called with the data of a reward."""
        try:
            signature = inspect.signature(function)
        except ValueError:  # some functions written in C have no signature; a mismatch shows at the first call
            return cls("each", PASSED["each"], frozenset(), frozenset(), False, frozenset())
        parameters = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        by_name = {p.name for p in parameters if p.kind != p.POSITIONAL_ONLY}
        kinds = {p.kind for p in signature.parameters.values()}
        style: Literal["each", "lists", "verl"] = "each"
        if by_name.intersection(LISTS):
            style = "lists"
        elif "solution_str" in by_name:
            style = "verl"
        leading: tuple[str, ...] = ()
        if style == "each" and not by_name.intersection((*PASSED["each"], EPISODE)):
            leading = tuple(p.name for p in parameters if p.kind != p.KEYWORD_ONLY)[:2]
            if inspect.Parameter.VAR_POSITIONAL in kinds:
                leading += PASSED["each"][len(leading) :]
            if len(leading) < 2:
                raise TypeError("name a parameter completion")
        rest = [p for p in parameters if p.name not in leading]
        for p in rest:
            if p.kind == p.POSITIONAL_ONLY:
                raise TypeError(f"{p.name!r} is positional-only, but columns are passed by name")
        return cls(
            style=style,
            leading=leading,
            named=frozenset(p.name for p in rest),
            required=frozenset(p.name for p in rest if p.default is p.empty).difference((*PASSED[style], EPISODE)),
            everything=inspect.Parameter.VAR_KEYWORD in kinds,
            texts=frozenset(p.name for p in parameters if _is_text(p.annotation)),
        )

    @property
    def gets_tokens(self) -> bool:
        """True if the function sees the tokens of a completion, not only its text."""
        if self.style == "each":
            name = (self.leading or PASSED["each"])[1]
            return name not in self.texts and bool(self.leading or self.everything or name in self.named)
        return self.style == "lists" and "completion_ids" in self.named

    def problem(self, columns: Collection[str]) -> tuple[str, str] | None:
        """The problem of calling the function with rows of these columns, and the remedy; None if there is none."""
        for name in self.leading:
            if name in columns:
                where = f"has the parameter {name!r} in the place of prompt or completion, and it is a column"
                return where, "name those two parameters prompt and completion"
        for name in sorted(self.required.difference(columns)):
            near = difflib.get_close_matches(name, columns, 1)
            if near:
                hint = f"did you mean {near[0]!r}? columns"
            else:
                hint = "columns"
            if self.style == "verl" and name == "ground_truth":
                hint = "map the answer with task.answer=COLUMN; columns"
            return f"has the parameter {name!r}, which is not a column", f"{hint}: {', '.join(columns) or 'none'}"
        return None

    def columns(self, row: "HasColumns") -> dict[str, Any]:
        """The values of a row that the function can take by name; verl's `ground_truth` may be in another column."""
        columns = row_columns(row)
        if self.style == "verl":
            columns |= _ground_truth(row)
        return columns

    def for_one(self, prompt: Prompt, completion: Completion) -> dict[str, Any]:
        """The arguments with which a worker calls the function for a completion. A prompt or completion passed as an
        object is sent as JSON, with the name of its parameter."""
        columns = self.columns(prompt)
        if EPISODE in self.named:
            columns = {EPISODE: messages_of(completion)} | columns
        if self.style == "verl":
            passed_by_name = {"extra_info": {}} | columns | {"solution_str": completion.text}
            return {"values": self._chosen(passed_by_name), "verl": True}
        names = dict(zip(PASSED["each"], self.leading or PASSED["each"], strict=True))
        texts = {"prompt": prompt.question, "completion": completion.text}
        of_kind: dict[str, Prompt | Completion] = {"prompt": prompt, "completion": completion}
        objects = {}
        passed: dict[str, Any] = {}
        for kind, name in names.items():
            if name in self.texts:
                passed[name] = texts[kind]
            elif self.leading or self.everything or name in self.named:
                passed[name] = of_kind[kind].to_json()
                objects[kind] = name
        columns = {name: value for name, value in columns.items() if name not in names.values()}
        return {"values": passed | self._chosen(columns), "positional": len(self.leading), **objects}

    def for_group(self, prompt: Prompt, completions: Sequence[Completion], chat: bool | None) -> dict[str, Any]:
        """The keyword arguments of a function that takes lists."""
        count = len(completions)
        columns = row_columns(prompt)
        values = {name: [value] * count for name, value in columns.items() if name not in ("prompt", "completion")}
        if EPISODE in self.named:
            values = {EPISODE: list(map(messages_of, completions))} | values
        if chat is None:
            chat = prompt.chat
        if chat:
            values["prompts"] = [list(prompt.messages)] * count
            values["completions"] = list(map(messages_of, completions))
        else:
            values["prompts"] = [prompt.question] * count
            values["completions"] = [completion.text for completion in completions]
        values["completion_ids"] = [completion.tokens.tolist() for completion in completions]
        return self._chosen(values)

    def _chosen(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if self.everything or name in self.named}


def _is_text(annotation: object) -> bool:
    """Return True for `str` or `str | None`, given as an object or as source text."""
    if isinstance(annotation, str):
        inner = annotation.replace(" ", "").removeprefix("typing.").removeprefix("Optional[").removesuffix("]")
        return inner in ("str", "str|None", "None|str")
    return annotation in (str, str | None)


def messages_of(completion: Completion) -> list[dict[str, str]]:
    """The messages after the prompt: all those of an episode, with the model's messages as it wrote them, even if a
    template changed them later; without an episode, the completion's text."""
    spans: dict[tuple[int, bool], Span] = {}
    for path in completion.paths:
        if path.episode is None:
            continue
        for span in path.episode.spans:
            key = span.turn, span.role != "assistant"
            if span.sampled or key not in spans:
                spans[key] = span
    turns = [{"role": span.role, "content": span.text} for _, span in sorted(spans.items())]
    return turns or [{"role": "assistant", "content": completion.text}]


class HasColumns(Protocol):
    """A prompt, or the row from which it is built."""

    @property
    def answer(self) -> Any: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...


def row_columns(row: HasColumns) -> dict[str, Any]:
    """The row's columns; `answer` is the column that the task maps as the answer, if any."""
    columns = dict(row.metadata)
    if row.answer is not None:
        columns["answer"] = row.answer
    return columns


def _ground_truth(row: HasColumns) -> dict[str, Any]:
    """verl's `ground_truth`: the row's answer, or else that in its column `reward_model`. Empty if the row has neither,
    or has no answer but its own column `ground_truth`."""
    if row.answer is not None:
        return {"ground_truth": row.answer}
    nested = row.metadata.get("reward_model")
    if not isinstance(nested, Mapping) or "ground_truth" in row.metadata or "ground_truth" not in nested:
        return {}
    return {"ground_truth": nested["ground_truth"]}
