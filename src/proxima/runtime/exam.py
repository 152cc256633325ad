"""An evaluation from the command line: one model, some sets of questions, and a folder with everything that came of it.

`open_exams` finds the data and makes the prompts, so that what is wrong with them is said before any weights are read; `examine` loads the
model once, asks set after set, and writes. Figures and formats are those of `proxima.evaluate`.
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

from proxima.data import Group, Prompt
from proxima.engine import ENGINES
from proxima.engine.protocol import Sampling
from proxima.evaluate.figures import check_ks, figures
from proxima.evaluate.results import ENVIRONMENT, FORMAT, RESULT, items_table, questions_sha
from proxima.evaluate.suites import Suite
from proxima.evaluate.votes import voter
from proxima.model import LoadedModel
from proxima.model.load import load_config, load_tokenizer
from proxima.reward import REWARDS
from proxima.reward.runner import RewardRunner
from proxima.runtime.build import EVAL_UID, evaluation_sampling, load_model
from proxima.runtime.clock import Clock, SystemClock
from proxima.runtime.environment import describe_environment
from proxima.runtime.evaluation import Evaluation
from proxima.runtime.files import replacing, write_whole
from proxima.runtime.interrupt import quiet_transformers
from proxima.runtime.observer import NullObserver, Observer
from proxima.runtime.records import dumps
from proxima.task import TASKS
from proxima.task.cursor import Cursor, Draw
from proxima.task.prompts import PromptSource

if TYPE_CHECKING:
    from proxima.config.schema import RunConfig

WEIGHTS = (".bin", ".gguf", ".jinja", ".json", ".model", ".safetensors")  # what a model folder is made of


class ExamObserver(Observer, Protocol):
    """An observer that also hears of the sets of questions."""

    def begins(self, name: str, questions: int, answers: int) -> None:
        """A set is asked next: so many questions, so many answers to be written."""
        ...

    def ends(self, name: str, facts: Mapping[str, Any], seconds: float) -> None:
        """A set is done; `facts` is its part of result.json."""
        ...


class Unwatched(NullObserver):
    """Hears nothing."""

    def begins(self, name: str, questions: int, answers: int) -> None: ...

    def ends(self, name: str, facts: Mapping[str, Any], seconds: float) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Exam:
    """A set of questions, how it is put and how it is judged.

    Args:
        name: file name of its answers, and key in the result.
        task: the questions.
        rewards: who judges.
        sampling, samples: how the answers are drawn, and how many a question.
        limit: questions at most, the first of the data; 0: all.
        data: where the questions come from, for people.
        remedy: what to do where they can't be had; empty: the error says enough.
    """

    name: str
    task: Any
    rewards: tuple[Any, ...]
    sampling: Sampling
    samples: int = 1
    limit: int = 0
    data: str = ""
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class OpenExam:
    """An exam whose questions are ready to be asked.

    Args:
        prompts: those that fit the context; `skipped` do not.
        rows: of the whole data set.
        sampling: that of the exam, with no more tokens than the context has.
        context: tokens that prompt and answer may have together.
    """

    exam: Exam
    prompts: list[Prompt]
    skipped: int
    rows: int
    sampling: Sampling
    context: int


@dataclass(kw_only=True)
class Examined:
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


def of_suite(
    suite: Suite, *, given: Path | None = None, data: Path | None = None, samples: int = 1, limit: int = 0, sampling: Mapping[str, Any]
) -> Exam:
    """The exam of a suite: greedy for one sample, temperature 1 for several, the suite's `max_tokens`; `sampling` holds what differs.

    Raises:
        ValueError: no data at the place given, a reward's package is missing, several samples at temperature 0.
    """
    settings = {"temperature": 0.0 if samples == 1 else 1.0, "max_tokens": suite.max_tokens, **sampling}
    if samples > 1 and settings["temperature"] == 0:
        remedy = "greedy answers are all the same; set --temperature 1, or --samples 1"
        raise ValueError(f"samples={samples} must be 1 at temperature 0: {remedy}")
    task, place = suite.find(given, data)
    return Exam(
        name=suite.name,
        task=task,
        rewards=tuple(suite.judges()),
        sampling=Sampling(**settings),
        samples=samples,
        limit=limit,
        data=place,
        remedy=f"{suite.remedy}, or name a file: --task {suite.name}=PATH",
    )


def of_recipe(config: "RunConfig") -> Exam:
    """The exam that a recipe's `eval` is, judged by its rewards.

    Raises:
        ValueError: it has none.
    """
    if config.eval.task is None:
        raise ValueError("eval.task=None: there is nothing to evaluate; name a task, for example eval.task.kind=gsm8k, or --task gsm8k")
    held_out, name = config.eval, kind_of(config.eval.task)
    return Exam(
        name=name,
        task=held_out.task,
        rewards=tuple(config.reward),
        sampling=evaluation_sampling(config),
        samples=held_out.samples,
        limit=held_out.limit,
        data=str(getattr(held_out.task, "path", "") or name),
    )


def check_folder(folder: Path, *, overwrite: bool = False) -> None:
    """Refuse a folder that holds something, before anything is loaded.

    Raises:
        ValueError: it holds a result and overwrite is not set; it holds something else, or is a file.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; give a folder")
    ours = (folder / RESULT).is_file() or (folder / ENVIRONMENT).is_file()
    if not ours:
        raise ValueError(f"--out {folder} holds files, but no evaluation; give a folder of its own")
    if not overwrite:
        raise ValueError(f"--out {folder} holds an evaluation already; replace it with --overwrite, or give another folder")


def open_exams(config: "RunConfig", exams: Sequence[Exam], ks: Sequence[int] = ()) -> list[OpenExam]:
    """Data and prompts of all exams; needs the tokenizer, no weights.

    Raises:
        ValueError: a k above the samples, data that can't be had, prompts none of which fits; one line each.
    """
    for exam in exams:
        check_ks(ks, exam.samples)
    torch.set_num_threads(config.runtime.threads or torch.get_num_threads())
    opened = [(exam, _rows(config, exam)) for exam in exams]  # a file that isn't there is said before transformers is imported
    with quiet_transformers():
        found = load_config(config.model.path, config.model.revision)
        tokenizer = load_tokenizer(config.model.path, config.model.revision)
    limit = int(getattr(found.get_text_config(), "max_position_embeddings", 0) or 1 << 20)
    context = min(config.model.max_length or limit, limit)
    return [_open(config, exam, rows, tokenizer, context) for exam, rows in opened]


def _rows(config: "RunConfig", exam: Exam) -> Any:
    try:
        return exam.task.rows(config.seed)
    except ValueError as error:
        if not exam.remedy:
            raise
        reason = " ".join(str(error).split()).partition("; without a network")[0]
        raise ValueError(f"{exam.name}: {reason}; {exam.remedy}") from None


def _open(config: "RunConfig", exam: Exam, rows: Any, tokenizer: Any, context: int) -> OpenExam:
    cursor, data = Cursor(len(rows), config.seed, False), config.data
    source = PromptSource(rows, tokenizer, context=context, cursor=cursor, system=data.system, over_length=data.over_length)
    count = min(exam.limit or len(rows), len(rows))
    fitting = [source.prompt(Draw(uid=EVAL_UID + i, index=i, epoch=0)) for i in range(count)]
    prompts = [prompt for prompt in fitting if prompt is not None]
    if not prompts:
        raise ValueError(f"{exam.name}: none of the {count} questions fits a context of {context} tokens; raise model.max_length")
    sampling = exam.sampling if exam.sampling.max_tokens < context else _shorter(exam.sampling, context)
    return OpenExam(exam=exam, prompts=prompts, skipped=count - len(prompts), rows=len(rows), sampling=sampling, context=context)


def _shorter(sampling: Sampling, context: int) -> Sampling:
    return Sampling(**{**vars(sampling), "max_tokens": context - 1})


def examine(
    config: "RunConfig",
    opened: Sequence[OpenExam],
    *,
    ks: Sequence[int] = (),
    folder: Path | None = None,
    overwrite: bool = False,
    observer: ExamObserver | None = None,
    clock: Clock | None = None,
) -> Examined:
    """Ask the model everything, and write what it said.

    Args:
        config: says model, engine, seed, reward time-outs; its tasks and rewards are those of the exams.
        ks: of pass@k and maj@k; empty: powers of two up to the samples.
        folder: a new folder, or with `overwrite` one of an earlier evaluation; None writes nothing.

    Raises:
        ValueError: as `check_folder`, or the model can't be loaded.
    """
    observer, clock = observer or Unwatched(), clock or SystemClock()
    began = clock.now()
    if folder is not None:
        _begin(config, folder, overwrite)
    observer.progress("load", 0, 1, "models")
    with quiet_transformers(), ThreadPoolExecutor(1) as aside:
        hashing = aside.submit(model_sha, config.model.path, config.model.revision)
        loaded = load_model(config)
        engine = config.engine.build(loaded, max_length=opened[0].context)
        done = Examined(result={}, seconds={"load": clock.now() - began}, folder=folder)
        suites: dict[str, Any] = {}
        for one in opened:
            name, start = one.exam.name, clock.now()
            observer.begins(name, len(one.prompts), len(one.prompts) * one.exam.samples)
            done.groups[name] = _ask(config, one, engine, observer)
            suites[name] = _facts(config, one, done.groups[name], ks)
            done.seconds[name] = clock.now() - start
            if folder is not None:
                _write_items(folder, one, done.groups[name])
            observer.ends(name, suites[name], done.seconds[name])
        done.result = {"format": FORMAT, **_whole(config, loaded, hashing.result(), ks), "suites": suites}
    if folder is not None:
        write_whole(folder / ENVIRONMENT, dumps(_environment(config, done), indent=2) + "\n")
        write_whole(folder / RESULT, dumps(done.result, indent=2) + "\n")
    return done


def _begin(config: "RunConfig", folder: Path, overwrite: bool) -> None:
    """An empty folder, marked as ours, so that a second try may replace what a first one left unfinished."""
    check_folder(folder, overwrite=overwrite)
    if folder.exists():
        for entry in folder.iterdir():
            if entry.suffix in (".parquet", ".part") or entry.name in (RESULT, ENVIRONMENT):
                entry.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / ENVIRONMENT, dumps(describe_environment(config.seed), indent=2) + "\n")


def _ask(config: "RunConfig", one: OpenExam, engine: Any, observer: Observer) -> list[Group]:
    rewards = RewardRunner(one.exam.rewards, timeout=config.runtime.reward_timeout, workers=config.runtime.reward_workers)
    rewards.start()
    try:
        evaluation = Evaluation(
            prompts=one.prompts,
            engine=engine,
            rewards=rewards,
            sampling=one.sampling,
            observer=observer,
            seed=config.seed,
            samples=one.exam.samples,
        )
        groups, _ = asyncio.run(evaluation.groups())
        return groups
    finally:
        rewards.close()


def _facts(config: "RunConfig", one: OpenExam, groups: Sequence[Group], ks: Sequence[int]) -> dict[str, Any]:
    """The set's part of result.json."""
    exam = one.exam
    found = figures(groups, samples=exam.samples, ks=ks, find=voter(exam.rewards), seed=config.seed)
    return {
        **found,
        "sampling": asdict(one.sampling),
        "system": config.data.system,
        "task": described(exam.task),
        "rewards": [described(reward) for reward in exam.rewards],
        "data": {
            "source": exam.data,
            "rows": one.rows,
            "limit": exam.limit,
            "skipped": one.skipped,
            "sha256": questions_sha([(prompt.question, prompt.answer) for prompt in one.prompts]),
        },
    }


def kind_of(spec: Any) -> str:
    """The name of a spec's kind."""
    tables: dict[str, type] = {**TASKS, **REWARDS, **ENGINES}
    return next((kind for kind, cls in tables.items() if cls is type(spec)), type(spec).__name__.lower())


def described(spec: Any) -> dict[str, Any]:
    """A spec as its kind and its fields."""
    return {"kind": kind_of(spec), **(asdict(spec) if is_dataclass(spec) and not isinstance(spec, type) else {})}


def _write_items(folder: Path, one: OpenExam, groups: Sequence[Group]) -> None:
    table = items_table(groups, EVAL_UID, voter(one.exam.rewards))
    with replacing(folder / f"{one.exam.name}.parquet") as file:
        pq.write_table(table, file, compression="zstd")


def _whole(config: "RunConfig", loaded: LoadedModel, sha: str | None, ks: Sequence[int]) -> dict[str, Any]:
    model = config.model
    facts = {"path": model.path, "revision": model.revision, "name": loaded.name, "parameters": loaded.parameters, "sha256": sha}
    environment = describe_environment(config.seed)
    packages = {name: version for name in ("math-verify", "sympy") if (version := _version(name)) is not None}
    return {
        "model": facts,
        "seed": config.seed,
        "k": list(ks),
        "engine": described(config.engine),
        "device": str(loaded.model.device),
        "threads": torch.get_num_threads(),
        "versions": {"proxima": environment["proxima"], "python": environment["python"], **environment["packages"], **packages},
    }


def _environment(config: "RunConfig", done: Examined) -> dict[str, Any]:
    """What may differ between two runs of one command."""
    tokens = {name: facts["tokens"] for name, facts in done.result["suites"].items()}
    rates = {name: count / done.seconds[name] if done.seconds[name] else None for name, count in tokens.items()}
    return {**describe_environment(config.seed, done.result["model"]), "seconds": done.seconds, "tokens_per_second": rates}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def model_sha(path: str, revision: str | None = None) -> str | None:
    """SHA-256 of a model: over the names and hashes of its weights, configs and tokenizer files; None where they can't be found.

    A hub name is looked up in the cache, where loading has put it.
    """
    place = Path(path)
    if not place.exists():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, "config.json", revision=revision)
        if not isinstance(found, str):
            return None
        place = Path(found).parent
    files = [place] if place.is_file() else sorted(file for file in place.iterdir() if file.is_file() and file.suffix in WEIGHTS)
    whole = sha256()
    for file in files:
        with file.open("rb") as stream:
            whole.update(f"{file.name} {file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()
