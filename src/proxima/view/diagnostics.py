"""What a record's numbers mean for the result, said in a line with the remedy. Pure: a record goes in, texts come
out."""

from collections.abc import Callable, Mapping
from typing import Any

from proxima.view.formatting import fixed, percent

Record = Mapping[str, Any]
AGAIN = 10  # steps before the same remark is made once more


class Diagnostics:
    """Remembers what was said, so that a lasting state is not said at every step."""

    def __init__(self) -> None:
        self._said: dict[str, int] = {}

    def of(self, record: Record) -> list[str]:
        """The remarks on a `train` record that were not made in the last ten steps."""
        step, texts = int(record["step"]), []
        for name, rule in RULES.items():
            text = rule(record)
            if text is not None and not 0 <= step - self._said.get(name, -AGAIN) < AGAIN:
                self._said[name] = step
                texts.append(text)
        return texts


def _number(record: Record, key: str) -> float:
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0


def nothing_learnt(record: Record) -> str | None:
    if not _number(record, "updates") or record.get("tokens/trained") != 0:
        return None
    return (
        f"no completion has an advantage other than 0 (mean reward {fixed(record.get('reward/mean'))}): the step "
        "taught nothing; "
        "use questions that are neither always right nor always wrong, or more completions a prompt"
    )


def cut_off(record: Record) -> str | None:
    share = _number(record, "truncated_fraction")
    if share <= 0.5:
        return None
    return (
        f"{percent(share)} of the completions ended at the length limit, often before their answer; raise "
        "sampling.max_tokens"
    )


def mostly_masked(record: Record) -> str | None:
    share = _number(record, "masked_fraction")
    if share <= 0.5:
        return None
    return (
        f"{percent(share)} of the tokens left the trust region and were masked: little is learnt from them; "
        "lower train.optimizer.lr or train.updates_per_step, or widen the region"
    )


RULES: dict[str, Callable[[Record], str | None]] = {
    "nothing_learnt": nothing_learnt,
    "cut_off": cut_off,
    "mostly_masked": mostly_masked,
}
