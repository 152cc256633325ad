"""The settings of an engine one at a time, then pairs of those that mattered: where the mismatch comes from."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch

from proxima.config.schema import RunConfig
from proxima.config.sections.data import tasks_of
from proxima.config.sections.placement import RankPlacement
from proxima.data import FieldError, UserError
from proxima.data.columns import Floats
from proxima.engine import ENGINES
from proxima.engine.engine_selection import EngineSelection, within_servers
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.protocol import Engine, Request
from proxima.engine.variations import Variation, changed_fields, variations_of
from proxima.evaluation.intervals import Interval
from proxima.model.pretrained import UnloadedModel, without_progress_bars
from proxima.runtime.diagnosis.mismatch import FLOOR, MismatchFigures, interval, judged, mismatch, overall, reduction
from proxima.runtime.diagnosis.probed import Bench, Ratios, Reading
from proxima.runtime.diagnosis.promises import PROMISES, Promise
from proxima.runtime.diagnosis.trainer_view import TrainerView, weights_rounded_to
from proxima.runtime.launch.run_data import rollout_needs
from proxima.system.machine import set_compute_threads
from proxima.task.opening import open_tasks

MOST_PAIRED = 3  # settings whose pairs are tried
ROUNDED = (torch.float16, torch.bfloat16)  # in which an engine may hold the weights
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """One setting with the value that was tried.

    Args:
        what: whose setting: `engine`, `requests`, `sampling`, `trainer`, or `as if` for a guess about an engine that
            has no such setting.
        name: of the setting and the value.
        fields: the overrides of a recipe that set it; empty where no field does.
        verdict: `less`, `more` or `same` mismatch than with the recipe's own; `not tried`.
        why_not: the reason for which it was not tried.
        scored: of the same tokens for all settings; None: the engine does not score them.
        sampled: of the tokens that the engine sampled with this setting.
        less: by how much the mismatch is smaller, nats a token, with a paired interval: of the same tokens by scoring,
            or what reporting adds to scoring, whichever differs more.
        rate: sampled tokens a second; None where nothing was sampled.
    """

    what: str
    name: str
    fields: Sequence[str] = ()
    verdict: str = "not tried"
    why_not: str = ""
    scored: MismatchFigures | None = None
    sampled: MismatchFigures | None = None
    less: Interval | None = None
    rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class SettingPair:
    """Two settings at once: `less` of both together, and `more_than_sum`, what that is above the sum of each alone,
    nats a token with paired intervals."""

    names: tuple[str, str]
    less: Interval
    more_than_sum: Interval


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found about the engine of a recipe.

    Args:
        engine: its kind.
        answers, tokens: the number of each that the recipe's engine sampled.
        recipe: its own mismatch.
        rows: the settings, in the order in which they were tried.
        promises: what it must do whatever its settings.
        pairs: of the settings that moved the mismatch most.
    """

    engine: str
    answers: int
    tokens: int
    recipe: SettingRow
    rows: Sequence[SettingRow]
    promises: Sequence[Promise]
    pairs: Sequence[SettingPair] = ()

    @property
    def found(self) -> list[str]:
        """The names of what makes the mismatch: settings by which it is less, most effective first, and promises that
        are broken. Empty for a healthy engine."""
        broken = [promise.name for promise in self.promises if promise.broken]
        less = [row for row in self.rows if row.verdict == "less"]
        less.sort(key=_size, reverse=True)
        return broken + [row.name for row in less]


def diagnose(config: RunConfig, report: Report, *, prompts: int, samples: int, tokens: int) -> Diagnosis:
    """Examine the engine of a recipe.

    Args:
        report: receives a line before each engine is started.
        prompts: of the task, in the order in which a run would read them; fewer if it has not as many rows.
        samples: answers to each of them.
        tokens: most of an answer; `sampling.max_tokens` if that is less.

    Raises:
        FieldError, UserError: something is wrong with the model, the task or the engine; the first before any weights
            are loaded.
    """
    if isinstance(config.placement, RankPlacement):
        kind = type(config.placement).__name__
        remedy = "set placement=null; the engine's own settings stay"
        raise FieldError("placement", kind, "spreads a run, and this is one process", remedy=remedy)
    set_compute_threads(config.runtime.threads)
    model = config.model.unloaded([*tasks_of(config).values(), config.episode])
    model, _ = within_servers(model, {"engine": config.engine})
    choice = EngineSelection(spec=config.engine, needs=rollout_needs(config, model))
    for note in choice.check():
        report(note)
    requests = _requests_of(config, model, prompts=prompts, samples=samples, tokens=tokens)
    source = replace(config.model.source(config.seed), images=model.images)
    with without_progress_bars():
        loaded = source.load()
    view = TrainerView(source.policy(loaded), config.train.tokens_per_micro_batch)
    bench = Bench(choice=choice, loaded=loaded, view=view, requests=requests, seed=config.seed)
    return Examination(config=config, bench=bench, report=report).run()


def _requests_of(config: RunConfig, model: UnloadedModel, *, prompts: int, samples: int, tokens: int) -> list[Request]:
    """The requests that every engine answers."""
    rows = open_tasks({"task": config.task}, config.seed)["task"]
    source = config.data.prompt_source(rows, model, config.seed, shuffle=config.data.shuffle)
    asked = source.next(min(prompts, len(rows)))
    sampling = replace(config.sampling, max_tokens=min(tokens, config.sampling.max_tokens))
    requests = []
    for prompt in asked:
        for sample in range(samples):
            requests.append(Request(prompt=prompt, sample=sample, sampling=sampling, seed=config.seed))
    return requests


@dataclass(kw_only=True, eq=False)
class Examination:
    """The work of `diagnose`.

    Args:
        tried: the variations of which there is a reading, by name, with ρ of each.
    """

    config: RunConfig
    bench: Bench
    report: Report
    tried: dict[str, tuple[Variation, Ratios]] = field(default_factory=dict)

    def run(self) -> Diagnosis:
        """Everything, one engine after another."""
        spec = self.config.engine
        bench = self.bench
        self.report("the recipe's engine")
        with bench.running(spec) as engine:
            first = bench.read(engine)
            bench.answers = first.answers
            own = replace(first, scores=first.own_scores)
            ratios = bench.ratios(own)
            rows = [*self._orders(engine, ratios), *self._samplings(engine, ratios), *self._trainers(own, ratios)]
            self.report("promises")
            promises = list[Promise]()
            for promise in PROMISES:
                promises += promise(bench, engine, own)
        varied = [self._varied(spec, each, ratios) for each in variations_of(spec, bench.view.policy.device)]
        return Diagnosis(
            engine=ENGINES.kind_of(spec),
            answers=len(own.answers),
            tokens=sum(len(answer.tokens) for answer in own.answers),
            recipe=_row("engine", "as the recipe has it", ratios, ratios, rate=own.rate),
            rows=[*varied, *rows],
            promises=promises,
            pairs=list(self._pairs(spec, varied, ratios)),
        )

    def _varied(self, spec: Any, variation: Variation, own: Ratios) -> SettingRow:
        """One setting of the engine changed."""
        if variation.why_not is not None:
            return SettingRow(what="engine", name=variation.name, why_not=variation.why_not)
        self.report(variation.name)
        changed = variation.change(spec)
        try:
            with self.bench.running(changed) as engine:
                reading = self.bench.read(engine)
        except UserError as error:
            return SettingRow(what="engine", name=variation.name, why_not=f"the engine does not run so: {error.reason}")
        ratios = self.bench.ratios(reading)
        self.tried[variation.name] = variation, ratios
        fields = changed_fields(spec, changed, "engine")
        return _row("engine", variation.name, ratios, own, rate=reading.rate, fields=fields)

    def _orders(self, engine: Engine, own: Ratios) -> Iterator[SettingRow]:
        """The same requests one after another, and in the opposite order."""
        bench = self.bench
        self.report("one request at a time")
        fields = ["engine.max_running=1"] if isinstance(self.config.engine, ServerSettings) else []
        alone = bench.read(engine, at_once=False)
        yield _row("requests", "one at a time", bench.ratios(alone), own, rate=alone.rate, fields=fields)
        self.report("requests in the opposite order")
        assert bench.answers is not None
        turned = bench.read(engine, bench.requests[::-1])
        scores = bench.score(engine, bench.answers[::-1])
        turned = replace(
            turned, answers=turned.answers[::-1], scores=_turned(scores), own_scores=_turned(turned.own_scores)
        )
        yield _row("requests", "in the opposite order", bench.ratios(turned), own, rate=turned.rate)

    def _samplings(self, engine: Engine, own: Ratios) -> Iterator[SettingRow]:
        """The parameters of sampling that the recipe sets, each at the value that changes nothing."""
        for name, value in NEUTRAL.items():
            if getattr(self.config.sampling, name) == value:
                continue
            self.report(f"sampling.{name}={value:g}")
            changed = {name: value}
            requests = [replace(each, sampling=replace(each.sampling, **changed)) for each in self.bench.requests]
            reading = replace(self.bench.read(engine, requests), scores=None)
            ratios = self.bench.ratios(reading)
            fields = [f"sampling.{name}={value:g}"]
            yield _row("sampling", f"{name}: {value:g}", ratios, own, rate=reading.rate, fields=fields)

    def _trainers(self, own: Reading, ratios: Ratios) -> Iterator[SettingRow]:
        """The trainer in another precision, and with weights as an engine may have rounded them."""
        self.report("the trainer in other precisions")
        bench = self.bench
        policy = self.bench.view.policy
        present = policy.compute_dtype
        other = torch.float32 if present == torch.bfloat16 else torch.bfloat16
        name = f"compute dtype: {_name(other)}"
        if next(bench.view.module.parameters()).dtype != torch.float32:
            yield SettingRow(what="trainer", name=name, why_not="model.dtype is what it computes in")
        else:
            policy.compute_dtype = other
            try:
                retold = bench.ratios(own)
            finally:
                policy.compute_dtype = present
            yield _row("trainer", name, retold, ratios, fields=[f"model.compute_dtype={_name(other)}"])
        for dtype in ROUNDED:
            with weights_rounded_to(bench.view.module, dtype):
                retold = bench.ratios(own)
            yield _row("as if", f"the engine's weights were {_name(dtype)}", retold, ratios)

    def _pairs(self, spec: Any, rows: Sequence[SettingRow], own: Ratios) -> Iterator[SettingPair]:
        """The settings of the engine that moved the mismatch most, two at once. One that is of little use alone counts,
        too: another may hide it."""
        moved = [row for row in rows if row.name in self.tried and _moves(row, own, self.tried[row.name][1])]
        moved.sort(key=_size, reverse=True)
        for one, other in combinations(moved[:MOST_PAIRED], 2):
            self.report(f"{one.name} and {other.name}")
            first, ratios_of_first = self.tried[one.name]
            second, ratios_of_second = self.tried[other.name]
            try:
                changed = second.change(first.change(spec))
                with self.bench.running(changed) as engine:
                    both = self.bench.ratios(self.bench.read(engine))
            except UserError as error:
                self.report(f"the engine does not run so: {error.reason}")
                continue
            yield _pair((one.name, other.name), own, (ratios_of_first, ratios_of_second), both)


def _turned(scores: Sequence[Floats] | None) -> Sequence[Floats] | None:
    """In the opposite order."""
    return None if scores is None else scores[::-1]


def _pair(names: tuple[str, str], own: Ratios, alone: tuple[Ratios, Ratios], both: Ratios) -> SettingPair:
    """Two settings at once, by scored or by sampled tokens, whichever both together move more."""
    found = list[SettingPair]()
    for way, before in own.ways.items():
        first, second = (ratios.ways[way] for ratios in alone)
        after = both.ways[way]
        together = interval(before - after)
        beyond = interval(first + second - before - after)
        found.append(SettingPair(names=names, less=together, more_than_sum=beyond))
    return max(found, key=lambda pair: abs(pair.less.value))


def _row(
    what: str, name: str, ratios: Ratios, own: Ratios, *, rate: float | None = None, fields: Sequence[str] = ()
) -> SettingRow:
    """The row of a setting of which there are ρ; `own` are those of the recipe's engine."""
    whole = {"scored": own.scored, "sampled": own.sampled}
    changed = ratios.ways
    reduced = list[Interval]()
    overalls = list[Interval]()
    for way, before in own.ways.items():
        if way in changed:
            reduced.append(interval(before - changed[way]))
            overalls.append(overall(whole[way] or []))
    return SettingRow(
        what=what,
        name=name,
        fields=fields,
        verdict=judged(reduced, overalls),
        scored=None if ratios.scored is None else mismatch(ratios.scored),
        sampled=mismatch(ratios.sampled),
        less=max(reduced, key=lambda moved: abs(moved.value)),
        rate=rate,
    )


def _moves(row: SettingRow, own: Ratios, changed: Ratios) -> bool:
    """Whether a setting moves the mismatch: enough to be named, or for certain that of the same tokens."""
    if row.verdict != "same" or own.scored is None or changed.scored is None:
        return row.verdict != "same"
    moved = reduction(own.scored, changed.scored)
    return moved.low > FLOOR or moved.high < -FLOOR


def _size(row: SettingRow) -> float:
    """By how much a setting moves the mismatch, nats a token."""
    return 0.0 if row.less is None else abs(row.less.value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
