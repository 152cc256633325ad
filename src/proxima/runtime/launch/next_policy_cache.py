"""Builds the cache of the next policy's log-probs from a config, for a run with `algorithm.proximal: next`."""

from collections.abc import Iterable

from proxima.config.sections.algorithm_section import AlgorithmConfig
from proxima.data import FieldError
from proxima.engine.executor import Executor
from proxima.engine.protocol import Engine
from proxima.runtime.state.pending_files import write_next_policy
from proxima.train.checkpoint import NEXT_POLICY
from proxima.train.next_policy import LogProbs, NextLogProbs, NextPolicy, Playing, Unconsumed


def make_next_policy(
    algorithm: AlgorithmConfig,
    engine: Engine,
    unconsumed: Unconsumed,
    trainer: LogProbs,
    entries: Iterable[NextLogProbs],
    playing: Playing | None = None,
) -> NextPolicy:
    """Build the cache of a run and register its hook.

    Raises:
        FieldError: the engine can't report completions in flight, or can't score.
    """
    assert isinstance(engine, Executor)
    by_engine = algorithm.next_from == "engine"
    if not engine.capabilities.in_flight:
        remedy = "use local or local_process, or algorithm.proximal=recompute"
        raise FieldError("engine", type(engine.engine).__name__, "can't say what is in flight", remedy=remedy)
    if by_engine and not engine.capabilities.score:
        remedy = "set algorithm.next_from=trainer"
        raise FieldError("engine", type(engine.engine).__name__, "can't score given tokens", remedy=remedy)
    file = NEXT_POLICY, write_next_policy
    cache = NextPolicy(engine, unconsumed, None if by_engine else trainer, entries, file, playing)
    if by_engine:
        engine.register_pre_pause_hook(cache.before_pause)
    return cache
