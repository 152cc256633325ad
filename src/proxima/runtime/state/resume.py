"""A resume: what would make it another run is refused, and everything is restored as it was at the last checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from proxima.config.comparable import ABSENT, Purpose, compared, differences, flat_values, may_differ
from proxima.config.scalars import in_one_line
from proxima.data import FieldError, FieldErrors, UserError
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.watch.observer import Observer
from proxima.train.checkpoint import Checkpoint, last_complete

MOVE_AWAY = "move it away, and a resume restores the steps up to the last checkpoint from metrics.jsonl"
BOUND = {  # why not even a user who accepts it may change a field, by section
    "model": "the checkpoint has the weights of that model",
    "critic": "the checkpoint has the weights of that critic",
    "seed": "the order of the data and all draws come from it",
    "task": "the data cursor counts its rows",
    "data": "the data cursor counts its rows",
    "train.optimizer.kind": "the checkpoint has the state of that optimizer",
    "train.completions_per_prompt": "the groups that wait in the checkpoint have that many",
    "runtime": "the prompts in flight and the groups in the checkpoint were admitted under it",
    "": "a checkpoint may not fit another value",
}


def rewind_run(folder: RunFolder, journal: Journal, observer: Observer) -> Checkpoint | None:
    """Restore journal and records as they were at the last whole checkpoint, which is returned, or at the start."""
    checkpoint = last_complete(folder.checkpoints, observer.warning)
    step = checkpoint.step if checkpoint else 0
    if checkpoint and journal.step < step:
        _restore_steps(journal, folder, checkpoint, observer)
    last = journal.step
    journal.rewind(step)
    journal.set("changes", [entry | {"step": min(entry["step"], step)} for entry in journal.get("changes") or ()])
    steps = [journal.metrics(number) or {} for number in range(1, step + 1)]
    evaluations = journal.get("evaluations") or ()
    for damage in (*metrics_damage(folder, [*steps, *evaluations], up_to=step), *files_damage(folder, journal)):
        observer.warning(damage)
    journal.set("evaluations", folder.rewind(step, steps, evaluations))
    if step < last:
        place = f"the checkpoint of step {step}" if checkpoint else "the start, because no checkpoint exists"
        repeated = "1 finished step is" if last - step == 1 else f"{last - step} finished steps are"
        observer.warning(f"resuming from {place}: {repeated} repeated; see checkpoint.every")
    return checkpoint


def _restore_steps(journal: Journal, folder: RunFolder, checkpoint: Checkpoint, observer: Observer) -> None:
    """Into a journal that ends before the checkpoint, the steps between, from metrics.jsonl."""
    first, last = journal.step + 1, checkpoint.step
    records = {r["step"]: r for r in folder.read_metrics() if r["kind"] == "train"}
    if lost := [step for step in range(first, last + 1) if step not in records]:
        raise UserError(
            f"{journal.path} ends at step {first - 1}, metrics.jsonl lacks step {lost[0]}, and {checkpoint.path} is of "
            f"step {last}",
            remedy="restore run.sqlite together with run.sqlite-wal, or delete the checkpoints after the journal's end",
        )
    journal.restore_steps([records[step] for step in range(first, last + 1)], checkpoint.facts["cursor"])
    observer.warning(
        f"run.sqlite ended at step {first - 1}: was it copied without run.sqlite-wal? Steps {first} to {last} are "
        "restored from metrics.jsonl; what became of their prompts is in rollouts/ alone"
    )


def check_journal(journal: Journal) -> None:
    """Refuse a journal whose content is not what was written: it decides what is trained next.

    Raises:
        UserError: names the parts, and the remedy.
    """
    if damage := journal.checksums.damage():
        parts = ", ".join(damage[:3]) + (f" and {len(damage) - 3} more" if len(damage) > 3 else "")
        raise UserError(f"{journal.path} is damaged ({parts}): its content is not what was written", remedy=MOVE_AWAY)


def metrics_damage(folder: RunFolder, records: Sequence[Mapping[str, Any]], *, up_to: int) -> list[str]:
    """A warning if metrics.jsonl differs from the journal's records; a resume writes it again."""
    expected = {(r["kind"], r["step"]): r for r in records}
    lines = [(r.get("kind"), r.get("step"), r) for r in folder.read_metrics()]
    wrong = [step for kind, step, r in lines if expected.get((kind, step), r) != r]
    wrong += [step for kind, step, _ in lines if kind not in ("train", "eval") or not isinstance(step, int)]
    if not wrong:
        return []
    return [f"{folder.metrics}: the record of step {wrong[0]} was damaged; it is restored from run.sqlite"]


def files_damage(folder: RunFolder, journal: Journal) -> list[str]:
    """A warning if a finished file is missing or has another size; their content is what `proxima check` reads."""
    wrong = []
    for name, checksum in journal.checksums.read().items():
        if name.startswith(("rollouts/", "evals/")):
            place = folder.path / name
            if not place.is_file():
                wrong.append(f"{name} is missing")
            elif place.stat().st_size != checksum.size:
                wrong.append(f"{name} is damaged")
    if not wrong:
        return []
    more = f", and {len(wrong) - 1} other files" if len(wrong) > 1 else ""
    return [f"{wrong[0]}{more}: this run continues without, a replay can't; see proxima check {folder.path}"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A field, or what a run reads, that is not what it was when the run was started."""

    field: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.field}={in_one_line(self.now)} (was {in_one_line(self.before)})"


def check_resume(journal: Journal, config: Any, *, accept: bool = False) -> list[Change]:
    """Record the config in a new journal; refuse a resume whose config differs in fields that may not. With `accept`,
    the user accepts differences where a checkpoint fits the other value.

    Returns: the accepted differences, for `record_changes`.

    Raises:
        FieldErrors: names each field that differs, both values, and the remedy.
    """
    now = compared(flat_values(config), Purpose.RESUME)
    before = journal.get("config")
    if before is None:
        journal.set("config", now)
        return []
    differing = list(differences(before, now, Purpose.RESUME))
    refused = [field for field in differing if not (accept and may_differ(field[0], Purpose.CHANGE))]
    if refused:
        raise FieldErrors(*(_refusal(journal, *field) for field in refused))
    changed = [(path, [None if value is ABSENT else value for value in values]) for path, *values in differing]
    return [Change(field=path, before=was, now=new) for path, (was, new) in changed]


def _refusal(journal: Journal, path: str, was: Any, wanted: Any) -> FieldError:
    shown = "a config without it" if was is ABSENT else repr(was)
    reason = f"differs from {shown}, with which the run in {journal.path.parent} was started"
    other = "resume with that value, or start another run with folder=PATH"
    if may_differ(path, Purpose.CHANGE):
        other += "; --accept-changes resumes all the same, and says so in log, summary and report"
    else:
        section = next((name for name in BOUND if path == name or path.startswith(f"{name}.")), "")
        reason += f", and {BOUND[section]}"
    return FieldError(path, None if wanted is ABSENT else wanted, reason, remedy=other)


def record_changes(journal: Journal, config: Any, changes: Sequence[Change]) -> None:
    """Go on with another config from here on, and keep what the former one was."""
    if changes:
        entry = {"step": journal.step, "changes": [asdict(change) for change in changes]}
        entries = journal.get("changes") or []
        if entries[-1:] != [entry]:  # a kill may have come between the two
            journal.set("changes", [*entries, entry])
        journal.set("config", compared(flat_values(config), Purpose.RESUME))


def change_notes(journal: Journal) -> list[str]:
    """A warning for each time that the run was resumed as another one: nobody shall take it for an unbroken run."""
    return [
        f"resumed after step {entry['step']} with other settings: "
        f"{', '.join(str(Change(**change)) for change in entry['changes'])}; the steps before were made with the former"
        for entry in journal.get("changes") or ()
    ]


def schedule_note(journal: Journal, schedule: str, now: int) -> str | None:
    """A warning if `now` is another number of steps than at the start, which changes the learning rate schedule in the
    middle of the run."""
    started = journal.get("steps")
    if started is None:
        journal.set("steps", now)
        return None
    if started == now or schedule == "constant":
        return None
    return (
        f"train.steps={now}, and the run was started with {started}: from here on the {schedule} learning "
        f"rate falls towards step {now}, unlike in a run of {now} steps from the start; train.schedule=constant avoids "
        "the difference"
    )
