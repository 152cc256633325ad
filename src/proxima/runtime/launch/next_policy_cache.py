"""Builds the cache of the next policy's log-probs from a config, for a run with `algorithm.proximal: next`."""

from functools import partial
from pathlib import Path

from proxima.config.sections.algorithm_section import AlgorithmConfig
from proxima.data import FieldError
from proxima.engine.executor import Executor
from proxima.rollout.collector import Collector
from proxima.rollout.generator import GroupGenerator
from proxima.runtime.state.pending_files import read_next_policy, write_next_policy
from proxima.training.checkpoint import NEXT_POLICY
from proxima.training.learner import Learner
from proxima.training.next_policy import NextPolicy


def make_next_policy(
    algorithm: AlgorithmConfig, generator: GroupGenerator, collector: Collector, learner: Learner, restored: Path | None
) -> NextPolicy:
    """Build the cache of a run and register its hook; `restored` is the checkpoint that the run resumes from.

    Raises:
        FieldError: the engine can't report completions in flight, or can't score.
    """
    engine, by_engine = generator.engine, algorithm.next_from == "engine"
    assert isinstance(engine, Executor)
    if not engine.capabilities.in_flight:
        remedy = "use local or local_process, or algorithm.proximal=recompute"
        raise FieldError("engine", type(engine.engine).__name__, "can't say what is in flight", remedy=remedy)
    if by_engine and not engine.capabilities.score:
        remedy = "set algorithm.next_from=trainer"
        raise FieldError("engine", type(engine.engine).__name__, "can't score given tokens", remedy=remedy)
    trainer = None if by_engine else partial(learner.compute.run, learner.stack.log_prob)
    entries = () if restored is None else read_next_policy(restored / NEXT_POLICY)
    playing = None if generator.episodes is None else generator.episodes.unfinished
    file = NEXT_POLICY, write_next_policy
    cache = NextPolicy(engine, collector.unconsumed, trainer, entries, file, playing)
    if by_engine:
        engine.register_pre_pause_hook(cache.before_pause)
    return cache
