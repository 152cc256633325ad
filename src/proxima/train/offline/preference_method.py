"""DPO, its relatives and KTO on the offline loop."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proxima.config.sections.preference_section import PreferenceConfig
from proxima.core.preference import Sft
from proxima.data import FieldError, LabeledCompletion, PreferencePair, Trajectory, UserError
from proxima.data.columns import Floats
from proxima.evaluate.intervals import Interval, Z
from proxima.evaluate.pair_metrics import over_questions
from proxima.model import LoadedModel, PackedModel, Policy
from proxima.model.files import model_files
from proxima.model.load import resolve_device
from proxima.runtime.launch.models import load_model, make_policy
from proxima.task.protocol import Row
from proxima.train import LogProbStage, TrainStack, stage_columns
from proxima.train.objectives import KtoObjective, PreferenceObjective
from proxima.train.offline.method import MEASURED_AT_ONCE, OfflineMethod, Progress
from proxima.train.offline.reference_cache import ReferenceCache

Item = PreferencePair | LabeledCompletion


@dataclass(frozen=True, kw_only=True)
class MeasuredItem:
    """Figures of a held-out item: of a pair those of both sides, of a labeled completion those of its own alone."""

    question: bytes  # the tokens of the prompt, which pairs of one question share
    reward: dict[str, float]  # implicit, reward units
    log_prob: dict[str, float]  # nats, summed
    loss: float | None = None  # of the pair alone; None where losses depend on other pairs


class PreferenceMethod(OfflineMethod[PreferenceConfig, Item]):
    """Completions that are preferred become more probable than the others, relative to a frozen reference; see
    `PreferenceObjective` and `KtoObjective`."""

    headline = "accuracy"

    def __init__(self, config: PreferenceConfig, tokenizer: Any, context: int) -> None:
        super().__init__(config, tokenizer, context)
        self.section = config.preference
        self.begins = True  # the weights are those that the run begins with
        self.policy: Policy | None = None
        if (cache := self.cache) is not None:  # refused before anything is written; made when the run begins
            missing = [place for place in (cache, *cache.parents) if not place.exists()]
            try:
                cache.mkdir(parents=True, exist_ok=True)
                for place in missing:
                    place.rmdir()
            except OSError as error:
                remedy, reason = "name another folder, or null for none", f"can't be made: {error.strerror}"
                raise FieldError("preference.cache", self.section.cache, reason, remedy=remedy) from None

    @property
    def cache(self) -> Path | None:
        """The folder of the reference's log-probs, where they are kept."""
        cache = self.section.cache if self.section.reference == "start" else None
        return None if cache is None else Path(cache).expanduser()

    def item(self, row: Row, number: int) -> Item:
        return self.config.item(number, row, self.tokenizer, self.context)

    def joined(self, items: list[Item]) -> list[Item]:
        """The mismatched completions of KTO, which only its loss reads."""
        kto = self.section.kto
        return items if kto is None or kto.anchor == "zero" else with_mismatched(items, self.context)

    def load(self, path: str | None) -> LoadedModel:
        self.begins = path is None
        if self.cache is not None:
            self.cache.mkdir(parents=True, exist_ok=True)
        return super().load(path)

    def model(self, loaded: LoadedModel) -> PackedModel:
        self.policy = make_policy(self.config.model, loaded)
        return self.policy

    def objective(self) -> Any:
        kto = self.section.kto
        return self.section.pair_objective() if kto is None else KtoObjective(spec=kto)

    def unmeasured(self, held_out: Sequence[Item]) -> str:
        """KTO's accuracy is that of couples of a good and a bad completion."""
        labels = {item.good for item in held_out if isinstance(item, LabeledCompletion)}
        if len(labels) != 1:
            return ""
        kind, other = ("good", "bad") if labels == {True} else ("bad", "good")
        return f"all {len(held_out)} held-out completions are {kind}: an accuracy needs {other} ones too"

    def prepare(self, items: list[Item], progress: Progress, *, held_out: bool = False) -> list[Item]:
        """The log-probs of the reference."""
        if self.section.reference == "none" or not items:
            return items
        sides = [side for item in items for side in _sides(item)]
        model = self.config.model
        known = model_files(model.path, model.revision)
        of_model = ("path", "dtype", "compute_dtype", "attention", "share_prompt", "log_prob_chunk")
        settings = {name: str(getattr(model, name)) for name in of_model}
        settings["device"] = resolve_device(model.device).type
        settings["tokens_per_micro_batch"] = str(self.config.train.tokens_per_micro_batch)
        lora = {} if model.lora is None else {"base of an adapter": "off"}
        cache = ReferenceCache(self.section.cache if known else None, known | settings | lora)
        found = iter(cache.log_probs(sides, lambda missing: self._reference(missing, progress)))
        return [
            _with_sides(item, [replace(side, reference_log_prob=next(found)) for side in _sides(item)])
            for item in items
        ]

    def _reference(self, trajectories: Sequence[Trajectory], progress: Progress) -> list[Floats]:
        """[T] log-probs under the model that the run begins with. It is the trained one before the first step, or, at
        any time, with the adapter off; otherwise it is loaded once more. As many are run at once as `measure` runs: the
        start's own log-probs are these to the bit, whatever rounding does, and no pair of it has a margin."""
        assert self.policy is not None
        lora = self.config.model.lora is not None
        policy = self.policy
        if not self.begins and not lora:
            policy = make_policy(self.config.model, load_model(self.config))
        stage, done = LogProbStage("reference_log_prob", policy, adapter=not lora), 0
        total = sum(map(len, trajectories))
        out: list[Floats] = []
        budget = self.config.train.tokens_per_micro_batch
        at_once = MEASURED_AT_ONCE * (2 if self.section.kto is None else 1)
        for part in (trajectories[i : i + at_once] for i in range(0, len(trajectories), at_once)):
            out += stage_columns(stage, part, budget, share_prompt=policy.share_prompt)[stage.column]
            done += sum(map(len, part))
            progress(done, total)
        return out

    def measure(self, stack: TrainStack, items: Sequence[Item]) -> list[MeasuredItem]:
        trajectories = [side for item in items for side in _sides(item)]
        log_probs = stack.log_prob(trajectories)
        if self.section.kto is not None:
            return [_measured_alone(item, x, self.section.kto.beta) for item, x in zip(items, log_probs, strict=True)]  # type: ignore[arg-type]
        objective: PreferenceObjective = self.section.pair_objective()
        batch = stack.model.pack(trajectories)
        pairs = objective.pairs(batch, torch.from_numpy(np.concatenate(log_probs)).to(batch.advantage.device))
        beta = objective.terms[0].beta
        rewards = [
            beta * (ours - theirs)
            for ours, theirs in ((pairs.chosen, pairs.reference_chosen), (pairs.rejected, pairs.reference_rejected))
        ]
        alone = not objective.whole_batch and not any(isinstance(term, Sft) for term in objective.terms)
        losses = [None] * len(items)
        if alone:
            weights = objective.weights or [1.0] * len(objective.terms)
            losses = sum(w * term(pairs) for w, term in zip(weights, objective.terms, strict=True)).tolist()  # type: ignore[union-attr]
        sums = [float(x.sum(dtype=np.float64)) for x in log_probs]
        return [
            MeasuredItem(
                question=item.chosen.prompt_tokens.tobytes(),  # type: ignore[union-attr]
                reward={"chosen": float(rewards[0][i]), "rejected": float(rewards[1][i])},
                log_prob={"chosen": sums[2 * i], "rejected": sums[2 * i + 1]},
                loss=losses[i],
            )
            for i, item in enumerate(items)
        ]

    def summarise(self, measured: Sequence[MeasuredItem]) -> dict[str, float]:
        out: dict[str, float] = {}
        if self.section.kto is None:
            out |= _share(measured, "reward").figures("accuracy")
            out |= _share(measured, "log_prob").figures("log_prob_accuracy")
            margins = [one.reward["chosen"] - one.reward["rejected"] for one in measured]
            out |= {"rewards/margins": float(np.mean(margins)), "answers": len(measured)}
            out["correct"] = sum(margin > 0 for margin in margins)
            out["questions"] = len({one.question for one in measured})
        else:
            good, bad = ([one.reward[side] for one in measured if side in one.reward] for side in SIDES)
            if good and bad:
                out |= _in_order(good, bad).figures("accuracy")
        for side in SIDES:
            for name in ("reward", "log_prob"):
                values = [getattr(one, name)[side] for one in measured if side in getattr(one, name)]
                if values:
                    out[f"{'rewards' if name == 'reward' else 'logps'}/{side}"] = float(np.mean(values))
        losses = [one.loss for one in measured if one.loss is not None]
        return out | ({"loss": float(np.mean(losses))} if losses else {})


SIDES = ("chosen", "rejected")


def with_mismatched(items: Sequence[Item], context: int) -> list[Item]:
    """Each labeled completion with the next one in the data that has another prompt and fits behind its own.

    Raises:
        UserError: there is none.
    """
    out: list[Item] = []
    for i, item in enumerate(items):
        assert isinstance(item, LabeledCompletion)
        own = item.completion
        others = (items[(i + step) % len(items)] for step in range(1, len(items)))
        fits = (
            one.completion  # type: ignore[union-attr]
            for one in others
            if not np.array_equal(one.completion.prompt_tokens, own.prompt_tokens)  # type: ignore[union-attr]
            and len(own.prompt_tokens) + len(one.completion.tokens) <= context  # type: ignore[union-attr]
        )
        found = next(fits, None)
        if found is None:
            reason = f"row {item.row}: no row with another prompt has a completion that fits behind its prompt"
            remedy = "add rows, or set preference.loss.0.anchor=zero"
            raise UserError(f"the anchor of kto needs such a row: {reason}", remedy=remedy)
        out.append(replace(item, mismatched=replace(found, prompt_tokens=own.prompt_tokens, group=own.group, sample=1)))
    return out


def _sides(item: Item) -> list[Trajectory]:
    """The sequences of an item that the reference scores."""
    if isinstance(item, PreferencePair):
        return [item.chosen, item.rejected]
    return [item.completion] if item.mismatched is None else [item.completion, item.mismatched]


def _with_sides(item: Item, sides: Sequence[Trajectory]) -> Item:
    if isinstance(item, PreferencePair):
        return replace(item, chosen=sides[0], rejected=sides[1])
    return replace(item, completion=sides[0], mismatched=sides[1] if len(sides) > 1 else None)


def _measured_alone(item: LabeledCompletion, log_prob: Floats, beta: float) -> MeasuredItem:
    reference = item.completion.reference_log_prob
    ours = float(log_prob.sum(dtype=np.float64))
    theirs = 0.0 if reference is None else float(reference.sum(dtype=np.float64))
    side = "chosen" if item.good else "rejected"
    return MeasuredItem(
        question=item.completion.prompt_tokens.tobytes(), reward={side: beta * (ours - theirs)}, log_prob={side: ours}
    )


def _share(measured: Sequence[MeasuredItem], name: str) -> Interval:
    """The share of pairs in which the chosen side has more, a tie counting half, with its interval over the questions:
    pairs of one question are not independent."""
    leads = [getattr(one, name)["chosen"] - getattr(one, name)["rejected"] for one in measured]
    names = {question: number for number, question in enumerate(dict.fromkeys(one.question for one in measured))}
    question = np.array([names[one.question] for one in measured])
    return over_questions((np.sign(leads) + 1) / 2, question)


def _in_order(good: Sequence[float], bad: Sequence[float]) -> Interval:
    """The share of (good, bad) couples in which the good one has more, a tie counting half: the area under the ROC
    curve, with the interval of DeLong et al., Biometrics 44 (1988)."""
    wins = (np.sign(np.subtract.outer(good, bad)) + 1) / 2
    value, spread = float(wins.mean()), 0.0
    for shares in (wins.mean(axis=1), wins.mean(axis=0)):
        spread += float(shares.var(ddof=1)) / len(shares) if len(shares) > 1 else 0.0
    half = Z * spread**0.5
    low, high = max(0.0, value - half), min(1.0, value + half)
    return Interval(value=value, low=low, high=high, method="delong", questions=len(good) + len(bad))
