"""What needs torch or weights: the decisions about the tokens of a completion, in a process of its own.

The server itself stays small, and a model that is loaded for `--recompute` is not in it.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

if TYPE_CHECKING:
    from proxima.lab.stored_tokens import StoredTokens

READ = (
    "tokens", "prompt_tokens", "temperature", "outcome", "advantage", "token_advantage", "log_prob", "keep", "entropy",
    "behavior_log_prob", "next_log_prob", "policy_version", "top_k", "top_k_log_prob", "sampled",
)  # fmt: skip
KEPT = 4  # completions whose words may be asked for


@dataclass(frozen=True, kw_only=True)
class ExplainedTokens:
    """Args: problem: why there are no reasons; empty: there are. columns: [T] by name; band: what the surrogate says of
    its own ones. alternatives: ids and log-probs [T, K] that were recomputed."""

    problem: str
    columns: Mapping[str, NDArray[Any]]
    band: Mapping[str, Any] | None = None
    alternatives: tuple[NDArray[Any], NDArray[Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class ExplainedRow:
    """A completion as it is sent: where it is, its row, and the run's recipe; `folder` is that of the run, if its
    weights are to compute what is not stored."""

    place: tuple[Any, ...]
    row: Mapping[str, Any]
    recipe: Mapping[str, Any]
    step: int
    folder: str | None = None


_STORED: dict[tuple[Any, ...], tuple["StoredTokens", Any]] = {}  # in the process that computes
_WEIGHTS: dict[str, Any] = {}


def explain_tokens(asked: ExplainedRow) -> ExplainedTokens:
    """The columns that follow from a row."""
    from proxima.lab.stored_tokens import LossSpecs, StoredTokens

    found = {} if asked.folder is None else _recomputed(asked.folder)(asked.step, asked.row)
    alternatives = found.pop("alternatives", None)
    stored = StoredTokens(row=asked.row, specs=LossSpecs.of(asked.recipe), step=asked.step, recomputed=found)
    reasons, columns = stored.reasons(), dict(found)
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
    """One token in words."""
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


def _begin() -> None:
    """Imports what the first question needs. The process ends with the server, however that ends, and not before."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_server, daemon=True).start()
    import torch

    import proxima.lab.stored_tokens  # noqa: F401

    torch.set_num_threads(1)  # the others are the training's


def _end_with_server() -> None:
    server = multiprocessing.parent_process()
    assert server is not None
    server.join()
    os._exit(0)


def here(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls in this process."""
    return function(*arguments)


@dataclass(eq=False)
class TokenProcess:
    """Calls `explain_tokens` and `reason` in another process, which begins with the server."""

    _pool: ProcessPoolExecutor | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self.begin().submit(function, *arguments).result()
        except BrokenProcessPool:  # killed for its memory, it may be: the next question begins another
            self.end()
            raise

    def begin(self) -> ProcessPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_begin)
                self._pool.submit(here, str)
            return self._pool

    def end(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
