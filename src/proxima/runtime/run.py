"""A run from its config: check, open, load, build, loop, summarise. What `proxima train`, `eval`, `generate` and `export` call."""

import asyncio
import json
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from proxima import __version__
from proxima.data import Completion, Message, Prompt
from proxima.engine.protocol import Request, Sampling
from proxima.model import LoadedModel, Policy, load
from proxima.model.load import DTYPES, load_config, load_tokenizer
from proxima.reward.runner import RewardRunner
from proxima.runtime.algorithm import Algorithm
from proxima.runtime.clock import Clock, SystemClock
from proxima.runtime.controller import Controller, Plan
from proxima.runtime.environment import describe_environment
from proxima.runtime.evaluation import Evaluation
from proxima.runtime.folder import RunFolder
from proxima.runtime.frozen import check_frozen
from proxima.runtime.journal import Journal
from proxima.runtime.observer import NullObserver, Observer, RunInfo
from proxima.task.cursor import Cursor, Draw
from proxima.task.prompts import PromptSource
from proxima.train import Trainer
from proxima.train.checkpoint import Checkpoint, checkpoints, restore

if TYPE_CHECKING:
    from proxima.config import Resolved
    from proxima.config.schema import RunConfig

SURVEYED = 2000  # rows whose length is looked at before the run
EVAL_UID = 1 << 40  # uids of held-out questions begin here: their draws are never those of training


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What summary.json holds. `status` is `done`, `stopped` (Ctrl-C; a checkpoint is there) or `failed`."""

    status: str
    steps: int
    seconds: float
    model: str
    seed: int
    algorithm: str
    folder: str
    eval: Mapping[str, Any] = field(default_factory=dict)
    tokens_per_second: Mapping[str, float] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    error: str | None = None


def train(
    config: "RunConfig",
    *,
    resolved: "Resolved | None" = None,
    resume: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
    clock: Clock | None = None,
) -> Summary:
    """Train as the config says; everything the run leaves is in its folder.

    Args:
        resolved: the config with provenance, for config.yaml; None writes it without.
        resume: go on with the run in the folder, from its last whole checkpoint; begins one where there is none.
        overwrite: delete the run in the folder first.

    Raises:
        ValueError: something about config, data, folder or model, in one line, before weights are loaded wherever that is possible.
    """
    observer, clock = observer or NullObserver(), clock or SystemClock()
    folder = RunFolder(_folder_of(config, resolved, clock))
    folder.check(resume=resume, overwrite=overwrite)
    with _quiet_transformers():
        opened = _open(config)  # tokenizer and data: their errors come before the folder is touched and the weights are read
        resuming = folder.begin(resume=resume, overwrite=overwrite)
        try:
            return asyncio.run(_train(config, resolved, opened, folder, resuming, observer, clock))
        finally:
            folder.release()


@dataclass(kw_only=True)
class _Opened:
    """What can be known without weights."""

    tokenizer: Any
    source: PromptSource
    held_out: list[Prompt]
    max_length: int
    notes: list[str]


def _open(config: "RunConfig") -> _Opened:
    torch.set_num_threads(config.runtime.threads or torch.get_num_threads())
    model_config = load_config(config.model.path, config.model.revision)
    tokenizer = load_tokenizer(config.model.path, config.model.revision)
    limit = int(getattr(model_config.get_text_config(), "max_position_embeddings", 0) or 1 << 20)
    max_length = min(config.model.max_length or limit, limit)
    source, notes = _source(config, config.task, tokenizer, max_length, shuffle=config.data.shuffle)
    held_out: list[Prompt] = []
    if config.eval.task is not None:
        held, more = _source(config, config.eval.task, tokenizer, max_length, shuffle=False)
        notes += more
        count = min(config.eval.limit or len(held.rows), len(held.rows))
        fitting = (held.prompt(Draw(uid=EVAL_UID + i, index=i, epoch=0)) for i in range(count))
        held_out = [prompt for prompt in fitting if prompt is not None]
    return _Opened(tokenizer=tokenizer, source=source, held_out=held_out, max_length=max_length, notes=notes)


def _source(config: "RunConfig", task: Any, tokenizer: Any, max_length: int, *, shuffle: bool) -> tuple[PromptSource, list[str]]:
    """Prompts of a task in order, and what a person should know of them."""
    rows = task.rows(config.seed)
    cursor = Cursor(len(rows), config.seed, shuffle)
    data = config.data
    source = PromptSource(rows, tokenizer, context=max_length, cursor=cursor, system=data.system, over_length=data.over_length)
    too_long = source.survey(SURVEYED)
    if not too_long:
        return source, []
    note = f"{too_long} of {min(SURVEYED, len(rows))} prompts leave no room for a token in a context of {max_length} and are skipped"
    return source, [f"{note}; shorten them or raise model.max_length"]


async def _train(
    config: "RunConfig",
    resolved: "Resolved | None",
    opened: _Opened,
    folder: RunFolder,
    resuming: bool,
    observer: Observer,
    clock: Clock,
) -> Summary:
    journal = Journal(folder.journal, clock)
    check_frozen(journal, config)
    whole = checkpoints(folder.checkpoints) if resuming else []
    checkpoint = whole[-1] if whole else None
    step = checkpoint.step if checkpoint else 0
    if resuming:
        journal.rewind(step)
        folder.rewind(step)
        if checkpoint:
            opened.source.load(checkpoint.facts["cursor"])
    if resolved is not None:
        from proxima.config.dump import dump

        folder.write_config(dump(resolved))
    observer.progress("load", 0, 1, "models")
    path = str(checkpoint.model) if checkpoint else config.model.path
    loaded = load(
        path, revision=None if checkpoint else config.model.revision, dtype=DTYPES[config.model.dtype], device=config.model.device
    )
    controller = _controller(config, loaded, opened, folder, journal, observer, clock)
    if checkpoint:
        restore(checkpoint, controller.trainer)
    facts = {"path": config.model.path, "revision": config.model.revision, "parameters": loaded.parameters}
    folder.write_environment(describe_environment(config.seed, facts))
    observer.started(_info(config, loaded, folder, step, len(opened.held_out)))
    for text in opened.notes:
        observer.warning(text)
    status, error = "failed", None
    try:
        with _stop_on_interrupt(controller):
            status = "done" if await controller.run() else "stopped"
    except BaseException as problem:
        error = f"{type(problem).__name__}: {problem}"
        raise
    finally:
        controller.rewards.close()
        summary = _summary(config, folder, journal, status, controller.now(), error)
        folder.write_summary(asdict(summary))
        journal.close()
        observer.finished(asdict(summary))
    return summary


def _controller(
    config: "RunConfig",
    loaded: LoadedModel,
    opened: _Opened,
    folder: RunFolder,
    journal: Journal,
    observer: Observer,
    clock: Clock,
) -> Controller:
    train, algorithm = config.train, config.algorithm
    policy = make_policy(config, loaded)
    penalty = algorithm.reference_kl
    reference = None
    if penalty is not None and penalty.coefficient > 0:
        frozen = load(config.model.path, revision=config.model.revision, dtype=DTYPES[config.model.dtype], device=config.model.device)
        frozen.model.requires_grad_(False)
        reference = make_policy(config, frozen)
    recompute = algorithm.proximal == "recompute"
    updates = train.updates_per_step * train.epochs_per_step
    trainer = Trainer(
        policy,
        surrogate=algorithm.surrogate,
        aggregate=algorithm.aggregate,
        penalties=() if reference is None else (penalty,),
        optimizer=train.optimizer,
        total_updates=train.steps * updates,
        warmup=train.warmup_steps,
        schedule=train.schedule,
        final_lr_ratio=train.final_lr_ratio,
        max_grad_norm=train.max_grad_norm,
        tokens_per_micro_batch=train.tokens_per_micro_batch,
        skip_zero_advantage=algorithm.skip_zero_advantage,
        proximal_is_first_forward=recompute and updates == 1,
    )
    engine = config.engine.build(loaded, max_length=opened.max_length)
    rewards = RewardRunner(config.reward, timeout=config.runtime.reward_timeout, workers=config.runtime.reward_workers)
    evaluation = None
    if opened.held_out:
        evaluation = Evaluation(
            prompts=opened.held_out,
            engine=engine,
            rewards=rewards,
            sampling=evaluation_sampling(config),
            observer=observer,
            seed=config.seed,
            samples=config.eval.samples,
            folder=folder,
        )
    return Controller(
        plan=Plan(
            steps=train.steps,
            prompts_per_step=train.prompts_per_step,
            completions_per_prompt=train.completions_per_prompt,
            sampling=config.sampling,
            seed=config.seed,
            evaluate_every=config.eval.every,
            evaluate_before=config.eval.before,
            evaluate_after=config.eval.after,
            checkpoint_every=config.checkpoint.every,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
            recompute_proximal=recompute,
        ),
        source=opened.source,
        engine=engine,
        rewards=rewards,
        algorithm=Algorithm(
            advantage=algorithm.advantage,
            selection=algorithm.selection,
            behavior=algorithm.behavior,
            updates=train.updates_per_step,
            epochs=train.epochs_per_step,
            seed=config.seed,
        ),
        policy=policy,
        trainer=trainer,
        reference=reference,
        evaluation=evaluation,
        journal=journal,
        folder=folder,
        clock=clock,
        observer=observer,
        elapsed=folder.elapsed(),
    )


def make_policy(config: "RunConfig", loaded: LoadedModel) -> Policy:
    """The policy of a config over loaded weights."""
    return Policy(
        loaded,
        attention=config.model.attention,
        share_prompt=config.model.share_prompt,
        compute_dtype=DTYPES[config.model.compute_dtype],
        log_prob_chunk=config.model.log_prob_chunk,
        gradient_checkpointing=config.model.gradient_checkpointing,
    )


def evaluation_sampling(config: "RunConfig") -> Sampling:
    """`eval.sampling`, or greedy with the length and stop strings of the training."""
    return config.eval.sampling or Sampling(temperature=0.0, max_tokens=config.sampling.max_tokens, stop=config.sampling.stop)


def evaluate(config: "RunConfig", *, observer: Observer | None = None, clock: Clock | None = None) -> dict[str, Any]:
    """Evaluate `config.model` on `config.eval`; nothing is written.

    Returns: the record (accuracy, correct, questions …), and `groups`, a list of `Group` with every answer.

    Raises:
        ValueError: no held-out task, or as `train`.
    """
    observer, clock = observer or NullObserver(), clock or SystemClock()
    if config.eval.task is None:
        raise ValueError("eval.task=None: there is nothing to evaluate; name a task, for example eval.task.kind=gsm8k")
    with _quiet_transformers():
        opened = _open(config)
        loaded = load(config.model.path, revision=config.model.revision, dtype=DTYPES[config.model.dtype], device=config.model.device)
        rewards = RewardRunner(config.reward, timeout=config.runtime.reward_timeout, workers=config.runtime.reward_workers)
        try:
            evaluation = Evaluation(
                prompts=opened.held_out,
                engine=config.engine.build(loaded, max_length=opened.max_length),
                rewards=rewards,
                sampling=evaluation_sampling(config),
                observer=observer,
                seed=config.seed,
                samples=config.eval.samples,
            )
            began = clock.now()
            groups = asyncio.run(evaluation.groups())
        finally:
            rewards.close()
    from proxima.runtime.evaluation import summarise

    return {"kind": "eval", "model": config.model.path, "seconds": clock.now() - began, **summarise(groups), "groups": groups}


def generate(
    path: str,
    questions: Sequence[str],
    *,
    sampling: Sampling,
    samples: int = 1,
    system: str | None = None,
    seed: int = 0,
    dtype: str = "bfloat16",
    device: str = "auto",
) -> tuple[list[Completion], float]:
    """Answers of a model (a path, or a run folder's last checkpoint) through the local engine.

    Returns: `samples` completions for each question, in order, and the seconds that generation took.
    """
    from proxima.engine.local import LocalEngine, collect
    from proxima.task.prompts import prompt_tokens

    with _quiet_transformers():
        loaded = load(path, dtype=torch.float32, device=device)
    chats: list[tuple[Message, ...]] = [_chat(question, system) for question in questions]
    prompts = [Prompt(uid=i, messages=chat, tokens=prompt_tokens(chat, loaded.tokenizer)) for i, chat in enumerate(chats)]
    engine = LocalEngine(loaded, dtype=DTYPES[dtype])
    requests = [Request(prompt=p, sample=s, sampling=sampling, seed=seed) for p in prompts for s in range(samples)]
    clock = SystemClock()
    began = clock.now()
    completions = asyncio.run(collect(engine, requests))
    return completions, clock.now() - began


def _chat(question: str, system: str | None) -> tuple[Message, ...]:
    user: Message = {"role": "user", "content": question}
    return (user,) if system is None else ({"role": "system", "content": system}, user)


def find_checkpoint(run: str | Path, which: str = "last") -> Checkpoint:
    """A run's checkpoint: `last`, `best` (by held-out accuracy), or a step's number.

    Raises:
        ValueError: the folder holds no run, no checkpoint, or not that one; lists those there are.
    """
    folder = RunFolder(run)
    found = checkpoints(folder.checkpoints)
    if not found:
        raise ValueError(f"{run} holds no checkpoint; give a run folder that `proxima train` has written")
    if which == "last":
        return found[-1]
    if which == "best":
        scores = {r["step"]: r["accuracy"] for r in folder.read_metrics() if r["kind"] == "eval" and r.get("accuracy") is not None}
        scored = [c for c in found if c.step in scores]
        if not scored:
            raise ValueError(f"{run}: no checkpoint was evaluated, so none is best; take last, or a step of {[c.step for c in found]}")
        return max(scored, key=lambda c: (scores[c.step], -c.step))
    wanted = [c for c in found if str(c.step) == which.lstrip("0")]
    if not wanted:
        raise ValueError(f"{run}: no checkpoint {which!r}; there are {[c.step for c in found]}, last and best")
    return wanted[0]


def export(run: str | Path, out: str | Path, *, which: str = "last") -> Path:
    """Copy a checkpoint's model to `out`, a folder that `AutoModelForCausalLM` loads; written aside, then renamed.

    Raises:
        ValueError: no such checkpoint, or `out` exists.
    """
    source, target = find_checkpoint(run, which).model, Path(out)
    if target.exists():
        raise ValueError(f"{target} exists already; give a new folder")
    aside = target.with_name(f".{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, aside)
    aside.rename(target)
    return target


def _folder_of(config: "RunConfig", resolved: "Resolved | None", clock: Clock) -> Path:
    if config.folder:
        return Path(config.folder).expanduser()
    name = Path(resolved.recipe).stem if resolved is not None and resolved.recipe else "run"
    stamp = clock.wall()[:19].replace("-", "").replace(":", "").replace("T", "-")
    return Path("runs") / f"{name}-{stamp}"


def _info(config: "RunConfig", loaded: LoadedModel, folder: RunFolder, step: int, questions: int) -> RunInfo:
    train = config.train
    return RunInfo(
        version=__version__,
        algorithm=algorithm_name(config),
        model=Path(config.model.path).name,
        parameters=loaded.parameters,
        device=str(loaded.model.device),
        threads=torch.get_num_threads(),
        dtype=config.model.compute_dtype,
        seed=config.seed,
        folder=folder.path,
        steps=train.steps,
        resumed_at=step,
        prompts=train.prompts_per_step,
        completions=train.completions_per_prompt,
        tokens_per_micro_batch=train.tokens_per_micro_batch,
        updates=train.updates_per_step * train.epochs_per_step,
        questions=questions,
    )


def algorithm_name(config: "RunConfig") -> str:
    """The kind of the surrogate: the shortest name of what is being run."""
    from proxima.core.surrogate import SURROGATES

    cls = type(config.algorithm.surrogate)
    return next((kind for kind, known in SURROGATES.items() if known is cls), cls.__name__)


def _summary(config: "RunConfig", folder: RunFolder, journal: Journal, status: str, seconds: float, error: str | None) -> Summary:
    records = folder.read_metrics()
    evals = [r for r in records if r["kind"] == "eval"]
    shown = ("accuracy", "correct", "questions", "step")
    named = {label: next((r for r in reversed(evals) if r["label"] == label), None) for label in ("before", "after")}
    steps = [r for r in records if r["kind"] == "train"]

    def rate(tokens: str, time: str) -> float:
        spent = sum(r.get(time) or 0.0 for r in steps)
        return sum(r.get(tokens) or 0 for r in steps) / spent if spent else 0.0

    return Summary(
        status=status,
        steps=journal.step,
        seconds=seconds,
        model=config.model.path,
        seed=config.seed,
        algorithm=algorithm_name(config),
        folder=str(folder.path),
        eval={label: {key: r.get(key) for key in shown} for label, r in named.items() if r is not None},
        tokens_per_second={"generate": rate("tokens/generated", "time/generate"), "train": rate("tokens/trained", "time/train")},
        peak_memory_bytes=_peak_memory(),
        error=error,
    )


def _peak_memory() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _stop_on_interrupt(controller: Controller) -> Iterator[None]:
    """The first Ctrl-C asks the loop to end with a checkpoint; the second one is an ordinary KeyboardInterrupt."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        controller.observer.warning(
            "stopping: a checkpoint is written first; press Ctrl-C again to end at once and lose the unfinished step"
        )
        controller.stop()
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, first)
        loop.add_signal_handler(signal.SIGTERM, controller.stop)
    except (NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread: Ctrl-C is then what it always is
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hugging Face's bars and advice would tear the live view."""
    logging: Any = transformers.utils.logging
    before = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def read_summary(folder: str | Path) -> dict[str, Any]:
    """A run's summary.json.

    Raises:
        ValueError: there is none, so the run has not ended.
    """
    path = RunFolder(folder).summary
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the run has not ended; resume it with --resume")
    found: dict[str, Any] = json.loads(path.read_text())
    return found
