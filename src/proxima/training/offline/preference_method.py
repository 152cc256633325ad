"""DPO, its relatives and KTO on the offline loop; the log-probs of the frozen reference are computed once for a data
set and stored on disk."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from proxima.core.preference.two_sided import Sft
from proxima.data import UserError
from proxima.data.columns import Floats
from proxima.data.trajectory import ChatExample, LabeledCompletion, PreferencePair, Trajectory, paths_of, with_paths
from proxima.evaluation.pair_metrics import ComparedItem, preference_metrics
from proxima.model.packed_model import PackedModel
from proxima.model.policy import Policy
from proxima.model.pretrained import LoadedModel
from proxima.system.atomic_files import check_writable, write_atomic
from proxima.task.protocol import Row
from proxima.training.forward_stage import ForwardStage, LogProbStage
from proxima.training.objectives.preference_objective import KtoObjective, PreferenceObjective
from proxima.training.offline.method import MEASURED_AT_ONCE, OfflineMethod, Progress, trained_sum
from proxima.training.stack import TrainStack

Item = PreferencePair | LabeledCompletion


class PreferenceMethod(OfflineMethod[Item]):
    """Makes preferred completions more probable than others, relative to a frozen reference; see `PreferenceObjective`
    and `KtoObjective`."""

    headline = "accuracy"

    begins = True  # the weights are those at the start of the run
    policy: Policy | None = None

    @property
    def section(self) -> Any:
        return self.settings.preference

    def check(self) -> None:
        if self.cache is not None:  # checked before anything is computed; created when it is written
            check_writable("preference.cache", self.section.cache, "name another folder, or null for none")

    @property
    def cache(self) -> Path | None:
        """The folder of the reference's log-probs; None if they are not stored."""
        if self.section.reference != "start" or self.section.cache is None:
            return None
        return Path(self.section.cache).expanduser()

    def item(self, row: Row, number: int) -> Item:
        item: Item = self.settings.item(number, row, self.tokenizer, self.context)
        return item

    def joined(self, items: list[Item]) -> list[Item]:
        """Add the mismatched completions of KTO, which only its loss reads."""
        kto = self.section.kto
        if kto is None or kto.anchor == "zero":
            return items
        return with_mismatched(items, self.context)

    def load(self, path: str | None) -> LoadedModel:
        self.begins = path is None
        return super().load(path)

    def model(self, loaded: LoadedModel) -> PackedModel:
        self.policy = self.source.policy(loaded)
        return self.policy

    def objective(self) -> Any:
        kto = self.section.kto
        if kto is None:
            return self.section.pair_objective()
        return KtoObjective(spec=kto)

    def unmeasured(self, held_out: Sequence[Item]) -> str:
        """KTO's accuracy needs both a good and a bad completion."""
        labels = {item.good for item in held_out if isinstance(item, LabeledCompletion)}
        if len(labels) != 1:
            return ""
        kind = "good" if labels == {True} else "bad"
        other = "bad" if labels == {True} else "good"
        return f"all {len(held_out)} held-out completions are {kind}: an accuracy needs {other} ones too"

    def prepare(self, items: list[Item], progress: Progress, stack: TrainStack) -> list[Item]:
        """Add the log-probs of the reference."""
        if self.section.reference == "none" or not items:
            return items
        sides = _sides_of(items)
        identity = self.source.identity()
        folder = self.cache if identity else None
        budget = {"tokens_per_micro_batch": str(stack.tokens_per_micro_batch)}
        compute = partial(self._reference, sides, progress, stack)
        log_probs = iter(cached_log_probs(folder, identity | budget, sides, compute))
        out: list[Item] = []
        for item in items:
            filled = [replace(side, reference_log_prob=next(log_probs)) for side in item.sides]
            out.append(item.with_sides(filled))
        return out

    def _reference(self, trajectories: Sequence[Trajectory], progress: Progress, stack: TrainStack) -> list[Floats]:
        """[T] log-probs under the run's initial model. Batches are those of `measure`, so at the start the model's own
        log-probs are bit-identical, and every margin is exactly 0."""
        (stage,) = stack.late_stages(self.stages)
        done = 0
        total = sum(map(len, trajectories))
        out: list[Floats] = []
        sides = 2 if self.section.kto is None else 1
        at_once = MEASURED_AT_ONCE * sides
        for start in range(0, len(trajectories), at_once):
            batch = trajectories[start : start + at_once]
            out += stack.columns(stage, batch)[stage.column]
            done += sum(map(len, batch))
            progress(done, total)
        return out

    def stages(self) -> Sequence[ForwardStage]:
        """The stage of the reference: the trained model before the first step, or with its adapter off at any time;
        otherwise it is loaded again."""
        assert self.policy is not None
        lora = self.source.lora is not None
        policy = self.policy
        if not self.begins and not lora:
            policy = self.source.policy(self.source.load())
        return [LogProbStage("reference_log_prob", policy, adapter=not lora)]

    def measure(self, stack: TrainStack, items: Sequence[Item]) -> list[ComparedItem]:
        log_probs = stack.log_prob(_sides_of(items))
        pairs = [item for item in items if isinstance(item, PreferencePair)]
        if pairs:
            return _compared(pairs, log_probs, stack, self.section.pair_objective())
        kto = self.section.kto
        labeled = [item for item in items if isinstance(item, LabeledCompletion)]
        assert kto is not None
        parts = iter(log_probs)
        return [_compared_alone(item, [next(parts) for _ in item.sides], kto.beta) for item in labeled]

    def summarise(self, measured: Sequence[ComparedItem]) -> dict[str, float]:
        return preference_metrics(measured)


def with_mismatched(items: Sequence[Item], context: int) -> list[Item]:
    """Pair each labeled completion with the next one in the data that has another prompt and fits after its own prompt.

    Raises:
        UserError: no such completion exists.
    """
    out: list[Item] = []
    labeled = [item for item in items if isinstance(item, LabeledCompletion)]
    for i, item in enumerate(labeled):
        first = paths_of(item.completion)[0]
        others = (labeled[(i + step) % len(labeled)].completion for step in range(1, len(labeled)))
        other = next((other for other in others if _fits(first, other, context)), None)
        if other is None:
            reason = f"row {item.row}: no row with another prompt has a completion that fits behind its prompt"
            remedy = "add rows, or set preference.loss.0.anchor=zero"
            raise UserError(f"the anchor of kto needs such a row: {reason}", remedy=remedy)
        paths: list[Trajectory] = []
        for path in paths_of(other):
            paths.append(replace(path, prompt_tokens=first.prompt_tokens, group=first.group, sample=1))
        out.append(replace(item, mismatched=with_paths(other, paths)))
    return out


def _sides_of(items: Iterable[Item]) -> list[Trajectory]:
    """The sequences of all items, in order."""
    sides: list[Trajectory] = []
    for item in items:
        sides += item.sides
    return sides


def _fits(first: Trajectory, other: Trajectory | ChatExample, context: int) -> bool:
    """True if a completion is of another prompt, and fits behind the prompt of `first`."""
    paths = paths_of(other)
    longest = max(len(path.tokens) for path in paths)
    same = np.array_equal(paths[0].prompt_tokens, first.prompt_tokens)
    return not same and len(first.prompt_tokens) + longest <= context


def _compared(
    pairs: Sequence[PreferencePair], log_probs: Sequence[Floats], stack: TrainStack, objective: PreferenceObjective
) -> list[ComparedItem]:
    """Compare pairs by the log-probs [T] of both sides, which alternate."""
    batch = stack.model.pack(_sides_of(pairs))
    joined = torch.from_numpy(np.concatenate(log_probs)).to(batch.advantage.device)
    values = objective.pairs(batch, joined)
    beta = objective.terms[0].beta
    chosen = beta * (values.chosen - values.reference_chosen)
    rejected = beta * (values.rejected - values.reference_rejected)
    losses: list[float | None] = [None] * len(pairs)
    if not objective.has_batch_statistics and not any(isinstance(term, Sft) for term in objective.terms):
        weights = objective.weights or [1.0] * len(objective.terms)
        terms = [weight * term(values) for weight, term in zip(weights, objective.terms, strict=True)]
        losses = reduce(torch.add, terms).tolist()
    parts = iter(log_probs)
    compared = []
    for i, pair in enumerate(pairs):
        of_sides = [next(parts) for _ in pair.sides]
        count = len(paths_of(pair.chosen))
        item = ComparedItem(
            question=pair.sides[0].prompt_tokens.tobytes(),
            reward={"chosen": float(chosen[i]), "rejected": float(rejected[i])},
            log_prob={
                "chosen": trained_sum(paths_of(pair.chosen), of_sides[:count]),
                "rejected": trained_sum(paths_of(pair.rejected), of_sides[count:]),
            },
            loss=losses[i],
        )
        compared.append(item)
    return compared


def _compared_alone(item: LabeledCompletion, log_probs: Sequence[Floats], beta: float) -> ComparedItem:
    """Compare a completion with its reference, by the log-probs [T] of its sides."""
    paths = paths_of(item.completion)
    ours = trained_sum(paths, log_probs[: len(paths)])
    references = [path.reference_log_prob for path in paths if path.reference_log_prob is not None]
    theirs = 0.0
    if references:
        theirs = trained_sum(paths, references)
    side = "chosen" if item.good else "rejected"
    return ComparedItem(
        question=paths[0].prompt_tokens.tobytes(), reward={side: beta * (ours - theirs)}, log_prob={side: ours}
    )


CACHE_FORMAT = "1"


def cached_log_probs(
    folder: Path | None,
    model: Mapping[str, str],
    trajectories: Sequence[Trajectory],
    compute: Callable[[], list[Floats]],
) -> list[Floats]:
    """[T] float32, nats, for each trajectory: the log-probs on disk, or the result of `compute`, which is then stored.
    A file that is damaged or for other tokens is computed and written again.

    Args:
        folder: has a file for each model and data set; it is created when something is written. None: store nothing.
        model: hashes of the weights, and settings, by name; with the tokens, they determine the log-probs.
    """
    if folder is None:
        return compute()
    key = _cache_key(model, trajectories)
    file = folder / f"{key}.safetensors"
    log_probs = _read_cached(file, key, trajectories)
    if log_probs is None:
        log_probs = compute()
        joined = np.concatenate(log_probs)
        facts = {"format": CACHE_FORMAT, "key": key, "sha256": sha256(joined.tobytes()).hexdigest()}
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(file, save({"log_prob": joined}, metadata=facts))
    return log_probs


def _cache_key(model: Mapping[str, str], trajectories: Sequence[Trajectory]) -> str:
    """SHA-256 of the model and of all tokens, with the temperatures."""
    digest = sha256(repr((CACHE_FORMAT, sorted(model.items()))).encode())
    for item in trajectories:
        digest.update(repr((len(item.prompt_tokens), len(item.tokens), item.temperature)).encode())
        digest.update(item.prompt_tokens.tobytes())
        digest.update(item.tokens.tobytes())
    return digest.hexdigest()


def _read_cached(file: Path, key: str, trajectories: Sequence[Trajectory]) -> list[Floats] | None:
    """The log-probs in a file; None if it is missing or invalid."""
    with suppress(OSError, SafetensorError):
        with safe_open(file, "numpy") as opened:
            facts = opened.metadata() or {}
            joined = opened.get_tensor("log_prob")
        ends = np.cumsum([len(item.tokens) for item in trajectories])
        intact = facts.get("key") == key and facts.get("sha256") == sha256(joined.tobytes()).hexdigest()
        if intact and joined.dtype == np.float32 and joined.shape == (ends[-1],):
            return np.split(joined, ends[:-1])
    return None
