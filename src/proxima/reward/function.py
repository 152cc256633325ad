"""Rewards that call a user's Python function."""

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from proxima.data import FieldError, require
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.reward.pooled import Job, PooledReward
from proxima.reward.signature import CallShape
from proxima.reward.workers.user_function import load_function, read_source


@dataclass(frozen=True, kw_only=True)
class UserFunction(PooledReward):
    """Base of the rewards that call a user's function.

    Args:
        path: `package.module:function`, or a file as `./my_reward.py:function`.
        name: key among the parts; null: the function's own name.
    """

    path: str

    where = "function"
    warm_up = "proxima.reward.workers.user_function"
    called_with: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        module, _, name = self.path.rpartition(":")
        require(bool(module and name), "path", self.path, "must be 'package.module:function' or './file.py:function'")

    def check_code(self) -> None:
        """Import the function, and check that it can be called. A constructor imports nothing, because a recipe is also
        read by commands that must not run the code that it names.

        Raises: FieldError when the module, the file or the function does not exist (names the nearest), or when the
            function can't be called with the arguments of this kind.
        """
        load_function.cache_clear()  # a notebook may have changed the file since another run
        self.check()
        _ = self.source

    def check(self) -> None:
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
        return f"{Path(module).resolve()}:{function}" if module.endswith(".py") else self.path

    @property
    def file(self) -> Path | None:
        """The file that defines the function; None for a module without a file."""
        module = self.absolute_path.rpartition(":")[0]
        file = Path(module) if module.endswith(".py") else getattr(sys.modules.get(module), "__file__", None)
        return None if file is None else Path(file)

    @cached_property
    def source(self) -> str | None:
        """The file's text when the function was checked: an edit during a run must not change the reward."""
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
    neither name occurs, the first two parameters are these. `episode` gets the messages after the prompt, of model,
    tools and environment, each with role and content. Any other parameter is a column of the row, and `**columns` gets
    all of them; `answer` is the column that the task maps as such. A parameter that has no default and is not a column
    is refused before the run.

    The function returns a number; a bool, which sets `correct`; a `Score`; or a dict with `value`, optionally
    `correct`, and any other numbers, which are logged as parts `<name>/<key>`. A function that gets lists returns a
    list of these, with None where it does not apply: only the other rewards count there, and without any the completion
    has no score. It may be `async def`. If it raises, hangs or crashes, only that completion is invalid, or that group
    for a function of lists. Module-level state lives as long as the worker; standard output is discarded.

    Args:
        chat: true passes prompts and completions to a function of lists as lists of messages, false as texts; null: as
            in the data, messages where the task maps a column of them (`task.messages`).
    Returns: Score as returned; NaN and infinities are failures, as value and as part: omit a part without a value.
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
    def call(self) -> CallShape:
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

    It gets a tuple of `Group` (`proxima.data.flow`), each a prompt with its completions and other scores. It
    returns one list for each group, in the same order, with a value for each completion as for `function`. So it can
    rank, normalise or compare over all prompts. It may be `async def`. If it raises, hangs or crashes, all completions
    of the batch are invalid. With dynamic sampling a step may generate several batches; the function is called for
    each.

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
                "scores": [asdict(score) for score in group.scores],
            }
            for group in groups
        ]
        return Job(grader="function_batch", arguments={"path": self.absolute_path, "groups": sent})
