"""Compares a run with what it was started with: its settings, the content of its inputs, what decides the last bits of
its numbers. A resume that would make it another run is refused (`refuse` words the errors); accepted changes are
recorded.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TypedDict

import torch

from proxima.config.comparable import ABSENT, Purpose, compared, differences, flat_values, may_differ
from proxima.config.outcomes import Outcome, decided_in, dtype_outcomes, with_values
from proxima.config.recipe_reader import read_yaml
from proxima.config.resolved import Resolved
from proxima.config.scalars import in_one_line
from proxima.config.schema import RunConfig
from proxima.config.sections.data import played_in, sources_in
from proxima.config.sections.model import ModelConfig
from proxima.config.sections.offline import OfflineConfig
from proxima.data import FieldError, FieldErrors, UserError
from proxima.environment import ENVIRONMENTS
from proxima.environment.agent_kinds import asked_kind
from proxima.evaluation.held_out import HeldOutSet
from proxima.model.files import model_files, weight_files
from proxima.model.log_prob import ROWS_ON_CPU
from proxima.model.precision import device_kind
from proxima.model.pretrained import resolve_device
from proxima.reward import REWARDS
from proxima.runtime.resume.refuse import refusals
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.replay import StoredRollouts
from proxima.system.foreign_folder import file_sha256
from proxima.system.machine import compiler, package_version
from proxima.system.user_modules import user_module_file
from proxima.task.held_out_part import image_sha
from proxima.task.prompts import PromptSource
from proxima.task.protocol import EmptyPromptError, PlayedTask, Rows, is_played, play_of
from proxima.training.checkpoint import damage, read_checkpoint

ROWS_READ = 20_000  # a larger data set is sampled at even distances
LAST_BITS = (
    "model.device",
    "model.gradient_checkpointing",
    "model.compile",
    "model.log_prob_chunk",
    "engine.prefill_tokens",
)
DTYPES = ("model.compute_dtype", "engine.dtype")
FIELD = "data.template_date"
STARTED = "the day on which the run was started"
KEPT = "the run was started with it"


class Change(TypedDict):
    """A field or an input that has changed since the run was started, as the journal keeps it."""

    field: str
    before: Any
    now: Any


def check_resume(journal: Journal, config: RunConfig | OfflineConfig, *, accept: bool = False) -> list[Change]:
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
        raise FieldErrors(*refusals(journal, refused))
    return [Change(field=path, before=_or_none(was), now=_or_none(new)) for path, was, new in differing]


def _or_none(value: object) -> object:
    """A value as the journal keeps it."""
    return None if value is ABSENT else value


def record_changes(journal: Journal, config: RunConfig | OfflineConfig, changes: Sequence[Change]) -> None:
    """Continue with another config from here on, and record the former one."""
    if not changes:
        return
    entry = {"step": journal.step, "changes": list(changes)}
    entries = journal.get("changes") or []
    if entries[-1:] != [entry]:  # a kill may have come between the two
        journal.set("changes", [*entries, entry])
    journal.set("config", compared(flat_values(config), Purpose.RESUME))


def change_notes(journal: Journal) -> list[str]:
    """A warning for each resume with changes, so that the run is not taken for an uninterrupted one."""

    notes = []
    for entry in journal.get("changes") or ():
        settings = ", ".join(map(_shown, entry["changes"]))
        lead = f"resumed after step {entry['step']} with other settings"
        notes.append(f"{lead}: {settings}; the steps before were made with the former")
    return notes


def _shown(change: Change) -> str:
    return f"{change['field']}={in_one_line(change['now'])} (was {in_one_line(change['before'])})"


def start_notes(journal: Journal, config: RunConfig | OfflineConfig, steps: int) -> list[str]:
    """Warnings about what has changed since a run of that many steps began."""
    schedule = schedule_note(journal, config.train.schedule, steps)
    notes = [*change_notes(journal), schedule, numerics_note(journal, config)]
    return [note for note in notes if note]


def schedule_note(journal: Journal, schedule: str, now: int) -> str | None:
    """A warning if `now` differs from the number of steps at the start, which changes the learning rate schedule in the
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


def _on_cpu(values: Mapping[str, Any]) -> bool:
    return resolve_device(str(values.get("model.device", "auto"))).type == "cpu"


def numerics_note(journal: Journal, config: Any) -> str | None:
    """A warning if settings or versions that change the last bits of the numbers differ from those in the journal."""
    values = flat_values(config)
    now = _numerics(values)
    unnamed = {name: now.get(name) for name in ("compiler", "processor")}  # older journals don't name these
    before = unnamed | (journal.get("numerics") or now)
    journal.set("numerics", now)
    changed = []
    for name, value in now.items():
        if before.get(name) != value:
            changed.append(f"{name}={value} (was {before.get(name)})")
    if not changed:
        return None
    differs = "differs in the last bits from one that was never interrupted"
    effect = f"the run continues, but {differs}"
    if before["processor"] != now["processor"]:
        dtypes = " and ".join(f"{path}={values[path]}" for path in DTYPES if path in values)
        effect = f"the run keeps {dtypes}, continues, but {differs}"
    return f"{', '.join(changed)}: {effect}"


def _numerics(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings and versions that change the last bits; `values` are those of the config."""
    now = {name: values[name] for name in LAST_BITS if name in values}
    now["runtime.threads"] = torch.get_num_threads()
    if "model.log_prob_chunk" in now and now["model.log_prob_chunk"] is None:
        now["model.log_prob_chunk"] = ROWS_ON_CPU if _on_cpu(values) else "by the GPU's memory"
    for name in ("torch", "transformers"):
        now[name] = package_version(name)
    if "bfloat16" in map(values.get, DTYPES) and not torch.cuda.is_available():
        now["compiler"] = " ".join(compiler()) or None
    now["processor"] = device_kind(str(values.get("model.device", "auto")))
    return now


# ---- the content of the inputs ---------------------------------------------------------------------------------------


def check_inputs(journal: Journal, now: Mapping[str, str], *, accept: bool = False) -> list[str]:
    """Refuse inputs that differ from those in the journal; if the journal names no inputs yet, record these.

    Returns: the rewards, environments and agents that differ and that the user accepts, which the caller records.

    Raises:
        UserError: names what differs, and the remedy.
    """
    before = journal.get("inputs")
    if before is None:
        journal.set("inputs", dict(now))
        return []
    names = {**before, **now}
    changed = [name for name in names if before.get(name) != now.get(name)]
    acceptable = [name for name in changed if is_reward(name) or ".environment: " in name]
    accepted = acceptable if accept else []
    differing = [name for name in changed if name not in accepted]
    if differing:
        remedy = "restore it, or start another run with folder=PATH"
        if set(differing) <= set(acceptable):
            remedy += "; --accept-changes resumes with it, and says so in log, summary and report"
        place = f"since the run in {journal.path.parent} was started"
        raise UserError(f"{', '.join(differing)}: changed {place}", remedy=remedy)
    return accepted


def is_reward(name: str) -> bool:
    """True for the name of an input that defines a reward of the training, or of one of its sources."""
    return name.startswith("reward.") or (name.startswith("task.") and ".reward." in name)


def input_hashes(
    config: RunConfig, source: PromptSource | StoredRollouts, held_out: Sequence[HeldOutSet]
) -> dict[str, str]:
    """SHA-256 of every input, keyed by its name in messages: each file of the model, the teacher and reward models, the
    training questions (in a replay, the rollouts), the held-out questions, and each file outside proxima that defines a
    reward, an environment or a tool (but not the modules that it imports)."""
    named = model_hashes(config.model)
    distillation = config.algorithm.distillation
    if distillation is not None:
        named |= _hashes("algorithm.distillation.path", distillation.path)
    if isinstance(source, PromptSource):
        named["task: its rows"] = rows_sha(source.rows)
    else:
        named |= source.hashes
    named |= _reward_hashes("reward", config.reward)
    for sources in sources_in(config).values():
        for part in sources:
            named |= _reward_hashes(part.reward_path, part.reward)
    for number, spec in enumerate(config.eval.sets):
        named |= _reward_hashes(f"eval.sets.{number}.reward", spec.reward)
    for path, task in played_in(config).items():
        if is_played(task):
            named |= environment_hashes(path, play_of(task))
    for questions in held_out:
        name = f"eval.sets {questions.name}" if questions.name else "eval.task"
        named[f"{name}: its rows"] = rows_sha(questions.rows)
    return named


def model_hashes(model: ModelConfig) -> dict[str, str]:
    """SHA-256 of each file of the model, and of the adapter that LoRA starts from, keyed by its name in messages."""
    named = _hashes("model.path", model.path, model.revision)
    if model.lora is None or model.lora.path is None:
        return named
    return named | _hashes("model.lora.path", model.lora.path, files=weight_files)


def _hashes(field: str, path: str, revision: str | None = None, files: Any = model_files) -> dict[str, str]:
    """SHA-256 of the files of a model, keyed by their names in messages.

    Raises:
        FieldError: the model is in a checkpoint of another run, and differs from what was written.
    """
    place = Path(path).expanduser()
    why = None
    if read_checkpoint(place.parent) is not None:
        why = damage(place.parent, place.name)
    if why is not None:
        remedy = "restore the file from a copy; if you changed it, copy the model out of its checkpoint"
        raise FieldError(field, path, f"differs from what the run wrote: {why}", remedy=remedy)
    return {f"{field}: {name}": value for name, value in files(path, revision).items()}


def _reward_hashes(path: str, rewards: Sequence[Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for n, reward in enumerate(rewards):
        if REWARDS.holds(reward, "model"):
            named |= _hashes(f"{path}.{n}.path", reward.path, reward.revision)
        file = _reward_file(reward)
        if file is not None:
            named[f"{path}.{n}: {file.name}"] = file_sha256(file)
    return named


def _reward_file(reward: Any) -> Path | None:
    """The file of a reward function, or of a reward class outside proxima."""
    if REWARDS.holds(reward, "function", "function_batch"):
        return Path(reward.file)
    module = type(reward).__module__
    if module.startswith("proxima."):
        return None
    source = getattr(sys.modules.get(module), "__file__", None)
    return None if source is None else Path(source)


def environment_hashes(path: str, play: PlayedTask) -> dict[str, str]:
    """SHA-256 of each file outside proxima that defines the environment, the agent or a tool of a task; and what its
    kind says it plays with, such as the image of its container or the version of a library elsewhere."""
    given = play.environment
    arguments = dict(given) if isinstance(given, Mapping) else {"kind": given}
    kind = arguments.pop("kind", None)
    references = [ENVIRONMENTS.references.get(str(kind), str(kind)), *play.tools]
    named: dict[str, str] = {}
    for reference in references:
        module, colon, _ = reference.partition(":")
        if not colon or module.startswith("proxima"):
            continue
        file = user_module_file(module)
        if file is not None:
            named[file.name] = file_sha256(file)
    inputs = getattr(asked_kind(kind, arguments), "inputs", dict)
    named |= inputs()
    return {f"{path}.environment: {name}": value for name, value in named.items()}


def rows_sha(rows: Rows) -> str:
    """SHA-256 of the rows of a task; of a large task, an evenly spaced sample is hashed."""
    count = len(rows)
    numbers: Iterable[int] = range(count)
    if count > ROWS_READ:
        numbers = [i * count // ROWS_READ for i in range(ROWS_READ)]
    digest = sha256(str(count).encode())
    for number in numbers:
        try:
            row = rows[number]
            content = [row.messages, row.answer, row.metadata, *map(image_sha, row.images)]
            if row.arguments:
                content.append(row.arguments)
        except EmptyPromptError as error:  # skipped by the run
            content = [error.field, error.value]
        digest.update(json.dumps(content, sort_keys=True, default=repr).encode())
    return digest.hexdigest()


def check_replayed_rewards(before: Mapping[str, str], rewards: Sequence[Any], rollouts: str) -> None:
    """Refuse a replay that would score held-out answers with another version of a reward file than the run in
    `rollouts`: the figures would not come from the same reward. `before` are the inputs of that run; a file that they
    don't name is not compared.

    Raises:
        FieldError: names the file, and the remedy.
    """
    now = _reward_hashes("reward", rewards)
    differing = [name for name, value in now.items() if before.get(name, value) != value]
    if differing:
        reason = f"was trained with another version of {', '.join(differing)}, which would score the held-out answers"
        remedy = "restore the file, or set eval.task=null"
        raise FieldError("rollouts", rollouts, reason, remedy=remedy)


# ---- what a run decides at its start ---------------------------------------------------------------------------------


def date_of_run(folder: RunFolder) -> str | None:
    """The date of the run in a folder, which the chat template reads; None if it has none, or there is no run."""
    data = written_config(folder).get("data") or {}
    date = data.get("template_date")
    return None if date is None else str(date)


def with_date(config: Any, resolved: Resolved[Any] | None, date: str) -> tuple[Any, Resolved[Any] | None]:
    """The config, and the same with provenance, with this date for the chat template."""
    return with_values(config, resolved, {FIELD: date}, {FIELD: STARTED})


def dtypes_of_run(config: Any, folder: RunFolder | None) -> list[Outcome]:
    """The dtypes that `auto` becomes in a run; one that resumes in a folder keeps those that it was started with, also
    on another kind of processor."""
    kept: dict[str, str] = {}
    if folder is not None:
        kept = decided_in(written_config(folder), config)
    outcomes = []
    for outcome in dtype_outcomes(config):
        value = kept.get(outcome.path)
        if value is not None:
            outcome = Outcome(outcome.path, value, KEPT)
        outcomes.append(outcome)
    return outcomes


def written_config(folder: RunFolder) -> Mapping[str, Any]:
    """The config.yaml of the run in a folder; empty if there is no run."""
    if not folder.config.is_file():
        return {}
    written: Any = read_yaml(folder.config).to_python()
    return written or {}
