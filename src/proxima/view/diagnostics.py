"""Warnings about a training record, each with its remedy. Pure: a record goes in, texts come out."""

from collections.abc import Callable

from proxima.runtime.observer import Record
from proxima.view.formatting import fixed, percent

REPEAT = 10  # steps before the same warning is given again


class Diagnostics:
    """Remembers which warnings were given, so that a lasting state does not produce one at every step."""

    def __init__(self) -> None:
        self._given: dict[str, int] = {}

    def of(self, record: Record) -> list[str]:
        """The warnings about a `train` record that were not given in the last ten steps."""
        step, texts = int(record["step"]), []
        for rule in RULES:
            text = rule(record)
            if text is not None and not 0 <= step - self._given.get(rule.__name__, -REPEAT) < REPEAT:
                self._given[rule.__name__] = step
                texts.append(text)
        return texts


def nothing_learned(record: Record) -> str | None:
    if not record.get("updates") or record.get("tokens/trained") != 0:
        return None
    text = f"every advantage is 0 (mean reward {fixed(record.get('reward/mean'))}), so the step taught nothing"
    return f"{text}; use questions that are neither always right nor always wrong, or more completions per prompt"


def often_truncated(record: Record) -> str | None:
    share = record.get("truncated_fraction") or 0.0
    text = f"{percent(share)} of the completions reached the length limit, often before their answer"
    return f"{text}; raise sampling.max_tokens" if share > 0.5 else None


def mostly_masked(record: Record) -> str | None:
    share = record.get("masked_fraction") or 0.0
    remedy = "lower train.optimizer.lr or train.updates_per_step, or widen the region"
    text = f"{percent(share)} of the tokens left the trust region and were masked, so little is learned from them"
    return f"{text}; {remedy}" if share > 0.5 else None


RULES: tuple[Callable[[Record], str | None], ...] = (nothing_learned, often_truncated, mostly_masked)
