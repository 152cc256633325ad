"""Your own Python function."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from proxima.data import Completion, FieldError, Group, Prompt, Score
from proxima.reward.base import Job, PooledReward, Where
from proxima.reward.workers.graders import load_function


@dataclass(frozen=True, kw_only=True)
class UserFunction(PooledReward):
    """Base of the rewards that call a function of the user's.

    Args:
        path: `package.module:function`, or a file as `./my_reward.py:function`.
        weight: factor of the value in the sum of the rewards.
        name: key among the parts; none: the function's own name.
    """

    path: str

    where: ClassVar[Where] = "function"
    takes: ClassVar[tuple[str, ...]] = ()  # what the function is called with

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            function = load_function(self.absolute)
        except ValueError as problem:
            raise FieldError("path", self.path, str(problem)) from problem
        try:
            signature = inspect.signature(function)
        except ValueError:  # some functions of C have none: the first call shows
            return
        try:
            signature.bind(*self.takes)
        except TypeError as problem:
            called = f"'{self.kind}' calls it with ({', '.join(self.takes)})"
            message = f"names a function with the signature {signature}, and {called}: {problem}"
            raise FieldError("path", self.path, message) from None

    @property
    def label(self) -> str:
        return self.name or self.path.rpartition(":")[2]

    @property
    def absolute(self) -> str:
        """The path with its file, if it names one, made absolute: workers need not share the working directory."""
        module, _, function = self.path.rpartition(":")
        return f"{Path(module).resolve()}:{function}" if module.endswith(".py") else self.path


@dataclass(frozen=True, kw_only=True)
class Function(UserFunction):
    """What your function `fn(prompt, completion)` returns, called once a completion in a worker process of its own.

    It gets a `proxima.data.Prompt` and a `Completion` and returns a number, a bool, a `Score`, or a dict with `value`,
    optionally `correct`, and any other numbers, which are logged as parts `<name>/<key>`. It may be `async def`. It may
    raise,
    hang or crash: that costs the one completion. A worker keeps what the module holds in memory from call to call; what
    it prints goes nowhere.

    Args:
        path: `package.module:function`, or a file as `./my_reward.py:function`.
        weight: factor of the value in the sum of the rewards.
        name: key among the parts; none: the function's own name.
    Returns: Score as returned; NaN and infinities are failures, as value and as part: leave a part out where it has no
        value.
    Edge cases: a process that the function forks must end by `os._exit`; one that returns instead is ended. Whatever is
        written into the worker's socket costs the completion.
    Raises: ValueError at construction when the module, the file or the function isn't there (the nearest name is
        given), or when it can't be called with these arguments.
    """

    kind: ClassVar[str] = "function"
    takes: ClassVar[tuple[str, ...]] = ("prompt", "completion")

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        arguments = {"path": self.absolute, "prompt": prompt.to_json(), "completion": completion.to_json()}
        return Job(grader="function", arguments=arguments)


@dataclass(frozen=True, kw_only=True)
class FunctionBatch(UserFunction):
    """What your function `fn(groups)` returns, called once per generated batch in a worker process of its own.

    It gets a tuple of `proxima.data.Group`, each a prompt with its completions and what the other rewards say of them,
    and returns a list for each group, in the same order, of what `function` may return for each completion. So it can
    rank, normalise or compare over all prompts. It may be `async def`. If it raises, hangs or crashes, all completions
    of the batch are invalid. A batch of generation is the step's; with dynamic sampling a step may generate several,
    and the function is called for each.

    Args:
        path: `package.module:function`, or a file as `./my_reward.py:function`.
        weight: factor of the value in the sum of the rewards.
        name: key among the parts; none: the function's own name.
    Returns: Score as returned; NaN, infinities and numbers beyond any float are failures of the one completion, as
        value and as part.
    Raises: ValueError at construction when the module, the file or the function isn't there (the nearest name is
        given), or when it can't be called with these arguments.
    """

    kind: ClassVar[str] = "function_batch"
    takes: ClassVar[tuple[str, ...]] = ("groups",)
    whole_batch: ClassVar[bool] = True

    def batch_job(self, groups: Sequence[Group]) -> Job:
        sent = [
            {
                "prompt": group.prompt.to_json(),
                "completions": [completion.to_json() for completion in group.completions],
                "scores": [asdict(score) for score in group.scores],
            }
            for group in groups
        ]
        return Job(grader="function_batch", arguments={"path": self.absolute, "groups": sent})

    def read_batch(self, groups: Sequence[Group], result: Mapping[str, Any]) -> list[list[Score]]:
        return [
            [self._read(group.prompt, one) for one in row] for group, row in zip(groups, result["scores"], strict=True)
        ]

    def _read(self, prompt: Prompt, result: Mapping[str, Any]) -> Score:
        if "error" in result:
            return Score.failed(str(result["error"]))
        try:
            return self.read(prompt, result)
        except ValueError as problem:
            return Score.failed(f"ValueError: {problem}")
