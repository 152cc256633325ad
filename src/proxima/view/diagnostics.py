"""Warnings about a training record, each with its remedy; pure functions from a record to texts."""

from collections.abc import Callable

from proxima.runtime.watch.observer import Record
from proxima.runtime.watch.step_notes import VARIED
from proxima.view.episode_lines import limits_reached
from proxima.view.formatting import fixed, percent


def warnings_about(record: Record) -> list[str]:
    """Return the warnings about a `train` record."""
    return [text for rule in RULES if (text := rule(record)) is not None]


def nothing_learned(record: Record) -> str | None:
    if not record.get("updates") or record.get("tokens/trained") != 0:
        return None
    moved = "only momentum moved the weights (train.on_zero_gradient=skip keeps them)"
    weights = "the weights are unchanged" if record.get("updates/skipped") else moved
    reward = fixed(record.get("reward/mean"))
    text = f"every advantage is 0 (mean reward {reward}), so the step taught nothing and {weights}"
    remedy = VARIED
    if "episode/cut" in record and not record.get("reward/mean"):
        sources = "get_reward, reward or Reply.reward; an agent returns it"
        remedy = f"check that the environment gives a reward ({sources}), or {remedy}"
    return f"{text}; {remedy}"


def often_truncated(record: Record) -> str | None:
    share = record.get("truncated_fraction") or 0.0
    text = "completions reached the length limit, often before their answer; raise sampling.max_tokens"
    if "episode/cut" in record:
        text = f"episodes reached {limits_reached(share, record, 'sampling.max_tokens')}"
    return f"{percent(share)} of the {text}" if share > 0.5 else None


def mostly_masked(record: Record) -> str | None:
    rejected = record.get("correction/rejected_fraction") or 0.0  # has its own warning; top_entropy masks intentionally
    share = (record.get("masked_fraction") or 0.0) - rejected
    remedy = "lower train.optimizer.lr or train.updates_per_step, or widen the region"
    text = f"{percent(share)} of the tokens left the trust region and were masked, so little is learned from them"
    return f"{text}; {remedy}" if share > 0.5 else None


RULES: tuple[Callable[[Record], str | None], ...] = (nothing_learned, often_truncated, mostly_masked)
