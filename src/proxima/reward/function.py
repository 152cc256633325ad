"""Your own Python function."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from proxima.data import Completion, Prompt, Score
from proxima.reward.base import Job, PooledReward, Where
from proxima.reward.graders import load_function


@dataclass(frozen=True, kw_only=True)
class Function(PooledReward):
    """What your function `fn(prompt, completion)` returns, called once a completion in a worker process of its own.

    It gets a `proxima.data.Prompt` and a `Completion` and returns a number, a bool, a `Score`, or a dict with `value`, optionally
    `correct`, and any other numbers, which are logged as parts `<name>/<key>`. It may be `async def`. It may raise, hang or crash: that
    costs the one completion. A worker keeps what the module holds in memory from call to call; what it prints goes nowhere.

    Args:
        path: `package.module:function`, or a file as `./my_reward.py:function`.
        weight: factor of the value in the sum of the rewards.
        name: key among the parts; none: the function's own name.
    Returns: Score as returned; NaN and infinities are failures.
    Raises: ValueError at construction when the module, the file or the function isn't there (the nearest name is given).
    """

    path: str

    kind: ClassVar[str] = "function"
    where: ClassVar[Where] = "function"

    def __post_init__(self) -> None:
        super().__post_init__()
        load_function(self.absolute)

    @property
    def label(self) -> str:
        return self.name or self.path.rpartition(":")[2]

    @property
    def absolute(self) -> str:
        """The path with its file, if it names one, made absolute: workers need not share the working directory."""
        module, _, function = self.path.rpartition(":")
        return f"{Path(module).resolve()}:{function}" if module.endswith(".py") else self.path

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        arguments = {"path": self.absolute, "prompt": asdict(prompt), "completion": asdict(completion)}
        return Job(grader="function", arguments=arguments)
