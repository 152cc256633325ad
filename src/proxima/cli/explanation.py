"""The text and the JSON of `proxima explain`."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from proxima.cli.parameters import print_json, truncated
from proxima.cli.prose import WIDTH, laid_out, wrapped
from proxima.config.batch_arithmetic import ASSUMED_PROMPT, BatchArithmetic, ExampleStep
from proxima.config.data_here import open_data_here
from proxima.config.describe import first_sentence, setting
from proxima.config.families import family_name
from proxima.config.outcomes import explained_outcomes, outcome_lines
from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima.config.resolved import Resolved, ResolvedValue, dump
from proxima.config.scalars import in_one_line
from proxima.config.schema import RunConfig
from proxima.config.validate import check, to_do, warnings
from proxima.environment.agent_kinds import agent_class
from proxima.reward.base import as_reward
from proxima.rollout.sources import sampling_of, settings_of
from proxima.runtime.state.summary import algorithm_name
from proxima.system.user_files import find_recipe
from proxima.task.held_out_part import SplitTask, possible_share
from proxima.task.mix import held_out_part, sources_of
from proxima.task.protocol import Rows
from proxima.view.formatting import output_width

VALUE_WIDTH = 36  # columns of a value
INDENT = " " * 9  # before the texts of the summary


def explain_recipe(
    recipe: str, overrides: Sequence[str], *, everything: bool, as_yaml: bool, import_code: bool, as_json: bool
) -> None:
    """Print the summary and the values of the recipe, then raise ConfigError if it has mistakes."""
    resolved = resolve(recipe, overrides, root=None, import_code=import_code)
    pending = to_do(resolved)  # a warning here, an error in `train`
    problems = [problem for problem in check(resolved) if problem not in pending]
    estimate = arithmetic_of(resolved)
    if as_yaml:
        print(dump(resolved), end="")
        for problem in pending:
            print(f"WARNING {problem}", file=sys.stderr)
    elif as_json:
        print_json(facts_of(resolved, estimate))
    else:
        print(text_of(resolved, estimate, width=output_width(sys.stdout), everything=everything))
    if problems:  # after the values, among which the mistake is easier to see
        raise ConfigError(problems)
    if estimate.data.refused is not None:
        raise estimate.data.refused


def arithmetic_of(resolved: Resolved[Any]) -> BatchArithmetic:
    """The batch arithmetic, with the data that are on this machine."""
    return BatchArithmetic(resolved, open_data_here(resolved, to_do(resolved)))


def text_of(
    resolved: Resolved[Any],
    estimate: BatchArithmetic | None = None,
    *,
    width: int | None = None,
    everything: bool = False,
) -> str:
    """The comment of the recipe, the summary and the remarks, then the values: those that differ from the defaults, or
    `everything`."""
    estimate = estimate or arithmetic_of(resolved)
    blocks = [trained_block(resolved, estimate.data.rows.get("task")), _batch_block(estimate)]
    blocks.append(f"plan     proxima plan {resolved.recipe or 'RECIPE'}: memory, time, and what binds")
    blocks += [f"sends    {line}" for line in sent_by(resolved.config)]
    blocks += [f"auto     {line}" for line in outcome_lines(explained_outcomes(resolved.config))]
    remarks = [f"note     {note}" for note in estimate.notes]
    remarks += [f"warning  {problem}" for problem in (*warnings(resolved), *to_do(resolved), *estimate.warnings)]
    columns = min(width or WIDTH, WIDTH)
    lines = chain.from_iterable(block.splitlines() for block in [*blocks, *remarks])
    summary = "\n".join(wrapped(line, columns, INDENT) for line in lines)
    header = laid_out(header_of(resolved.recipe), columns)
    entries = resolved.entries
    values = values_table(entries, width) if everything else differing_values(entries, columns)
    return "\n\n".join(filter(None, [header, summary, values]))


def facts_of(resolved: Resolved[Any], estimate: BatchArithmetic | None = None) -> dict[str, Any]:
    """`explain` as data: `header`, `values`, `batch`, `sends`, `auto`, `notes` and `warnings`."""
    estimate = estimate or arithmetic_of(resolved)
    return {
        "header": header_of(resolved.recipe),
        "values": [{"path": e.path, "value": e.value, "source": e.source, "help": e.help} for e in resolved.entries],
        "batch": vars(estimate.batch),
        "sends": sent_by(resolved.config),
        "auto": [asdict(outcome) for outcome in explained_outcomes(resolved.config)],
        "notes": estimate.notes,
        "warnings": [str(problem) for problem in (*warnings(resolved), *to_do(resolved), *estimate.warnings)],
    }


def sent_by(config: Any) -> list[str]:
    """What the rewards send to which servers, a line each; those of an evaluation, too."""
    specs = [*(getattr(config, "reward", None) or ()), *(getattr(config.eval, "reward", None) or ())]
    named = [f"{spec.label}: {spec.sends()}" for spec in map(as_reward, specs) if spec.sends()]
    return list(dict.fromkeys(named))


def header_of(recipe: str | None) -> str:
    """The comment that the recipe's file begins with: source, published figures, machine, commands; may be empty."""
    if recipe is None:
        return ""
    file = find_recipe(recipe)
    if not file.is_file():
        return ""
    lines = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        if "yaml-language-server" not in line:
            text = line.removeprefix("#").removeprefix(" ").rstrip()
            lines.append("".join(char for char in text if char.isprintable()))
    return "\n".join(lines).strip("\n")


def differing_values(entries: Sequence[ResolvedValue], width: int) -> str:
    """Path, value and source of the values that differ from the defaults or were given on the command line, and the
    number of the others."""
    shown = [entry for entry in entries if not entry.is_default or entry.origin == "command line"]
    values = [in_one_line(entry.value) for entry in shown]
    path_width = _widest(entry.path for entry in shown)
    value_width = min(_widest(values), VALUE_WIDTH)
    longest_word = _widest(chain.from_iterable(entry.source.split() for entry in shown))
    hang = max(min(path_width + value_width + 4, width - longest_word), 0)  # so that no path of a file is broken
    lines = []
    for entry, value in zip(shown, values, strict=True):
        left = f"{entry.path:<{path_width}}  {truncated(value, value_width):<{value_width}}"
        lines.append(wrapped(f"{left}  {entry.source}".rstrip(), width, " " * hang))
    others = len(entries) - len(shown)
    lines.append(f"{others} more values have their defaults; --all shows them, with the meaning of each")
    return "\n".join(lines)


def _widest(texts: Iterable[str]) -> int:
    """The length of the longest text; 0 without one."""
    return max(map(len, texts), default=0)


def values_table(entries: Sequence[ResolvedValue], width: int | None = None) -> str:
    """Four columns: path, value, source, meaning. Lines are cut at `width`; None leaves them whole."""
    values = [truncated(in_one_line(entry.value), VALUE_WIDTH) for entry in entries]
    path_width = _widest(entry.path for entry in entries)
    value_width = _widest(values)
    source_width = _widest(entry.source for entry in entries)
    lines = []
    for entry, value in zip(entries, values, strict=True):
        left = f"{entry.path:<{path_width}}  {value:<{value_width}}  {entry.source:<{source_width}}"
        line = f"{left}  {first_sentence(entry.help)}".rstrip()
        lines.append(line if width is None else truncated(line, width))
    return "\n".join(lines)


def trained_block(resolved: Resolved[Any], rows: Rows | None = None) -> str:
    """Summarise what is trained, on which data, and by which reward: `train cppo: models/m on arithmetic, rewarded by
    number`; `rows` are those of the task, if they could be opened."""
    config = resolved.config
    kinds = {entry.path: str(entry.value) for entry in resolved.entries if entry.path.endswith(".kind")}

    def named(section: str) -> str:
        return " + ".join(kind for path, kind in kinds.items() if re.fullmatch(rf"{section}(\.\d+)?\.kind", path))

    held_out = f"held out: {named('eval.task') or _nothing(config.task, rows)}"
    if setting(config.eval.task, "part") == "held_out":
        held_out += ", its held-out part"
    what = f"{config.model.path} on {named('task')}"
    if not isinstance(config, RunConfig):
        return f"{family_name(config):<9}{what}; {held_out}"
    if config.reward:
        what += f", rewarded by {named('reward')}"
    first = f"train    {algorithm_name(config)}: {what}; {held_out}"
    return "\n".join([first, *source_lines(config), *form_lines(config)])


def source_lines(config: RunConfig) -> list[str]:
    """A line for each source of a mix: what its prompts are played with, and scored by."""
    lines = []
    for source in sources_of(config.task):
        if not source.name:
            continue
        limits = settings_of(source, config.episode)
        sampling = sampling_of(source, config.sampling)
        rewards = " + ".join(as_reward(spec).label for spec in source.reward or config.reward)
        played = "answered once"
        if source.played:
            kind = _kind_of(source.play.environment or source.play.tools)
            name = kind if isinstance(kind, str) else ", ".join(kind)
            played = f"played in {name}, {limits.turns} turns at most"
        length = f"{sampling.max_tokens} tokens each at temperature {sampling.temperature:g}"
        lines.append(f"source   {source.name}: {played}, {length}, rewarded by {rewards}")
    return lines


def form_lines(config: RunConfig) -> list[str]:
    """With agents, what becomes of a form that they ask an answer to have; else nothing."""
    played = [source.play.environment for source in sources_of(config.task) if source.played]
    if all(agent_class(_kind_of(environment)) is None for environment in played):
        return []
    asked = "a form that they ask for (response_format and the like)"
    if getattr(config.engine, "grammars", False):
        return [f"agents   {asked} is kept by the engine's grammar; the tokens of such an answer are not trained"]
    return [f"agents   {asked} is refused by name: the engine has no grammars"]


def _kind_of(environment: Any) -> Any:
    """The kind of an environment, which may be written with further fields."""
    return environment["kind"] if isinstance(environment, Mapping) else environment


def _nothing(task: Any, rows: Rows | None) -> str:
    """Says that nothing is evaluated, and what to set: a share that leaves no part empty."""
    if held_out_part(task) is not None:
        return "nothing, because eval.task is null (remove it, and the part that task.held_out leaves out is evaluated)"
    if not isinstance(task, SplitTask):
        return "nothing (set eval.task)"
    share = 0.1 if rows is None else possible_share(rows)
    if share is None:
        return "nothing (set eval.task; too few questions to hold some out)"
    return f"nothing (set task.held_out={share:g}, or eval.task)"


def _batch_block(estimate: BatchArithmetic) -> str:
    batch = estimate.batch
    if isinstance(batch, ExampleStep):
        lengths = f"examples have about {batch.mean:,} tokens, the longest of those read has {batch.longest:,}"
        return f"batch    {batch}\n         {lengths}; a step forwards about {batch.tokens:,}"
    prompt = f"prompts are assumed to have {ASSUMED_PROMPT} tokens, as a note says"
    if estimate.prompt is not None:
        prompt = f"prompts have up to {estimate.prompt:,} tokens"
    forwards = f"a step forwards up to {batch.tokens:,} tokens, the longest sequence has {batch.longest:,}"
    return f"batch    {batch}\n         {prompt}; {forwards}"
