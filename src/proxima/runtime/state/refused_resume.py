"""Why a resume with another config is refused, and what to do."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from proxima.config.comparable import ABSENT, Purpose, may_differ
from proxima.data import FieldError
from proxima.runtime.state.journal import Journal

BOUND = {  # why not even a user who accepts it may change a field, by section
    "model": "the checkpoint has the weights of that model",
    "critic": "the checkpoint has the weights of that critic",
    "seed": "the order of the data and all draws come from it",
    "task": "the data cursor counts its rows",
    "data.template_date": "the prompts of its steps show it",
    "data": "the data cursor counts its rows",
    "train.optimizer.kind": "the checkpoint has the state of that optimizer",
    "train.completions_per_prompt": "the groups that wait in the checkpoint have that many",
    "runtime": "the prompts in flight and the groups in the checkpoint were admitted under it",
    "": "a checkpoint may not fit another value",
}


def refusals(journal: Journal, differing: Sequence[tuple[str, Any, Any]]) -> list[FieldError]:
    """The errors for the fields that differ: path, value before, value now. Another algorithm is one error."""
    loss = [field for field in differing if field[0].startswith("algorithm.")]
    other = [field for field in differing if field not in loss]
    if any(path == "algorithm.surrogate.kind" for path, *_ in loss):
        errors = [_other_algorithm(journal, loss)]
    else:
        errors, other = [], [*differing]
    errors += [_refusal(journal, *field) for field in other]
    for error, following in pairwise(errors):
        if error.remedy == following.remedy:  # said once, by the last of them
            error.remedy = ""
    return errors


def _other_algorithm(journal: Journal, differing: Sequence[tuple[str, Any, Any]]) -> FieldError:
    (path, was, now) = next(field for field in differing if field[0] == "algorithm.surrogate.kind")
    names = [name.removeprefix("algorithm.") for name, *_ in differing if name != path]
    others = (
        f", and {len(names)} more fields differ ({', '.join(names[:3])}{', …' * (len(names) > 3)})" if names else ""
    )
    run = f"with which the run in {journal.path.parent} was started"
    reason = f"differs from {was!r}, {run}: it is another algorithm{others}"
    return FieldError(path, None if now is ABSENT else now, reason, remedy=_remedy(path))


def _remedy(path: str) -> str:
    other = "resume with that value, or start another run with folder=PATH"
    if may_differ(path, Purpose.CHANGE):
        other += "; --accept-changes resumes anyway, and says so in log, summary and report"
    return other


def _refusal(journal: Journal, path: str, was: Any, wanted: Any) -> FieldError:
    shown = "a config without it" if was is ABSENT else repr(was)
    reason = f"differs from {shown}, with which the run in {journal.path.parent} was started"
    if not may_differ(path, Purpose.CHANGE):
        section = next((name for name in BOUND if path == name or path.startswith(f"{name}.")), "")
        reason += f", and {BOUND[section]}"
    return FieldError(path, None if wanted is ABSENT else wanted, reason, remedy=_remedy(path))
