"""Scores the texts of a file with rewards, without a model: `proxima reward score`."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any

import numpy as np

from proxima.cli.agreement import Agreement, Labels, agreement, split_labels
from proxima.cli.parameters import CHATS, COMPLETION, PROMPT, TextColumns
from proxima.config.describe import class_at
from proxima.config.resolution import resolve
from proxima.config.resolved import Resolved
from proxima.config.sections.runtime import RuntimeConfig
from proxima.data import FieldError, UserError, require
from proxima.data.episode import Episode
from proxima.data.errors import counted
from proxima.data.flow import Completion, Group, Prompt
from proxima.data.json_reader import load_json
from proxima.data.kinds import Slot
from proxima.model.pretrained import load_tokenizer, without_progress_bars
from proxima.reward import REWARDS
from proxima.reward.function import Function
from proxima.reward.length import Length, Overlong
from proxima.reward.model_reward import ModelReward
from proxima.reward.runner import RewardRunner
from proxima.rollout.reward_checks import ReferenceAnswers, require_columns
from proxima.system.atomic_files import write_atomic
from proxima.system.jsonl import json_text
from proxima.system.machine import usable_cores
from proxima.system.user_files import find_recipe
from proxima.task.column_mapping import ANSWER, ColumnMapping, is_chat
from proxima.task.local_files import Files
from proxima.view.formatting import NONE, fixed, printable
from proxima.view.terminal import table_text

RECORDED = frozenset({"prompt_uid", "sample", "tokens", "answer"})  # columns of a file that a run has written
NO_TOKENS = np.zeros(0, np.int32)
EXAMPLE = "--reward ./my_reward.py:function, --reward math, or --reward RECIPE"


@dataclass(frozen=True)
class ScoreConfig:
    """The fields of a recipe that the command reads."""

    reward: Annotated[Any, Slot("proxima.reward:REWARDS", many=True)] = ()
    task: Annotated[Any, Slot("proxima.task:TASKS")] = None
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


Texts = Sequence[tuple[Prompt, list[Completion]]]


@dataclass(frozen=True)
class ScoredTexts:
    """The texts of a file with their scores, the names of the rewards, and how far they agree with labels, if there are
    any."""

    groups: list[Group]
    rewards: list[str]
    agreement: Agreement | None


def score_texts(
    file: str,
    overrides: Sequence[str],
    *,
    reward: Sequence[str],
    columns: TextColumns,
    model: str | None,
    label: str | None = None,
) -> ScoredTexts:
    """Score the texts of a file; `label` is the column of their labels, which no reward sees.

    Raises:
        UserError: the file, a reward or a column is wrong.
    """
    resolved = resolve_rewards(reward, overrides)
    with resolved.locating():
        texts = read_texts(Path(file), columns, model, resolved.config.task)
        labels: Labels | None = None
        if label is not None:
            texts, labels = split_labels(texts, label, file)
        completions = chain.from_iterable(several for _, several in texts)
        counts = model is not None or any(len(completion.tokens) for completion in completions)
        with without_progress_bars():
            groups, rewards = score(resolved.config, texts, file, counts_tokens=counts)
    agrees = None if labels is None else agreement(groups, labels)
    return ScoredTexts(groups, rewards, agrees)


def write_scores(out: Path, scored: ScoredTexts, file: str) -> None:
    """Write the summary and every score as JSON."""
    rows = [row for row, _ in score_rows(scored.groups)]
    facts = {"file": file, "rewards": scored.rewards, **summarise_scores(scored.groups)}
    if scored.agreement is not None:
        facts["agreement"] = asdict(scored.agreement)
    write_atomic(out, json_text({**facts, "rows": rows}))


def resolve_rewards(given: Sequence[str], overrides: Sequence[str]) -> Resolved[ScoreConfig]:
    """Resolve rewards given by name or path, or those of a recipe.

    Raises:
        UserError: no reward is given, or a recipe is not given alone; a name, path or field is wrong.
    """
    recipes = [text for text in given if is_recipe(text)]
    if not given:
        raise UserError("no reward is given", remedy=f"write {EXAMPLE}")
    if recipes and len(given) > 1:
        raise UserError(f"--reward {recipes[0]} has its own rewards", remedy="give it alone")
    if recipes:
        resolved = resolve(recipes[0], overrides, root=ScoreConfig)
    else:
        words = [f"reward.{number}={reward_word(text)}" for number, text in enumerate(given)]
        resolved = resolve({}, [*words, *overrides], root=ScoreConfig)
    if not resolved.config.reward:
        raise UserError(f"{recipes[0]} has no reward section", remedy=f"write {EXAMPLE}")
    return resolved


def is_recipe(text: str) -> bool:
    """True for a YAML file, a run folder, or the name of a recipe that is not also a kind of reward."""
    if Path(text).suffix in (".yaml", ".yml") or (Path(text) / "config.yaml").exists():
        return True
    return text not in REWARDS and find_recipe(text).suffix == ".yaml"


def reward_word(text: str) -> str:
    """Convert a reward given on the command line to the value of an override."""
    module, colon, _ = text.rpartition(":")
    function = text.endswith(".py") or module.endswith(".py")
    if colon and not function and not text.startswith("{"):
        try:
            class_at(text)
        except TypeError:  # it exists, but is not a class
            function = True
        except Exception:  # importing runs arbitrary code; the reward reports its errors
            pass
    if text.startswith("{"):
        return text
    if function:
        return f"{{kind: function, path: {json.dumps(text)}}}"
    return f"{{kind: {json.dumps(text)}}}"


def read_texts(file: Path, columns: TextColumns, model: str | None = None, recipe_task: Any = None) -> Texts:
    """Read the prompts with their completions; texts are tokenised for `model`, if one is given. Columns that are not
    named are those of a recipe's task, if the file has them, as in a training.

    Raises:
        UserError: the file can't be read, a column is missing, or a row has no text; the message names file and row.
    """
    if not file.exists():
        raise UserError(f"{file} does not exist")
    if not file.is_file():
        raise UserError(f"{file} is a folder; name a file in it")
    task = Files(path=str(file))
    try:
        present = task.columns()
        if present is None:
            raise UserError(f"{file} is empty; a row is {{prompt, completion, …}}")
        asked_by, answer = of_recipe(recipe_task, present)
        if columns.prompt or not asked_by:
            asked_by = {"prompt": chosen("prompt", columns.prompt, PROMPT, present, file)}
        prompt = asked_by.get("prompt", asked_by.get("messages", ""))
        whole = prompt in CHATS and columns.completion is None and not any(name in present for name in COMPLETION)
        completion = ""
        if not whole:
            completion = chosen("completion", columns.completion, COMPLETION, present, file)
        if columns.answer:
            answer = chosen("answer", columns.answer, (), present, file)
        first = task.first() or {}
        as_text = [name for name in (prompt, completion) if isinstance(first.get(name), str) and is_chat(first[name])]
        read = tuple(dict.fromkeys([*columns.json_column, *as_text]))
        named: dict[str, Any] = dict(asked_by)
        rows = replace(task, **named, answer=None, json_columns=read).rows(0)
    except FieldError as error:  # it names a field of the task, which the user did not write
        raise UserError(f"{file} {error.requirement}") from None
    encode = tokens_of(model)
    texts: list[tuple[Prompt, list[Completion]]] = []
    groups: dict[int, tuple[Prompt, list[Completion]]] = {}
    for number in range(len(rows)):
        row = rows[number]
        place = f"{file}, row {number}"
        metadata = {name: value for name, value in row.metadata.items() if name != completion}
        asked = Prompt(
            uid=number,
            messages=tuple({name: of[name] for name in of if name != "raw"} for of in row.messages),
            tokens=NO_TOKENS,
            answer=metadata.get(answer),
            metadata=metadata,
            chat=row.chat,
        )
        if whole:
            asked, answers = without_answer(asked, f"{place}: column {prompt!r}")
        else:
            answers = completion_texts(row.metadata.get(completion), f"{place}: column {completion!r}")
        if not metadata.keys() >= RECORDED:
            made = [Completion.of_text(number, i, text, encode(text)) for i, text in enumerate(answers)]
            texts.append((asked, made))
            continue
        if columns.answer is None and file.suffix == ".parquet":
            of_prompt = load_json(metadata.pop("metadata", "{}"))
            asked = replace(asked, answer=load_json(metadata["answer"]), metadata=metadata | of_prompt)
        asked, made = groups.setdefault(metadata["prompt_uid"], (asked, []))
        made += recorded(asked, metadata, answers[0])
    return [*texts, *((asked, made) for asked, made in groups.values() if made)]


def of_recipe(task: Any, present: Sequence[str]) -> tuple[dict[str, str], str]:
    """The field of a recipe's task that names the prompt, with its column or template, and the column of the answers;
    no field, and `answer`, where the file does not have the columns."""
    if not isinstance(task, ColumnMapping):
        return {}, ANSWER
    fields = task.fields_by_column()
    found: dict[str, str] = {}
    for name in ("question", "messages", "prompt"):
        needed = {column for column, of in fields.items() if of == name}
        if needed and needed <= set(present):
            found = {name: getattr(task, name)}
    if task.answer is not None and task.answer in present:
        return found, task.answer
    return found, ANSWER


def recorded(prompt: Prompt, row: Mapping[str, Any], text: str) -> list[Completion]:
    """The completion in a row that a run or an evaluation wrote; none if the row is an earlier path of an episode."""
    made = Completion.of_text(prompt.uid, row["sample"], text, row["tokens"])
    if row.get("episode") is None:
        return [made]
    episode = Episode.from_json(row["episode"])
    free = [span.sampled and not span.grammar for span in episode.spans]
    own = np.repeat(free, [span.tokens for span in episode.spans]).astype(np.bool_)
    if row.get("turn", episode.forks) != episode.forks:  # an evaluation stores no earlier paths
        return []
    return [replace(made, episode=episode, sampled=own)]


def chosen(what: str, given: str | None, names: Sequence[str], present: Sequence[str], file: Path) -> str:
    """The given column, or the first of the default names; UserError if the file does not have it."""
    wanted = names if given is None else [given]
    for name in wanted:
        if name in present:
            return name
    reason = f"{file} has no column {given or names[0]!r}"
    raise UserError(reason, remedy=f"name it with --{what} COLUMN; columns: {', '.join(present) or 'none'}")


def without_answer(prompt: Prompt, place: str) -> tuple[Prompt, list[str]]:
    """The prompt of a chat that holds its completion, and the completion; UserError unless the assistant has the last
    turn."""
    *before, said = prompt.messages
    if said["role"] != "assistant":
        reason = f"{place} ends with the {said['role']}, so there is nothing to score"
        raise UserError(reason, remedy="name the column of the completions with --completion COLUMN")
    return replace(prompt, messages=tuple(before)), [said["content"]]


def completion_texts(value: Any, place: str) -> list[str]:
    """The texts of a completion, or of a list of them; each may be a list of messages, whose last one is used."""
    several = isinstance(value, list) and bool(value) and not isinstance(value[0], dict)
    completions = value if several else [value]
    texts = []
    for given in completions:
        text = given
        if isinstance(given, list) and given and isinstance(given[-1], dict):
            text = given[-1].get("content")
        if not isinstance(text, str):
            raise UserError(f"{place} holds {given!r:.60}, expected a text, a list of texts, or messages")
        texts.append(text)
    return texts


def tokens_of(model: str | None) -> Callable[[str], list[int]]:
    """The function that tokenises a text; without a model it returns no tokens."""
    if model is None:
        return lambda text: []
    tokenizer = load_tokenizer(model)
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


def score(config: ScoreConfig, texts: Texts, file: str, *, counts_tokens: bool) -> tuple[list[Group], list[str]]:
    """Score the texts; return the groups and the names of the rewards. `counts_tokens`: the completions have tokens.

    Raises:
        UserError: a reward needs a missing column, counts tokens without a model, or is not ready.
    """
    prompts: Any = [prompt for prompt, _ in texts]
    answers = ReferenceAnswers(name=file, rows=prompts, count=len(prompts))
    require_columns(config.reward, answers, 0, 0)
    unanswered = all(prompt.answer is None for prompt in prompts)
    require_texts_suffice(config.reward, counts_tokens, unanswered)
    workers = max(config.runtime.reward_workers, usable_cores())
    rewards = config.runtime.rewards(config.reward, workers=workers)
    try:
        rewards.check()
        for note in rewards.notes():
            print(f"NOTE {note}", file=sys.stderr)
        if rewards.comparing and unanswered:
            raise UserError(f"{file} has no answers to compare with", remedy="name their column with --answer")
        return asyncio.run(_score(rewards, texts)), list(rewards.labels)
    finally:
        rewards.close()


async def _score(rewards: RewardRunner, texts: Texts) -> list[Group]:
    scores = await asyncio.gather(*(rewards.score(prompt, completions) for prompt, completions in texts))
    groups = [
        Group(prompt=prompt, completions=tuple(completions), scores=tuple(of))
        for (prompt, completions), of in zip(texts, scores, strict=True)
    ]
    return await rewards.score_batch(groups)


def require_texts_suffice(rewards: Sequence[Any], counts_tokens: bool, unanswered: bool) -> None:
    """Refuse a reward that reads tokens which the file doesn't have; print a note if a function may read missing tokens
    or answers."""
    for number, reward in enumerate(rewards):
        of_policy = isinstance(reward, ModelReward) and reward.encode == "tokens"
        reason = "reads the policy's tokens, but a file has only text"
        require(not of_policy, f"reward.{number}.encode", "tokens", reason, remedy="set encode=text")
        counts = isinstance(reward, Length | Overlong) or getattr(reward, "unit", None) == "tokens"
        if counts and not counts_tokens:
            raise FieldError(f"reward.{number}.kind", reward.kind, "counts tokens", remedy="add --model PATH")
    if any(isinstance(reward, Function) and reward.call.gets_tokens for reward in rewards):
        if not counts_tokens:
            print("NOTE without --model PATH, completion.tokens is empty", file=sys.stderr)
        if unanswered:
            print("NOTE prompt.answer is None; name the column of the answers with --answer COLUMN", file=sys.stderr)


def score_rows(groups: Sequence[Group]) -> list[tuple[dict[str, Any], Completion]]:
    """Pair each completion with its row in the file, its number in the row and its score, as JSON values."""
    rows = []
    for group in groups:
        for completion, score in zip(group.completions, group.scores, strict=True):
            facts = {"row": group.prompt.uid, "sample": completion.sample, **score.facts()}
            facts["value"] = score.value if facts.pop("valid") else None
            rows.append((facts, completion))
    return rows


def summarise_scores(groups: Sequence[Group]) -> dict[str, Any]:
    """Counts, mean, population standard deviation and range of the scores, and means of the parts; JSON values."""
    scores = list(chain.from_iterable(group.scores for group in groups))
    valid = [score for score in scores if score.valid]
    values = [score.value for score in valid]
    verdicts = [score.correct for score in valid if score.correct is not None]
    names = dict.fromkeys(chain.from_iterable(score.parts for score in valid))
    mean = fmean(values) if values else None
    deviation = pstdev(values) if values else None
    return {
        "completions": len(scores),
        "failed": len(scores) - len(valid),
        "mean": mean,
        "sd": deviation,
        "min": min(values, default=None),
        "max": max(values, default=None),
        "known": len(verdicts),
        "correct": sum(verdicts),
        "parts": {name: fmean(score.parts[name] for score in valid if name in score.parts) for name in names},
        "failures": dict(Counter(score.error for score in scores if not score.valid).most_common()),
    }


def print_scores(groups: Sequence[Group], most: int) -> int:
    """Print the table of at most so many rows, the failures by reason, and the summary; return 1 if a completion has no
    score."""
    facts = summarise_scores(groups)
    rows = score_rows(groups)
    several = any(len(group.completions) > 1 for group in groups)
    shown = rows[: most or None]
    names = facts["parts"] if len(facts["parts"]) > 1 else ()
    verdicts = {True: "yes", False: "no", None: NONE}
    table = []
    for row, completion in shown:
        number = f"{row['row']}.{row['sample']}" if several else str(row["row"])
        line = {"row": number, "reward": fixed(row["value"], 3), "correct": verdicts[row["correct"]]}
        for name in names:
            line[printable(name)] = fixed(row["parts"].get(name), 3)
        line["completion"] = printable(completion.text, 60)
        table.append(line)
    print(table_text(table, sys.stdout, left=("completion",)))
    if len(rows) > len(shown):
        print(f"… and {len(rows) - len(shown):,} more; --rows 0 prints all")
    print()
    for error, count in facts["failures"].items():
        first = next(row["row"] for row, _ in rows if row["error"] == error)
        print(f"no score, {count}×, first in row {first}: {printable(error)}")
    print(summary_line(facts))
    if len(rows) > facts["failed"] + 1 and facts["min"] == facts["max"]:
        print("NOTE every score is the same: completions of equal reward teach nothing")
    return 1 if facts["failed"] else 0


def summary_line(facts: dict[str, Any]) -> str:
    """`6 completions, 1 without a score: reward 0.42 (sd 0.31, 0 … 1), 3 of 5 correct`."""
    text = counted(facts["completions"], "completion")
    if facts["failed"]:
        text += f", {facts['failed']:,} without a score"
    if facts["mean"] is None:
        return text
    text += f": reward {facts['mean']:.3g} (sd {facts['sd']:.3g}, {facts['min']:.3g} … {facts['max']:.3g})"
    if facts["known"]:
        text += f", {facts['correct']:,} of {facts['known']:,} correct"
    return text
