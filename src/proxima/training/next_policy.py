"""The next-policy cache of segment-wise decoupled PPO: log-probs of each token under the version after the one that
sampled it; with a `VersionChain`, under later ones too.

While V is the newest version, tokens of version V - 1 that no step has consumed get log pi_V: those of completions in
the queue, of unfinished groups, and of completions still running. A step at a later version reads them. The engine
computes them in a hook before it pauses for V + 1, or the trainer does before it updates V.

A chain does so for tokens of versions V - 1, V - 2, ... too. Of each token it keeps the first and the newest log-prob,
and the sum of the bounded steps between them: what a token takes does not grow with its age.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from proxima.core.proximal import VersionChain
from proxima.data import UserError
from proxima.data.columns import Bools, Columns, Floats, Ints
from proxima.data.flow import Completion, Key, Prompt
from proxima.data.pending import Pending
from proxima.data.trajectory import Trajectory
from proxima.engine.protocol import Engine, InFlight, ScoreRequest

SCORE_SECONDS = 300.0  # time limit of the engine for one window; less than that of a hook
ROUNDING = 1e-4  # nats; a sum of float32 steps that differs by less from the whole way was not shortened
Unconsumed = Callable[[], Iterable[tuple[Prompt, Completion]]]
Playing = Callable[[Sequence[InFlight]], Sequence[tuple[InFlight, Bools]]]
LogProbs = Callable[[Sequence[Trajectory]], Awaitable[list[Floats]]]
WriteEntries = Callable[[Path, Sequence["NextLogProbs"]], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class NextLogProbs(Columns):
    """The log-probs of one completion, or of a prefix, with its tokens and the versions that sampled them; these
    identify the completion, which may be generated again under the same key."""

    uid: int
    sample: int
    turn: int
    tokens: Ints  # [T] int32
    policy_version: Ints  # [T] int32
    log_prob: Floats  # [T] float32, nats, each under the version after its own, or `newest`; NaN where unknown
    # with a chain: the version of `log_prob`, -1 where it is unknown; the log-prob under the first version; nats, the
    # bounded steps from it to the newest
    newest: Ints | None = None
    first_log_prob: Floats | None = None
    bounded_steps: Floats | None = None

    @property
    def key(self) -> Key:
        """The key of the completion."""
        return self.uid, self.sample, self.turn

    def is_prefix_of(self, other: "InFlight | Trajectory") -> bool:
        """True if the other begins with these tokens, sampled by the same versions."""
        length = len(self.tokens)
        versions = other.policy_version
        same = versions is not None and np.array_equal(versions[:length], self.policy_version)
        return same and np.array_equal(other.tokens[:length], self.tokens)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tokens `[start:end]` of a completion, from the first to the last whose log-prob is needed."""

    of: InFlight
    start: int
    end: int

    @property
    def prompt(self) -> tuple[int, bytes]:
        """The key of segments with the same prompt: uid and prompt tokens."""
        return self.of.key[0], self.of.prompt_tokens.tobytes()

    def trajectory(self, group: int) -> Trajectory:
        """The completion up to the end of the segment, for the trainer."""
        tokens = self.of.tokens[: self.end]
        temperature = self.of.temperature
        return Trajectory(group=group, prompt_tokens=self.of.prompt_tokens, tokens=tokens, temperature=temperature)

    @property
    def request(self) -> ScoreRequest:
        """The segment, with all tokens before it as the prompt, for the engine."""
        before = np.concatenate([self.of.prompt_tokens, self.of.tokens[: self.start]])
        tokens = self.of.tokens[self.start : self.end]
        return ScoreRequest(prompt_tokens=before, tokens=tokens, temperature=self.of.temperature)


class NextPolicy:
    """The cache of `next_log_prob` for `proximal: next`, and the code that fills it.

    Without a chain each log-prob is written once. A token that was missed while its next version was the newest never
    gets one, and is counted. With a chain it gets that of the version after.

    Args:
        engine: generates the completions; in `before_pause` it also scores.
        unconsumed: returns all completions that the engine has delivered and no step has used yet.
        trainer: computes log-probs of trajectories under the trained policy, which `fill` then writes; None:
            `before_pause` writes those of the engine.
        entries: from a checkpoint.
        file: the name of the checkpoint's file, and the function that writes it.
        playing: maps the engine's completions in flight to the paths of the running episodes, each with a mask of the
            tokens that the model wrote; None: a completion is one turn.
        chain: log-probs under the versions after the next one, and the bounded steps between them; None: none.
    """

    def __init__(
        self,
        engine: Engine,
        unconsumed: Unconsumed,
        trainer: LogProbs | None = None,
        entries: Iterable[NextLogProbs] = (),
        file: tuple[str, WriteEntries] | None = None,
        playing: Playing | None = None,
        chain: VersionChain | None = None,
    ) -> None:
        self.engine = engine
        self.unconsumed = unconsumed
        self.trainer = trainer
        self.file = file
        self.playing = playing
        self.chain = chain
        self.entries = {entry.key: entry for entry in entries}
        self._metrics: dict[str, float] = {}
        self._missed = ""  # why the engine gave nothing in the last window

    # ---- writing -----------------------------------------------------------------------------------------------------

    async def before_pause(self) -> None:
        """The executor's hook before the engine pauses. The version is the one that the engine reports.

        If the engine fails or takes more than `SCORE_SECONDS`, these log-probs are missed, but the run continues;
        `warnings` gives the reason.

        Raises:
            UserError: from the engine, including NotFiniteError.
        """
        try:
            async with asyncio.timeout(SCORE_SECONDS):
                version = (await self.engine.health()).version
                segments = await self._segments(version)
                requests = [segment.request for segment in segments]
                scored = await self.engine.score(requests)
            expected = [len(request.tokens) for request in requests]
            given = [len(column) for column in scored]
            if given != expected:
                raise ValueError(f"score gave {given} log-probs for {expected} tokens")
        except Exception as error:
            self._miss(error)
            return
        self._write(segments, scored, version)

    def _miss(self, error: Exception) -> None:
        if isinstance(error, UserError):
            raise error
        why = str(error)
        if not why and isinstance(error, TimeoutError):
            why = f"no answer in {SCORE_SECONDS:g} s"
        kind = type(error).__name__
        self._missed = f"{kind}: {why}" if why else kind

    async def fill(self, trajectories: Sequence[Trajectory], version: int) -> list[Trajectory]:
        """The trajectories with `next_log_prob`, NaN where unknown; `version` is that of the current weights.

        Raises:
            UserError: from the engine or the trainer, including NotFiniteError.
        """
        self._metrics = {"next/written": 0.0}
        if self.trainer is not None:
            try:
                async with asyncio.timeout(SCORE_SECONDS):
                    segments = await self._segments(version)
            except Exception as error:
                self._miss(error)
                segments = []
            segments.sort(key=lambda segment: segment.prompt)  # neighbours share their prompt
            prompts = dict.fromkeys(segment.prompt for segment in segments)
            groups = {prompt: number for number, prompt in enumerate(prompts)}
            columns = await self.trainer([segment.trajectory(groups[segment.prompt]) for segment in segments])
            own = [column[segment.start :] for segment, column in zip(segments, columns, strict=True)]
            self._write(segments, own, version)
        filled = [self._filled(item) for item in trajectories]
        self._metrics |= missing_metrics(filled, version)
        return filled

    async def _segments(self, version: int) -> list[Segment]:
        """The segments to compute while `version` is the newest."""
        # the engine's first: a completion that it delivers meanwhile is among the unconsumed ones
        running = await self.engine.in_flight()
        parts: Sequence[tuple[InFlight, Bools | None]] = [(partial, None) for partial in running]
        if self.playing is not None:
            parts = self.playing(running)
        waiting = {partial.key: (partial, sampled) for partial, sampled in parts if partial.temperature > 0}
        for prompt, delivered in self.unconsumed():
            for path in delivered.paths:
                begin = path.initial_prompt or prompt
                waiting[path.key] = (InFlight.of(path, begin.tokens), path.sampled)
        segments: list[Segment] = []
        for completion, sampled in waiting.values():
            places = self._lacking(completion, sampled, version).nonzero()[0]
            if len(places):
                segments.append(Segment(of=completion, start=int(places[0]), end=int(places[-1]) + 1))
        return segments

    def _lacking(self, completion: InFlight, sampled: Bools | None, version: int) -> Bools:
        """[T] bool, True for tokens whose log-prob under a version is still to be computed."""
        entry = self._entry(completion)
        lacking = self._may_have(completion.policy_version, version)
        if sampled is not None:
            lacking &= sampled
        if entry is not None and entry.newest is not None:
            lacking[: len(entry.newest)] &= entry.newest < version
        elif entry is not None:
            lacking[: len(entry.log_prob)] &= np.isnan(entry.log_prob)
        return lacking

    def _may_have(self, policy_version: Ints, version: int) -> Bools:
        """[T] bool, True for tokens that get a log-prob under a version, given the versions that sampled them."""
        oldest = 1 if self.chain is None else self.chain.versions
        age = version - policy_version
        within: Bools = age >= 1
        if oldest is None:
            return within
        return within & (age <= oldest)

    def _entry(self, completion: InFlight | Trajectory) -> NextLogProbs | None:
        """The entry of this completion; None if there is none, or only one of an earlier completion with the same
        key."""
        entry = self.entries.get(completion.key)
        if entry is None or not entry.is_prefix_of(completion):
            return None
        return entry

    def _write(self, segments: Sequence[Segment], columns: Sequence[Floats], version: int) -> None:
        """Keep the log-probs of segments under a version."""
        for segment, column in zip(segments, columns, strict=True):
            completion = segment.of
            entry = self._entry(segment.of)
            known = None
            length = segment.end
            if entry is not None:
                known = entry.log_prob
                length = max(length, len(known))  # a chain's oldest tokens get no more
            log_prob = _extended(known, length, np.nan)
            before = log_prob.copy()
            log_prob[segment.start : segment.end] = column
            uid, sample, turn = completion.key
            made = NextLogProbs(
                uid=uid,
                sample=sample,
                turn=turn,
                tokens=completion.tokens[:length],
                policy_version=completion.policy_version[:length],
                log_prob=log_prob,
            )
            if self.chain is not None:
                made = _chained(made, entry, before, slice(segment.start, segment.end), version, self.chain)
            self.entries[completion.key] = made
            self._metrics["next/written"] = self._metrics.get("next/written", 0.0) + len(column)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _filled(self, item: Trajectory) -> Trajectory:
        entry = self._entry(item)
        cached = first = steps = None
        if entry is not None:
            cached = entry.log_prob
            first = entry.first_log_prob
            steps = entry.bounded_steps
        length = len(item.tokens)
        item = replace(item, next_log_prob=_extended(cached, length, np.nan))
        if self.chain is None:
            return item

        assert item.behavior_log_prob is not None
        first_step = _step(self.chain, _extended(first, length, np.nan), item.behavior_log_prob)
        return replace(item, chained_log_ratio=_extended(steps, length, 0.0) + first_step)

    def metrics(self) -> dict[str, float]:
        """Metrics of the step: `next/written` tokens, and those of `missing_metrics`."""
        return self._metrics

    def warnings(self) -> list[str]:
        """Warnings for the user, each once."""
        missed = self._missed
        self._missed = ""
        if not missed:
            return []
        what = "tokens that lack it are counted in next/missing_fraction, and algorithm.next_missing says what becomes "
        return [f"the engine gave no next_log_prob ({missed}); {what}of them"]

    # ---- keeping -----------------------------------------------------------------------------------------------------

    def files(self, pending: Pending) -> dict[str, Callable[[Path], None]]:
        """The file for a checkpoint at this moment: its name, with the function that writes it. `pending` is what the
        collector holds for later steps."""
        entries = self.forget(pending)
        if self.file is None or not entries:
            return {}
        name, write = self.file
        return {name: lambda path: write(path, entries)}

    def forget(self, pending: Pending) -> list[NextLogProbs]:
        """Delete the entries that a step has consumed or dropped. Returns those of the waiting groups, for a
        checkpoint; a prompt that is still generating is generated again after a resume."""
        groups = {group.prompt.uid for group in pending.groups}
        uids = groups | {prompt.uid for prompt in pending.prompts}
        self.entries = {key: entry for key, entry in self.entries.items() if key[0] in uids}
        return [entry for key, entry in sorted(self.entries.items()) if key[0] in groups]


def _extended(column: Floats | None, length: int, value: float) -> Floats:
    """[length] a copy of a column, or of none, with a value after its end."""
    out = np.full(length, value, np.float32)
    if column is not None:
        out[: len(column)] = column
    return out


def _step(chain: VersionChain, later: Floats, earlier: Floats) -> Floats:
    """The bounded step between two log-probs, NaN where one is unknown."""
    step: Floats = chain.step(torch.from_numpy(later), torch.from_numpy(np.array(earlier))).numpy()
    return step


def _chained(
    made: NextLogProbs, entry: NextLogProbs | None, before: Floats, new: slice, version: int, chain: VersionChain
) -> NextLogProbs:
    """An entry with the columns of a chain.

    Args:
        made: with the log-probs under `version` of the tokens `new`.
        entry: that of the version before; None: there was none.
        before: [T] nats, the log-probs of that entry, NaN where it has none.
    """
    length = len(made.log_prob)
    newest = np.full(length, -1, np.int32)
    first = steps = None
    if entry is not None:
        first = entry.first_log_prob
        steps = entry.bounded_steps
        if entry.newest is not None:
            newest[: len(entry.newest)] = entry.newest
    newest[new] = version
    first = _extended(first, length, np.nan)
    first = np.where(np.isnan(first), made.log_prob, first)
    steps = _extended(steps, length, 0.0)
    moved = _step(chain, made.log_prob, before)  # 0 outside of `new`
    steps += np.where(np.isnan(moved), np.float32(0), moved)
    return replace(made, newest=newest, first_log_prob=first, bounded_steps=steps)


def missing_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Shares of all loss tokens: those at least two versions old without `next_log_prob` (`next/missing_fraction`), and
    those with it (`next/cached_fraction`); with a chain, those of which a bound has shortened a step
    (`next/capped_fraction`)."""
    stale = 0
    missing = 0
    capped = 0
    tokens = 0
    chained = False
    for item in trajectories:
        assert item.policy_version is not None and item.next_log_prob is not None
        in_loss = item.in_loss
        aged = in_loss & (version - item.policy_version >= 2)
        stale += int(aged.sum())
        missing += int((aged & np.isnan(item.next_log_prob)).sum())
        tokens += int(in_loss.sum())
        if item.chained_log_ratio is not None:
            assert item.behavior_log_prob is not None
            chained = True
            unbounded = item.next_log_prob - item.behavior_log_prob
            capped += int((in_loss & (item.chained_log_ratio < unbounded - ROUNDING)).sum())
    counted = max(1, tokens)
    figures = {"next/missing_fraction": missing / counted, "next/cached_fraction": (stale - missing) / counted}
    if chained:
        figures["next/capped_fraction"] = capped / counted
    return figures
