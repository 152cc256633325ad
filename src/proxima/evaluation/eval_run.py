"""An evaluation: one model answers sets of questions, and the result is written to a folder.

The model is loaded once for all sets. The same command writes the same bytes to result.json and the completions; facts
that may differ (time, machine) are in environment.json.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

import pyarrow.parquet as pq
import torch

from proxima.data import UserError
from proxima.data.flow import EVAL_UID, Group
from proxima.data.kinds import Kinds
from proxima.engine import ENGINES
from proxima.engine.engine_selection import computes_here
from proxima.engine.protocol import WeightUpdate, close_engine
from proxima.evaluation.group_metrics import eval_metrics
from proxima.evaluation.question_sets import LoadedSuite
from proxima.evaluation.results import ENVIRONMENT, FORMAT, RESULT, completions_table, questions_sha
from proxima.evaluation.votes import answer_extractor
from proxima.model.chat.template_inputs import current_clock
from proxima.model.compute_thread import ComputeThread
from proxima.model.files import model_files
from proxima.model.pretrained import LoadedModel, without_progress_bars
from proxima.reward import REWARDS
from proxima.rollout.episodes.settings import ENVIRONMENTS_LOG
from proxima.rollout.sources import groups_by_source, rewards_by_source
from proxima.system.atomic_files import atomic_writer, write_atomic
from proxima.system.jsonl import dumps
from proxima.system.machine import describe_environment, package_version
from proxima.task import TASKS

ENGINE_LOG = "engine.log"  # output of a process that the engine starts
LOGS = (ENGINE_LOG, ENVIRONMENTS_LOG)
CONTINUED = "were answered before this command was repeated, and are not asked again"


@dataclass(kw_only=True)
class EvalOutcome:
    """The result of an evaluation."""

    result: dict[str, Any]  # the content of result.json
    seconds: dict[str, float]  # of generation and scoring, by suite; `load`: of the model
    folder: Path  # where it was written
    groups: dict[str, list[Group]] = field(default_factory=dict)  # by suite


class Answers(Protocol):
    """Keeps the answers of an unfinished evaluation, for the next attempt."""

    def begin(self) -> None:
        """Keep what comes."""

    def of(self, suite: str) -> list[Group]:
        """The groups that an earlier attempt has left."""

    def add(self, suite: str, group: Group) -> None:
        """Keep a group."""

    def flush(self) -> None:
        """Keep what was added, from now on."""

    def close(self) -> None:
        """The result is written."""


def check_folder(folder: Path, *, overwrite: bool) -> None:
    """Refuse a folder that contains anything but an unfinished evaluation, which the same command continues.

    Raises:
        UserError: it contains a result and overwrite is not set; it contains something else, or is a file.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise UserError(f"--out {folder} is a file; give a folder")
    if not any((folder / name).is_file() for name in (RESULT, ENVIRONMENT)):
        raise UserError(f"--out {folder} contains files, but no evaluation; give another folder")
    if not overwrite and (folder / RESULT).is_file():
        raise UserError(f"--out {folder} contains an evaluation; replace it with --overwrite, or give another folder")


class EvalObserver:
    """Receives the events of `run_eval`. The methods do nothing; override those that you need."""

    def progress(self, stage: Literal["load", "evaluate"], done: int, total: int, unit: str) -> None:
        """Progress of the loading or of a suite: `done` of `total` `unit`. Called often, so it must be fast."""

    def warning(self, text: str) -> None:
        """A problem that affects the result: what it means and what to do, in one line."""

    def suite_started(self, name: str, questions: int, answers: int) -> None:
        """A suite begins: `answers` completions to `questions` questions."""

    def suite_finished(self, name: str, facts: Mapping[str, Any], seconds: float) -> None:
        """A suite has ended; `facts` is its part of result.json."""


def run_eval(
    config: Any,
    suites: Sequence[LoadedSuite],
    *,
    folder: Path,
    ks: Sequence[int] = (),
    observer: EvalObserver | None = None,
    answers: Answers | None = None,
) -> EvalOutcome:
    """Generate and score answers to all questions, and write them to a folder.

    Args:
        config: an `EvaluateConfig`; tasks and rewards are those of the suites.
        suites: from `load_suites`, at least one.
        folder: one that `check_folder` accepts; an earlier evaluation in it is replaced.
        ks: the k of pass@k and maj@k; empty: powers of two up to the number of samples, and that number.
        observer: None: events are ignored.
        answers: those of an earlier attempt, which are not asked again; None: nothing is kept.

    Raises:
        UserError: the model can't be loaded.
    """
    observer = observer or EvalObserver()
    now = time.monotonic
    started = now()
    _prepare_folder(config, folder)
    if answers is not None:
        answers.begin()
    observer.progress("load", 0, 1, "models")
    with without_progress_bars(), ThreadPoolExecutor(1) as background, ExitStack() as opened:
        sha = background.submit(model_sha, config.model.path, config.model.revision)
        model = replace(config.model.source(config.seed), images=suites[0].images).load()
        compute = ComputeThread()
        log = folder / ENGINE_LOG
        engine, notes = suites[0].engine.build(lambda: model, compute=compute, log=log, seed=config.seed)
        opened.callback(close_engine, engine)
        if not computes_here(config.engine) and engine.capabilities.takes_weights:
            # a server has the weights that it was started with
            compute.serve(engine.publish(WeightUpdate(version=0, module=model.model)))
        outcome = EvalOutcome(result={}, seconds={"load": now() - started}, folder=folder)
        facts: dict[str, Any] = {}
        earlier: dict[str, int] = {}  # tokens of an earlier attempt, by suite
        told = set[str]()
        for note in notes:
            observer.warning(note)
        for loaded in suites:
            name = loaded.suite.name
            start = now()
            questions = loaded.questions
            for note in loaded.notes:
                if note not in told:
                    observer.warning(note)
                told.add(note)
            observer.suite_started(name, len(questions.prompts), len(questions.prompts) * loaded.suite.samples)
            kept = _kept(answers, loaded, observer)
            completions = chain.from_iterable(group.completions for group in kept)
            earlier[name] = sum(completion.generated for completion in completions)
            make = partial(config.runtime.rewards, compute=compute)
            with closing(rewards_by_source(questions.sources, questions.rewards, make)) as rewards:
                rewards.start()
                log = folder / ENVIRONMENTS_LOG
                evaluation = questions.evaluation(engine, rewards, now, observer.progress, log)
                keep = None if answers is None else partial(answers.add, name)
                groups = compute.serve(evaluation.groups(kept, keep))
            if answers is not None:
                answers.flush()
            outcome.groups[name] = groups
            facts[name] = _suite_facts(config, loaded, groups, ks)
            outcome.seconds[name] = now() - start
            extract = answer_extractor(loaded.suite.rewards)
            table = completions_table(groups, EVAL_UID, extract, questions.sources)
            with atomic_writer(folder / f"{name}.parquet") as file:
                pq.write_table(table, file, compression="zstd")
            observer.suite_finished(name, facts[name], outcome.seconds[name])
        outcome.result = {"format": FORMAT, **_run_facts(config, model, sha.result(), ks), "suites": facts}
    tokens = {name: suite["tokens"] - earlier[name] for name, suite in facts.items()}
    _write(outcome, tokens, config.seed)
    if answers is not None:
        answers.close()
    return outcome


def _kept(answers: Answers | None, loaded: LoadedSuite, observer: EvalObserver) -> list[Group]:
    """The groups of a suite that an earlier attempt has left, which the observer is told."""
    if answers is None:
        return []
    kept = answers.of(loaded.suite.name)
    if kept:
        asked = len(loaded.questions.prompts)
        observer.warning(f"{len(kept)} of {asked} questions of {loaded.suite.name} {CONTINUED}")
    return kept


def _write(outcome: EvalOutcome, tokens: Mapping[str, int], seed: int) -> None:
    """Write the result, and what may differ between two runs of one command; `tokens` are those of this one."""
    rates: dict[str, float | None] = {}
    for name, count in tokens.items():
        seconds = outcome.seconds[name]
        rates[name] = count / seconds if seconds else None
    may_differ = {
        **describe_environment(seed, outcome.result["model"]),
        "seconds": outcome.seconds,
        "tokens_per_second": rates,
    }
    write_atomic(outcome.folder / ENVIRONMENT, dumps(may_differ, indent=2) + "\n")
    write_atomic(outcome.folder / RESULT, dumps(outcome.result, indent=2) + "\n")


def asked_in(config: Any, suites: Sequence[LoadedSuite]) -> dict[str, Any]:
    """What decides about the answers of an evaluation, to compare with that of an unfinished one."""
    place = Path(config.model.path)
    files: list[Path] = []
    if place.is_dir():
        files = sorted(place.iterdir())
    elif place.is_file():
        files = [place]
    facts = {file.name: file.stat() for file in files if file.is_file()}
    return {
        "model": {"path": config.model.path, "revision": config.model.revision}
        | {name: [fact.st_size, fact.st_mtime_ns] for name, fact in facts.items()},
        "seed": config.seed,
        "engine": _spec_facts(config.engine, ENGINES),
        "data": asdict(config.data),
        "suites": {loaded.suite.name: _asked_of_suite(loaded) for loaded in suites},
    }


def _asked_of_suite(loaded: LoadedSuite) -> dict[str, Any]:
    suite = loaded.suite
    questions = loaded.questions
    return {
        "task": _spec_facts(suite.task, TASKS),
        "rewards": [_spec_facts(reward, REWARDS) for reward in suite.rewards],
        "sampling": asdict(questions.groups.sampling),
        "samples": suite.samples,
        "questions": questions_sha([(prompt.question, prompt.answer) for prompt in questions.prompts]),
    }


def _prepare_folder(config: Any, folder: Path) -> None:
    """Delete an earlier evaluation from the folder, and mark it so that another attempt may replace an unfinished
    one."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if entry.suffix in (".parquet", ".part") or entry.name in (RESULT, ENVIRONMENT, *LOGS):
            entry.unlink()
    write_atomic(folder / ENVIRONMENT, dumps(describe_environment(config.seed), indent=2) + "\n")


def _suite_facts(config: Any, loaded: LoadedSuite, groups: Sequence[Group], ks: Sequence[int]) -> dict[str, Any]:
    """The suite's part of result.json."""
    suite = loaded.suite
    questions = loaded.questions
    measure = partial(
        eval_metrics, samples=suite.samples, ks=ks, extract=answer_extractor(suite.rewards), seed=config.seed
    )
    facts = measure(groups)
    by_source = groups_by_source(suite.sources, groups)
    if by_source:
        facts["sources"] = {name: measure(of_source) for name, of_source in by_source.items()}
    facts |= {
        "metric": config.eval.metric,
        "sampling": asdict(questions.groups.sampling),
        "system": config.data.system,
        "template_arguments": dict(config.data.template_arguments),
    }
    clock = current_clock()
    if clock is not None and clock.read:
        facts["template_date"] = clock.date
    facts["task"] = _spec_facts(suite.task, TASKS)
    facts["rewards"] = [_spec_facts(reward, REWARDS) for reward in suite.rewards]
    facts["data"] = {
        "source": suite.data,
        "rows": len(questions.rows),
        "limit": suite.limit,
        "skipped": questions.count - len(questions.prompts),
        "sha256": questions_sha([(prompt.question, prompt.answer) for prompt in questions.prompts]),
    }
    return facts


def _spec_facts(spec: Any, table: Kinds) -> dict[str, Any]:
    """A spec as its kind and its fields."""
    facts: dict[str, Any] = {"kind": table.kind_of(spec)}
    if is_dataclass(spec) and not isinstance(spec, type):
        facts |= asdict(spec)
    return facts


def _run_facts(config: Any, loaded: LoadedModel, sha: str | None, ks: Sequence[int]) -> dict[str, Any]:
    """The entries of result.json about model, engine and versions."""
    model = config.model
    environment = describe_environment(config.seed)
    versions = {name: environment[name] for name in ("proxima", "python")} | environment["packages"]
    for parser in ("math-verify", "sympy"):
        version = package_version(parser)
        if version is not None:
            versions[parser] = version
    return {
        "model": {
            "path": model.path,
            "revision": model.revision,
            "name": loaded.name,
            "parameters": loaded.parameters,
            "sha256": sha,
        },
        "seed": config.seed,
        "k": list(ks),
        "engine": _spec_facts(config.engine, ENGINES),
        "device": str(loaded.model.device),
        "threads": torch.get_num_threads(),
        "versions": versions,
    }


def model_sha(path: str, revision: str | None = None) -> str | None:
    """SHA-256 over the names and hashes of `model_files`; None if there are none."""
    files = model_files(path, revision)
    if not files:
        return None
    lines = "".join(f"{name} {value}\n" for name, value in files.items())
    return sha256(lines.encode()).hexdigest()
