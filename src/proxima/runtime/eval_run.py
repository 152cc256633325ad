"""An evaluation from the command line: one model is asked some sets of questions, and what came of it is written to a
folder.

The model is loaded once and asked set after set. Figures and formats are those of `proxima.evaluate`: result.json and
the answers are the same bytes for the same command; what may differ (time, machine) stands in environment.json.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, is_dataclass
from hashlib import file_digest, sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow.parquet as pq
import torch

from proxima.config.describe import kind_of
from proxima.data import Group, UserError
from proxima.data.atomic_files import replacing, write_whole
from proxima.data.jsonl import dumps
from proxima.engine.protocol import EngineSetup
from proxima.evaluate.eval_metrics import eval_metrics
from proxima.evaluate.results import ENVIRONMENT, FORMAT, RESULT, completions_table, questions_sha
from proxima.evaluate.votes import answer_extractor
from proxima.model import LoadedModel
from proxima.reward.runner import RewardRunner
from proxima.rollout.generator import GroupGenerator, GroupSpec
from proxima.runtime.build import EVAL_UID, load_model
from proxima.runtime.clock import Clock, SystemClock
from proxima.runtime.environment import describe_environment
from proxima.runtime.eval_suites import LoadedSuite
from proxima.runtime.held_out import Evaluation
from proxima.runtime.interrupt import quiet_transformers
from proxima.runtime.observer import NullObserver, Observer

if TYPE_CHECKING:
    from proxima.config.schema import EvaluateConfig

WEIGHTS = (".bin", ".gguf", ".jinja", ".json", ".model", ".safetensors")  # what a model folder is made of


class EvalObserver(Observer, Protocol):
    """An observer that also hears of the sets of questions."""

    def suite_started(self, name: str, questions: int, answers: int) -> None:
        """A set is asked next: so many questions, so many answers to be written."""
        ...

    def suite_finished(self, name: str, facts: Mapping[str, Any], seconds: float) -> None:
        """A set is done; `facts` is its part of result.json."""
        ...


class NullEvalObserver(NullObserver):
    """Hears nothing."""

    def suite_started(self, name: str, questions: int, answers: int) -> None: ...

    def suite_finished(self, name: str, facts: Mapping[str, Any], seconds: float) -> None: ...


@dataclass(kw_only=True)
class EvalOutcome:
    """What came of it.

    Args:
        result: what result.json holds.
        seconds: by set, generation and scoring; `load` for the model.
        groups: by set.
        folder: where it was written; None: nowhere.
    """

    result: dict[str, Any]
    seconds: dict[str, float]
    groups: dict[str, list[Group]] = field(default_factory=dict)
    folder: Path | None = None


def check_folder(folder: Path, *, overwrite: bool = False) -> None:
    """Refuse a folder that holds something, before anything is loaded.

    Raises:
        ValueError: it holds a result and overwrite is not set; it holds something else, or is a file.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise UserError(f"--out {folder} is a file; give a folder")
    ours = (folder / RESULT).is_file() or (folder / ENVIRONMENT).is_file()
    if not ours:
        raise UserError(f"--out {folder} holds files, but no evaluation; give a folder of its own")
    if not overwrite:
        raise UserError(
            f"--out {folder} holds an evaluation already; replace it with --overwrite, or give another folder"
        )


def run_eval(
    config: "EvaluateConfig",
    loaded_suites: Sequence[LoadedSuite],
    *,
    ks: Sequence[int] = (),
    folder: Path | None = None,
    overwrite: bool = False,
    observer: EvalObserver | None = None,
    clock: Clock | None = None,
) -> EvalOutcome:
    """Ask the model everything, and write what it said.

    Args:
        config: says model, engine, seed, reward time-outs; its tasks and rewards are those of the tasks.
        ks: of pass@k and maj@k; empty: powers of two up to the samples.
        folder: a new folder, or with `overwrite` item of an earlier evaluation; None writes nothing.

    Raises:
        ValueError: as `check_folder`, or the model can't be loaded.
    """
    observer, clock = observer or NullEvalObserver(), clock or SystemClock()
    began = clock.now()
    if folder is not None:
        _begin(config, folder, overwrite)
    observer.progress("load", 0, 1, "models")
    with quiet_transformers(), ThreadPoolExecutor(1) as aside:
        hashing = aside.submit(model_sha, config.model.path, config.model.revision)
        loaded = load_model(config)
        engine = config.engine.build(EngineSetup.of(loaded, max_length=loaded_suites[0].context))
        done = EvalOutcome(result={}, seconds={"load": clock.now() - began}, folder=folder)
        suites: dict[str, Any] = {}
        for item in loaded_suites:
            name, start = item.suite.name, clock.now()
            for note in item.notes:
                observer.warning(note)
            observer.suite_started(name, len(item.prompts), len(item.prompts) * item.suite.samples)
            done.groups[name] = _ask(config, item, engine, observer, clock)
            suites[name] = _facts(config, item, done.groups[name], ks)
            done.seconds[name] = clock.now() - start
            if folder is not None:
                _write_items(folder, item, done.groups[name])
            observer.suite_finished(name, suites[name], done.seconds[name])
        done.result = {"format": FORMAT, **_whole(config, loaded, hashing.result(), ks), "suites": suites}
    if folder is not None:
        write_whole(folder / ENVIRONMENT, dumps(_environment(config, done), indent=2) + "\n")
        write_whole(folder / RESULT, dumps(done.result, indent=2) + "\n")
    return done


def _begin(config: "EvaluateConfig", folder: Path, overwrite: bool) -> None:
    """An empty folder, marked as ours, so that a second try may replace what a first one left unfinished."""
    check_folder(folder, overwrite=overwrite)
    if folder.exists():
        for entry in folder.iterdir():
            if entry.suffix in (".parquet", ".part") or entry.name in (RESULT, ENVIRONMENT):
                entry.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / ENVIRONMENT, dumps(describe_environment(config.seed), indent=2) + "\n")


def _ask(config: "EvaluateConfig", loaded: LoadedSuite, engine: Any, observer: Observer, clock: Clock) -> list[Group]:
    rewards = RewardRunner(
        loaded.suite.rewards, timeout=config.runtime.reward_timeout, workers=config.runtime.reward_workers
    )
    rewards.start()
    try:
        spec = GroupSpec(sampling=loaded.sampling, completions=loaded.suite.samples, seed=config.seed)
        generator = GroupGenerator(engine, rewards, spec, clock.now)
        return asyncio.run(Evaluation(loaded.prompts, generator, observer).groups())
    finally:
        rewards.close()


def _facts(config: "EvaluateConfig", loaded: LoadedSuite, groups: Sequence[Group], ks: Sequence[int]) -> dict[str, Any]:
    """The set's part of result.json."""
    suite = loaded.suite
    found = eval_metrics(
        groups, samples=suite.samples, ks=ks, extract=answer_extractor(suite.rewards), seed=config.seed
    )
    return {
        **found,
        "sampling": asdict(loaded.sampling),
        "system": config.data.system,
        "task": described(suite.task),
        "rewards": [described(reward) for reward in suite.rewards],
        "data": {
            "source": suite.data,
            "rows": loaded.rows,
            "limit": suite.limit,
            "skipped": loaded.skipped,
            "sha256": questions_sha([(prompt.question, prompt.answer) for prompt in loaded.prompts]),
        },
    }


def described(spec: Any) -> dict[str, Any]:
    """A spec as its kind and its fields."""
    return {"kind": kind_of(spec), **(asdict(spec) if is_dataclass(spec) and not isinstance(spec, type) else {})}


def _write_items(folder: Path, loaded: LoadedSuite, groups: Sequence[Group]) -> None:
    table = completions_table(groups, EVAL_UID, answer_extractor(loaded.suite.rewards))
    with replacing(folder / f"{loaded.suite.name}.parquet") as file:
        pq.write_table(table, file, compression="zstd")


def _whole(config: "EvaluateConfig", loaded: LoadedModel, sha: str | None, ks: Sequence[int]) -> dict[str, Any]:
    model = config.model
    facts = {
        "path": model.path,
        "revision": model.revision,
        "name": loaded.name,
        "parameters": loaded.parameters,
        "sha256": sha,
    }
    environment = describe_environment(config.seed)
    packages = {name: version for name in ("math-verify", "sympy") if (version := _version(name)) is not None}
    return {
        "model": facts,
        "seed": config.seed,
        "k": list(ks),
        "engine": described(config.engine),
        "device": str(loaded.model.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "proxima": environment["proxima"],
            "python": environment["python"],
            **environment["packages"],
            **packages,
        },
    }


def _environment(config: "EvaluateConfig", done: EvalOutcome) -> dict[str, Any]:
    """What may differ between two runs of one command."""
    tokens = {name: facts["tokens"] for name, facts in done.result["suites"].items()}
    rates = {name: count / done.seconds[name] if done.seconds[name] else None for name, count in tokens.items()}
    return {
        **describe_environment(config.seed, done.result["model"]),
        "seconds": done.seconds,
        "tokens_per_second": rates,
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def model_sha(path: str, revision: str | None = None) -> str | None:
    """SHA-256 of a model: over the names and hashes of its weights, configs and tokenizer files; None where they can't
    be found.

    A hub name is looked up in the cache, where loading has put it.
    """
    place = Path(path)
    if not place.exists():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, "config.json", revision=revision)
        if not isinstance(found, str):
            return None
        place = Path(found).parent
    files = (
        [place]
        if place.is_file()
        else sorted(file for file in place.iterdir() if file.is_file() and file.suffix in WEIGHTS)
    )
    whole = sha256()
    for file in files:
        with file.open("rb") as stream:
            whole.update(f"{file.name} {file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()
