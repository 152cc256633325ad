"""Rewards that call a Python function of the user's."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from proxima.data import Completion, FieldError, Group, Prompt, Score
from proxima.reward.base import Job, PooledReward
from proxima.reward.workers.graders import load_function


@dataclass(frozen=True, kw_only=True)
class UserFunction(PooledReward):
    """Base of the rewards that call a function of the user's.

    Args:
        path: `package.module:function`, or a file as `./my_reward.py:function`.
        name: key among the parts; null: the function's own name.
    """

    path: str

    where = "function"
    warm_up = "function"
    parameters: ClassVar[tuple[str, ...]] = ()  # what the function is called with

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            function = load_function(self.absolute_path)
        except ValueError as error:
            raise FieldError("path", self.path, str(error)) from error
        try:
            signature = inspect.signature(function)
        except ValueError:  # some functions written in C have no signature: the first call will tell
            return
        try:
            signature.bind(*self.parameters)
        except TypeError as error:
            called = f"names a function that '{self.kind}' calls with ({', '.join(self.parameters)})"
            raise FieldError("path", self.path, f"{called}, and it is defined with {signature}: {error}") from None

    @property
    def label(self) -> str:
        return self.name or self.path.rpartition(":")[2]

    @property
    def absolute_path(self) -> str:
        """`path` with its file, if any, made absolute: workers need not share the working directory."""
        module, _, function = self.path.rpartition(":")
        return f"{Path(module).resolve()}:{function}" if module.endswith(".py") else self.path

    def setup_job(self) -> Job:
        return Job(grader="load", arguments={"path": self.absolute_path})


@dataclass(frozen=True, kw_only=True)
class Function(UserFunction):
    """What your function `fn(prompt, completion)` returns, called once per completion in a worker process of its own.

    It gets a `proxima.data.Prompt` and a `Completion` (its per-token columns are numpy arrays) and returns a number, a
    bool, a `Score`, or a dict with `value`, optionally `correct`, and any other numbers, which are logged as parts
    `<name>/<key>`. It may be `async def`. If it raises, hangs or crashes, that one completion is invalid. Module-level
    state lives as long as the worker; standard output is discarded.

    Returns: Score as returned; NaN and infinities are failures, as value and as part: omit a part without a value.
    Edge cases: a process that the function forks must end by `os._exit`; one that returns is killed. A function that
        writes into the worker's socket invalidates its completion.
    Raises: FieldError at construction when the module, the file or the function does not exist (names the nearest), or
        when the function can't be called with these arguments.
    """

    kind = "function"
    parameters = ("prompt", "completion")

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        arguments = {"path": self.absolute_path, "prompt": prompt.to_json(), "completion": completion.to_json()}
        return Job(grader="function", arguments=arguments)


@dataclass(frozen=True, kw_only=True)
class FunctionBatch(UserFunction):
    """What your function `fn(groups)` returns, called once per generated batch in a worker process of its own.

    It gets a tuple of `proxima.data.Group`, each a prompt with its completions and the scores of the other rewards, and
    returns a list for each group, in the same order, of what `function` may return for each completion. So it can
    rank, normalise or compare over all prompts. It may be `async def`. If it raises, hangs or crashes, all completions
    of the batch are invalid. With dynamic sampling a step may generate several batches; the function is called for
    each.

    Returns: Score as returned; NaN, infinities and numbers beyond any float are failures of the one completion, as
        value and as part.
    Raises: FieldError at construction when the module, the file or the function does not exist (names the nearest), or
        when the function can't be called with these arguments.
    """

    kind = "function_batch"
    parameters = ("groups",)
    whole_batch = True

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

    def parse_batch_result(self, groups: Sequence[Group], result: Mapping[str, Any]) -> list[list[Score]]:
        pairs = zip(groups, result["scores"], strict=True)
        return [[self._parse(group.prompt, returned) for returned in scores] for group, scores in pairs]

    def _parse(self, prompt: Prompt, returned: Mapping[str, Any]) -> Score:
        if "error" in returned:
            return Score.failed(str(returned["error"]))
        try:
            return self.parse_result(prompt, returned)
        except ValueError as error:
            return Score.failed(f"ValueError: {error}")
