"""Lengths and times of a finished run, for a simulation: from its rollouts, metrics.jsonl and timeline.json."""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from proxima.data import Episode, UserError
from proxima.lab.run_reader import Run, read_run
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_table
from proxima.runtime.watch.observer import Record
from proxima.runtime.watch.timeline import timeline_spans, union

WARM_UP = 1  # first steps, excluded from all times if there are enough others
INSTANTS = 4000  # of the run, at which the running completions are counted
MADE_FOR = ("model.path", "engine.kind", "engine.slots", "sampling.max_tokens", "train.completions_per_prompt")
STAGES = ("time/generate", "time/score", "time/train", "time/publish")


@dataclass(frozen=True)
class Fit:
    """Values for fields of `Times`, and notes about them."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Rollout:
    """The rollout of a prompt: the number of tokens of the prompt, and of each turn of each completion (one turn
    without an environment); `used`: a step trained on it."""

    uid: int
    step: int
    prompt: int
    turns: tuple[tuple[int, ...], ...]
    used: bool

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the completions in tokens."""
        return tuple(map(sum, self.turns))


@dataclass(frozen=True)
class Spans:
    """Start and end of generation and scoring by uid, of each publication, and of the turns and environment answers of
    each episode (uid, sample), in seconds since the start of the run."""

    generating: Mapping[int, tuple[float, float]]
    scoring: Mapping[int, tuple[float, float]]
    publishing: Sequence[tuple[float, float]]
    turns: Mapping[tuple[int, int], Sequence[tuple[float, float]]]
    answers: Mapping[tuple[int, int], Sequence[tuple[float, float]]]


def fit_times(folder: str | Path, settings: Mapping[str, Any]) -> Fit:
    """Fit the times that the run reveals; the others keep their defaults. `settings` maps dotted paths to values of the
    simulated recipe, for a note where those of the run differ.

    Raises:
        UserError: the folder is not a run, or has fewer than two finished steps with rollouts.
    """
    run = read_run(folder)
    rollouts = _rollouts(RunFolder(folder), [int(record["step"]) for record in run.train])
    steps = [record for record in run.train if record["step"] in {rollout.step for rollout in rollouts}]
    if len(steps) < 2:
        raise UserError(f"--from {folder}: has {len(steps)} finished steps with rollouts; two are needed to fit times")
    steps = steps[WARM_UP:] if len(steps) >= 3 * WARM_UP + 1 else steps
    spans = _spans(Path(folder) / "timeline.json")
    fit = Fit()
    _fit_lengths(fit, rollouts)
    if "episode/turns/mean" in steps[-1]:
        _fit_episodes(fit, steps, rollouts, spans)
    _fit_trainer(fit, run, steps, rollouts)
    _fit_engine(fit, run, steps, rollouts, spans)
    _fit_rewards(fit, run, steps, spans)
    if run.config.get("algorithm.dynamic_sampling.max_num_gen_batches") is not None:
        judged = sum(r["prompts_generated"] - r["prompts_unscored"] for r in steps)
        fit.values["accepted"] = sum(r["prompts_accepted"] for r in steps) / max(1, judged)
    others = [f"{name}={run.config[name]}" for name in MADE_FOR if run.config.get(name) != settings.get(name)]
    if others:
        fit.notes.append(f"{folder} had {', '.join(others)}: its times are those of that")
    return fit


def is_overlapping(run: Run) -> bool:
    """Return True if the run was asynchronous."""
    lag, concurrent = run.config.get("runtime.max_lag"), run.config.get("runtime.max_concurrent_rollouts")
    return bool(lag) and concurrent is not None


# ---- reading the files -----------------------------------------------------------------------------------------------


def _rollouts(folder: RunFolder, steps: Iterable[int]) -> list[Rollout]:
    rollouts: dict[tuple[int, int], Rollout] = {}
    for step in steps:
        if not folder.rollout_file(step).is_file():
            continue
        file = folder.rollout_file(step)
        played = "episode" in pq.read_schema(file).names
        names = ["prompt_uid", "sample", "tokens", "prompt_tokens", "used"]
        table = read_table(file, [*names, "episode"] if played else names)
        columns = [table["prompt_uid"], table["sample"], pc.list_value_length(table["tokens"])]
        columns += [pc.list_value_length(table["prompt_tokens"]), table["used"]]
        episodes = table["episode"].to_pylist() if played else [None] * len(table)
        turns: dict[int, dict[int, tuple[int, ...]]] = {}
        rows = zip(*(column.to_pylist() for column in columns), episodes, strict=True)
        for uid, sample, length, prompt, used, episode in rows:
            own = turns.setdefault(uid, {})
            made = (length,) if episode is None else tuple(span.tokens for span in Episode.from_json(episode).turns)
            own[sample] = own.get(sample, ()) + made  # of all paths
            rollouts[step, uid] = Rollout(uid, step, prompt, tuple(own.values()), used)
    return sorted(rollouts.values(), key=lambda rollout: rollout.uid)


def _spans(file: Path) -> Spans | None:
    """Read the spans of a timeline; None without the file."""
    if not file.is_file():
        return None
    generating: dict[int, tuple[float, float]] = {}
    scoring: dict[int, tuple[float, float]] = {}
    publishing: list[tuple[float, float]] = []
    turns: dict[tuple[int, int], list[tuple[float, float]]] = {}
    answers: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for span in timeline_spans(file):
        if span.name == "publish":
            publishing.append((span.start, span.end))
        elif span.name in ("turn", "environment"):
            episode = span.facts["prompt"], span.facts["sample"]
            (turns if span.name == "turn" else answers).setdefault(episode, []).append((span.start, span.end))
        elif span.name in ("generating", "scoring") and "prompt" in span.facts:
            (generating if span.name == "generating" else scoring)[span.facts["prompt"]] = (span.start, span.end)
    return Spans(generating, scoring, publishing, turns, answers)


# ---- fits ------------------------------------------------------------------------------------------------------------


def _fit_lengths(fit: Fit, rollouts: Sequence[Rollout]) -> None:
    sizes = {len(rollout.lengths) for rollout in rollouts}
    values = [float(length) for rollout in rollouts for length in rollout.lengths]
    together = sizes.pop() if len(sizes) == 1 else 1
    fit.values["length"] = {"kind": "empirical", "values": values, "together": together}
    fit.values["prompt_length"] = fmean(rollout.prompt for rollout in rollouts)


def _fit_episodes(fit: Fit, steps: Sequence[Record], rollouts: Sequence[Rollout], spans: Spans | None) -> None:
    """Fit the number of turns, the tokens of a turn, and the seconds of the environment per turn."""
    sizes = {len(rollout.turns) for rollout in rollouts}
    together = sizes.pop() if len(sizes) == 1 else 1
    played = [turns for rollout in rollouts for turns in rollout.turns]
    fit.values["turns"] = {
        "kind": "empirical",
        "values": [float(max(1, len(turns))) for turns in played],
        "together": together,
    }
    lengths = [float(length) for turns in played for length in turns]
    fit.values["length"] = {"kind": "empirical", "values": lengths, "together": 1}
    if spans is not None and spans.turns:
        waits = {key: sum(end - begin for begin, end in own) for key, own in spans.answers.items()}
        values = [waits.get(key, 0.0) / len(own) for key, own in spans.turns.items()]
        fit.values["environment"] = {"kind": "empirical", "values": values}
    else:
        waited = sum(r.get("time/environment", 0.0) for r in steps)
        turns = sum(len(t) for rollout in rollouts for t in rollout.turns if rollout.step in {r["step"] for r in steps})
        fit.values["environment"] = {"kind": "constant", "value": waited / max(1, turns)}
    fit.notes.append("turns and their lengths are drawn apart from each other; KV of earlier turns is found again")


def _fit_trainer(fit: Fit, run: Run, steps: Sequence[Record], rollouts: Sequence[Rollout]) -> None:
    trained = [
        sum(sum(rollout.lengths) for rollout in rollouts if rollout.used and rollout.step == r["step"]) for r in steps
    ]
    base, token = nonnegative_fit([1.0] * len(steps), trained, [r["time/train"] for r in steps])
    fit.values.update(update=base, update_token=token)
    published = [r["time/publish"] for r in steps if "time/publish" in r]
    whole = fmean(published) if published else 0.0
    # in most steps of an overlapping run the engine is idle only while it is paused, except for steps with episodes,
    # in which it is also idle while all episodes wait for their environments
    idle = [r["idle/engine"] * r["time/step"] for r in steps if "idle/engine" in r and "time/environment" not in r]
    paused = min(whole, float(np.quantile(idle, 0.25))) if idle else whole
    fit.values.update(pause=whole - paused, publish=paused)
    inside = fmean(r["time/step"] - sum(r.get(stage, 0.0) for stage in STAGES) for r in steps)
    evaluated = {int(r["step"]) for r in run.evals}
    every = int(run.config.get("checkpoint.every") or 0)
    between = [
        after["time"] - after["time/step"] - before["time"]
        for before, after in pairwise(steps)
        if before["step"] not in evaluated and not (every and before["step"] % every == 0)
    ]
    fit.values["other"] = max(0.0, inside + (median(between) if between else 0.0))
    if during := [r["time/evaluate"] for r in run.evals if r.get("label") == "step"]:
        fit.values["evaluate"] = fmean(during)


def _fit_engine(fit: Fit, run: Run, steps: Sequence[Record], rollouts: Sequence[Rollout], spans: Spans | None) -> None:
    """Fit the seconds of a decode step and of a prefill."""
    slots = int(run.config.get("engine.slots") or 0)
    numbers = {int(r["step"]) for r in steps}
    if not slots:
        fit.notes.append("step, sequence: config.yaml of the run names no engine.slots")
        return
    if not is_overlapping(run):
        made = {n: [length for rollout in rollouts if rollout.step == n for length in rollout.lengths] for n in numbers}
        kept = [r for r in steps if r["time/generate"] > 0]
        decoded = [float(decode_steps(made[int(r["step"])], slots)) for r in kept]
        tokens = [float(sum(made[int(r["step"])])) for r in kept]
        prompts = {n: sum(rollout.prompt for rollout in rollouts if rollout.step == n) for n in numbers}
        fed = sum(r.get("tokens/trained", 0) for r in kept)
        prefill = sum(r["time/train"] for r in kept) / fed / 3 if fed else 0.0
        worked = _engine_seconds(kept, rollouts, spans)
        seconds = [max(0.0, worked[int(r["step"])] - prefill * prompts[int(r["step"])]) for r in kept]
        fit.values["prefill_token"] = prefill
        fit.notes.append("prefill_token is a third of what an update takes for a token: a forward without its backward")
        fit.notes.append("the run was synchronous: run concurrently on shared cores, engine and trainer are slower")
    elif spans is not None and (traced := [rollout for rollout in rollouts if rollout.uid in spans.generating]):
        if spans.turns:
            traced, spans = _turn_by_turn(traced, spans)
        decoded, tokens, seconds = _decoded_in_spans(traced, spans, slots)
        fit.values["prefill_token"] = 0.0
        fit.notes.append("prefill_token is 0: prefills are in the times of decode steps")
        if slots < (run.config.get("runtime.max_concurrent_rollouts") or 0) * max(
            len(rollout.lengths) for rollout in traced
        ):
            fit.notes.append("step, sequence: completions waited for slots, and that time is in them")
    else:
        fit.notes.append("step, sequence: the run was asynchronous and has no prompts in timeline.json")
        return
    step, sequence = nonnegative_fit(decoded, tokens, seconds)
    if step + sequence > 0:
        fit.values.update(step=step, sequence=sequence)


def _engine_seconds(steps: Sequence[Record], rollouts: Sequence[Rollout], spans: Spans | None) -> dict[int, float]:
    """Return the seconds in which the engine generated, by step of a synchronous run, without those in which all
    episodes wait for environments."""
    seconds = {int(r["step"]): float(r["time/generate"]) for r in steps}
    if spans is None or not spans.turns:
        return seconds
    uids = {rollout.uid: rollout.step for rollout in rollouts}
    moments: dict[int, list[tuple[float, float]]] = {}
    for (uid, _), own in spans.turns.items():
        moments.setdefault(uids.get(uid, -1), []).extend(own)
    return seconds | {n: sum(b - a for a, b in union(moments[n])) for n in seconds if n in moments}


def _turn_by_turn(rollouts: Sequence[Rollout], spans: Spans) -> tuple[list[Rollout], Spans]:
    """Return each turn as a separate prompt, with the span from its request to its completion."""
    made: list[Rollout] = []
    generating = {}
    for rollout in rollouts:
        for sample, lengths in enumerate(rollout.turns):
            for length, moment in zip(lengths, spans.turns.get((rollout.uid, sample), ()), strict=False):
                if length:
                    generating[len(made)] = moment
                    made.append(Rollout(len(made), rollout.step, rollout.prompt, ((length,),), rollout.used))
    return made, replace(spans, generating=generating)


def _decoded_in_spans(rollouts: Sequence[Rollout], spans: Spans, slots: int) -> tuple[list[float], ...]:
    """Return for each prompt its decode steps, the tokens that all completions got meanwhile, and the seconds.

    A prompt decodes as long as its longest completion; the others end in proportion to their lengths.
    """
    whole = [spans.generating[rollout.uid] for rollout in rollouts]
    at = np.linspace(min(a for a, _ in whole), max(b for _, b in whole), INSTANTS)
    running = np.zeros(INSTANTS)
    for rollout, (a, b) in zip(rollouts, whole, strict=True):
        for length in rollout.lengths:
            running += (at >= a) & (at < a + (b - a) * length / max(rollout.lengths))
    running = np.minimum(running, slots)
    decoded, tokens, seconds = [], [], []
    for rollout, (a, b) in zip(rollouts, whole, strict=True):
        inside = (at >= a) & (at <= b)
        paused = sum(max(0.0, min(b, end) - max(a, begin)) for begin, end in spans.publishing)
        longest = float(max(rollout.lengths))
        if inside.any() and b - a > paused:
            decoded.append(longest)
            tokens.append(longest * float(running[inside].mean()))
            seconds.append(b - a - paused)
    return decoded, tokens, seconds


def _fit_rewards(fit: Fit, run: Run, steps: Sequence[Record], spans: Spans | None) -> None:
    if spans is not None and spans.scoring:
        taken = [max(0.0, end - begin) for begin, end in spans.scoring.values()]
        fit.values["score"] = {"kind": "empirical", "values": taken}
    elif not is_overlapping(run):
        waited = fmean(r.get("time/score", 0.0) for r in steps)
        fit.values["score"] = {"kind": "constant", "value": max(0.0, waited)}
    else:
        fit.notes.append("score: the run was asynchronous and has no prompts in timeline.json")


def decode_steps(lengths: Sequence[int], slots: int) -> int:
    """Return the decode steps until completions of these lengths have ended, `slots` at a time, in this order."""
    ends: list[int] = []
    for length in lengths:
        begin = heapq.heappop(ends) if len(ends) == slots else 0
        heapq.heappush(ends, begin + length)
    return max(ends, default=0)


def nonnegative_fit(first: Sequence[float], second: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return a, b >= 0 with the least sum of (a first + b second - values)^2."""
    columns, wanted = np.array([first, second], np.float64).T, np.asarray(values, np.float64)
    both = np.linalg.lstsq(columns, wanted, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = [max(0.0, float(c @ wanted) / (float(c @ c) or 1.0)) for c in columns.T]
    errors = [float(((c * a - wanted) ** 2).sum()) for c, a in zip(columns.T, alone, strict=True)]
    return (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])
