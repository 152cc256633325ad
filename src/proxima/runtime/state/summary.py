"""The facts of a run at its start (`RunInfo`), and its outcome in one small file, summary.json."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from proxima.config.describe import kind_of
from proxima.config.outcomes import Outcome
from proxima.config.presets import ALGORITHMS
from proxima.config.schema import RunConfig
from proxima.config.sections.offline import OfflineConfig
from proxima.evaluation.headline import Headline
from proxima.evaluation.held_out import named_sets
from proxima.model.pretrained import LoadedModel
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.watch.observer import Observer, Record, RunInfo, WarningList
from proxima.system.machine import peak_memory_bytes
from proxima.task.protocol import Rows, about_rows
from proxima.version import __version__


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The content of summary.json. `status` is `done`, `stopped` (Ctrl-C, with a checkpoint), `untrained` (all steps
    are made, none had a gradient) or `failed`.

    `eval` has the figure that stands for an evaluation as `metric`, `value`, `low` and `high`, and under `sets` those
    of each further set; `replay` is the run whose rollouts were trained on, and the SHA-256 of these.
    """

    status: str
    steps: int
    seconds: float
    model: str
    seed: int
    algorithm: str = ""
    folder: str
    eval: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tokens_per_second: Mapping[str, float] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    replay: Mapping[str, str | None] | None = None
    # resumes with other settings: `step`, and `field`, `before`, `now` of each
    changes: Sequence[Mapping[str, Any]] = ()
    warnings: Sequence[Mapping[str, Any]] = ()  # `step`, `last`, `text` and `times` of each: see `WarningList`
    links: Mapping[str, str] = field(default_factory=dict)  # where to look at the run: its report, its trackers
    error: str | None = None
    resumable: bool = True  # a plain resume may continue a run that is not done; False: it would end in the same way
    plateau: str = ""  # why the run ended before its last step


def run_info(
    config: RunConfig | OfflineConfig,
    loaded: LoadedModel | None,
    folder: Path,
    *,
    algorithm: str,
    step: str,
    updates: int = 1,
    steps: int,
    finished: int,
    rows: Mapping[str, Rows],
    replay_of: Path | None = None,
    chosen: Sequence[Outcome] = (),
) -> RunInfo:
    """The facts known at the start, or when the run resumes after `finished` steps; `loaded` is None if no step is
    left, `step` is what a step consists of, in words, `rows` are those of each task, by its path."""
    dtype: str = config.model.compute_dtype
    if dtype != config.model.dtype:
        dtype = f"{dtype} autocast"
    budget = f"{config.train.tokens_per_micro_batch:,} tokens"
    made = "1 update" if updates == 1 else f"{updates:,} updates"
    about = {path: about_rows(opened) for path, opened in rows.items()}
    parameters = 0
    adapter = 0
    device = config.model.device
    if loaded is not None:
        parameters = loaded.parameters
        adapter = loaded.adapter_parameters
        device = str(loaded.model.device)
    return RunInfo(
        version=__version__,
        algorithm=algorithm,
        model=Path(config.model.path).name,
        seed=config.seed,
        folder=folder,
        steps=steps,
        composition=f"{step} → micro-batches ≤ {budget} → {made}",
        parameters=parameters,
        adapter=adapter,
        device=device,
        threads=torch.get_num_threads(),
        dtype=dtype,
        resumed_at=finished,
        parts=tuple(f"{path} = {text}" for path, text in about.items() if text),
        replay_of=replay_of,
        chosen=tuple(chosen),
    )


def algorithm_name(config: RunConfig) -> str:
    """The preset's name, or the kind of the surrogate or preference loss; `cppo with surrogate ppo_clip` if it is not
    the preset's."""
    algorithm = config.algorithm
    preset = algorithm.preset
    slot = "surrogate" if algorithm.preference is None else "preference"
    value = getattr(algorithm, slot)
    kind = ""  # distillation alone has no surrogate
    if value is not None:
        kind = kind_of(value)
    if not preset or preset not in ALGORITHMS or not kind:
        return preset or kind
    written = ALGORITHMS[preset].get(slot, {}).get("kind")
    if written == kind:
        return preset
    return f"{preset} with {slot} {kind}"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended, as in `Summary`."""

    status: str
    error: str | None = None
    resumable: bool = True


def summarise_run(
    config: RunConfig | OfflineConfig,
    facts: Mapping[str, Any],
    folder: RunFolder,
    journal: Journal,
    observer: Observer,
    ending: Ending,
    seconds: float,
) -> Summary:
    """The outcome of a run of any kind that ended after some seconds; with the `facts` of its workload, the links of
    the views, and their warnings, which follow those from before a resume."""
    links = observer.ending()  # first: it may warn
    warnings = WarningList()
    for warning in (*folder.earlier_warnings, *observer.warned()):
        warnings.add(**warning)
    records = folder.read_metrics()
    evals = [record for record in records if record["kind"] == "eval"]
    headline = Headline.of(evals)
    named = {record["label"]: record for record in evals if record["label"] in ("before", "after")}
    rule = config.eval.stop_after
    plateau = ""
    if rule is not None and ending.status == "done" and "after" not in named:
        plateau = rule.reached(evals)
        if plateau:
            named["after"] = evals[-1]
    steps = [record for record in records if record["kind"] == "train"]
    rates = tokens_per_second(steps)

    return Summary(
        status=ending.status,
        steps=journal.step,
        seconds=seconds,
        model=config.model.path,
        seed=config.seed,
        folder=str(folder.path),
        eval={label: _outcome(named[label], headline) for label in ("before", "after") if label in named},
        tokens_per_second={name: rate or 0.0 for name, rate in rates.items()},
        peak_memory_bytes=max(peak_memory_bytes(), folder.ended.get("peak_memory_bytes") or 0),
        changes=journal.get("changes") or (),
        warnings=warnings.records(),
        links=links,
        error=ending.error,
        resumable=ending.resumable,
        plateau=plateau,
        **facts,
    )


def tokens_per_second(steps: Sequence[Record]) -> dict[str, float | None]:
    """Tokens per second over some steps, of generation and of training; None for a stage that took no time. An engine
    beside the trainer generates during the whole step; the time of the stage `generate` is then the trainer's wait."""

    def total(key: str) -> float:
        return sum(record.get(key) or 0.0 for record in steps)

    def rate(tokens: str, time: str) -> float | None:
        spent = total(time)
        return total(tokens) / spent if spent else None

    beside = any("idle/engine" in r for r in steps)
    generating = "time/step" if beside else "time/generate"
    return {"generate": rate("tokens/generated", generating), "train": rate("tokens/trained", "time/train")}


def _outcome(record: Mapping[str, Any], headline: Headline) -> dict[str, Any]:
    """An evaluation in the summary."""
    low, high = headline.bounds(record) or (None, None)
    facts = {key: record.get(key) for key in ("accuracy", "correct", "questions", "step")}
    outcome = facts | {"metric": headline.name, "value": headline.value(record), "low": low, "high": high}
    sets = dict[str, Any]()
    for name, figures in named_sets(record).items():
        of_set = {**figures, "step": record.get("step")}
        sets[name] = _outcome(of_set, Headline.of([of_set]))
    if sets:
        outcome["sets"] = sets
    return outcome
