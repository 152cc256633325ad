"""The decisions about the tokens of a completion, which need torch or weights, computed in a separate process.

This keeps the server small: a model that is loaded for `--recompute` is not in the server's process.
"""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from proxima.view.microscope.resident_memory import one_arena, release_memory

if TYPE_CHECKING:
    from proxima.experiments.stored_tokens import StoredTokens

READ = (
    "tokens", "prompt_tokens", "temperature", "outcome", "advantage", "token_advantage", "log_prob", "keep", "entropy",
    "behavior_log_prob", "next_log_prob", "proximal_log_prob", "policy_version", "sampled", "selected",
    "top_k_divergence",
)  # fmt: skip
KEPT = 2  # completions kept to explain their tokens


@dataclass(frozen=True, kw_only=True)
class ExplainedTokens:
    """Args: problem: why there are no reasons; empty: there are. columns: [T] by name; band: the surrogate's
    description of its own columns. alternatives: recomputed ids and log-probs [T, K]."""

    problem: str
    columns: Mapping[str, NDArray[Any]]
    band: Mapping[str, Any] | None = None
    alternatives: tuple[NDArray[Any], NDArray[Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class ExplainedRow:
    """A completion as it is sent to the process: its place, its row, and the run's recipe. `folder` is that of the run,
    if its weights are to compute columns that are not stored."""

    place: tuple[Any, ...]
    row: Mapping[str, Any]
    recipe: Mapping[str, Any]
    step: int
    folder: str | None = None


_STORED: dict[tuple[Any, ...], tuple["StoredTokens", Any]] = {}  # in the computing process
_WEIGHTS: dict[str, Any] = {}


def explain_tokens(asked: ExplainedRow) -> ExplainedTokens:
    """Compute the columns that derive from a row."""
    from proxima.experiments.stored_tokens import LossSpecs, StoredTokens

    recomputed = {} if asked.folder is None else _recomputed(asked.folder)(asked.step, asked.row)
    alternatives = recomputed.pop("alternatives", None)
    stored = StoredTokens(row=asked.row, specs=LossSpecs.of(asked.recipe), step=asked.step, recomputed=recomputed)
    reasons, columns = stored.reasons(), dict(recomputed)
    _STORED[asked.place] = stored, reasons
    while len(_STORED) > KEPT:
        del _STORED[next(iter(_STORED))]
    if (proximal := stored.proximal_log_prob) is not None:
        columns["proximal_log_prob"] = proximal.numpy()
    if reasons is None:
        return ExplainedTokens(problem=stored.problem(), columns=columns, alternatives=alternatives)
    columns["loss_weight"] = reasons.weight.numpy()
    drawn = {} if reasons.band is None else reasons.band.drawn()
    columns |= {name: values.detach().numpy() for name, values in drawn.items()}
    about = (
        None if reasons.band is None else {"title": reasons.band.title, "names": [*drawn], "note": reasons.band.note}
    )
    return ExplainedTokens(problem="", columns=columns, band=about, alternatives=alternatives)


def reason(asked: ExplainedRow, token: int) -> str:
    """Explain one token in words."""
    if asked.place not in _STORED:
        explain_tokens(asked)
    stored, reasons = _STORED[asked.place]
    return stored.problem() if reasons is None else str(reasons.reason(token))


def _recomputed(folder: str) -> Any:
    from proxima.runtime.state.folder import RunFolder
    from proxima.view.microscope.recomputed_columns import RecomputedColumns
    from proxima.view.microscope.viewed_run import ViewedRun

    if folder not in _WEIGHTS:
        _WEIGHTS.clear()
        _WEIGHTS[folder] = RecomputedColumns(ViewedRun(0, RunFolder(folder)))
    return _WEIGHTS[folder]


def answer_questions() -> None:
    """Run the process: answer until the channel is closed, which it is when the server ends, however that happens."""
    one_arena()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Connection(int(sys.argv[1]))
    import torch

    import proxima.experiments.stored_tokens  # noqa: F401

    torch.set_num_threads(1)  # leave the other cores to training
    release_memory()
    while True:
        try:
            function, arguments = channel.recv()
        except EOFError:
            return
        try:
            answer = function(*arguments)
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        channel.send(answer)
        release_memory()


def here(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function in this process."""
    return function(*arguments)


@dataclass(eq=False)
class TokenProcess:
    """Calls `explain_tokens` and `reason` in another process, which starts with the server. Each side unpickles only
    messages from the other; no third party can write to the channel. One thread at a time asks, the server's reader."""

    _process: subprocess.Popen[bytes] | None = None
    _channel: Connection | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        channel = self.begin()
        try:
            channel.send((function, arguments))
            answer = channel.recv()
        except (OSError, EOFError) as error:  # perhaps killed, out of memory: the next question starts another
            self.end()
            raise RuntimeError("the process that explains tokens has ended; ask again") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def begin(self) -> Connection:
        """Return the channel, starting the process if necessary."""
        if self._channel is None:
            ours, theirs = socket.socketpair()
            with theirs:  # not `start_module`: the thread that asks may end long before the server does
                command = [sys.executable, "-m", __name__, str(theirs.fileno())]
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            self._channel = Connection(ours.detach())
        return self._channel

    def end(self) -> None:
        if self._process is not None and self._channel is not None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
        self._process = self._channel = None


if __name__ == "__main__":
    answer_questions()
