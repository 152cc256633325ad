"""Score texts with rewards, without a model: try a reward before training with it.

proxima score answers.jsonl --reward ./my_reward.py:near  # a function of yours
proxima score answers.jsonl --reward math --reward '{kind: repetition, weight: 0.1}'
proxima score answers.jsonl --reward recipe.yaml          # the rewards of a recipe or a run
proxima score answers.jsonl --reward quickstart           # those of a recipe that comes with proxima

A row has a prompt, a completion or a list of them (a group), and any other columns, which the rewards get as in a
run. Exit code 1: a completion has no score; 2: the file, a reward or a column is wrong.
"""

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from proxima.cli.output import add_overrides
from proxima.config.sections.runtime_section import RuntimeConfig
from proxima.config.slots import Slot
from proxima.data import Completion, FieldError, Group, Prompt, Score, UserError, require
from proxima.data.recipe_files import find_recipe

if TYPE_CHECKING:
    from proxima.config import Resolved
    from proxima.reward import RewardRunner

PROMPT, COMPLETION = ("prompt", "question", "messages"), ("completion", "text", "response")  # the first one present
NO_TOKENS = np.zeros(0, np.int32)
EXAMPLE = "--reward ./my_reward.py:function, --reward math, or --reward RECIPE"


@dataclass(frozen=True)
class ScoreConfig:
    """What is read of a recipe."""

    reward: Annotated[Any, Slot("proxima.reward:REWARDS", many=True)] = ()
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help=".jsonl or .parquet file")
    add_overrides(parser)
    reward = "FILE.py:FUNCTION, a kind of `proxima list reward`, {kind: …}, package.module:NAME, a recipe or a run"
    parser.add_argument("--reward", action="append", default=[], metavar="REWARD", help=f"{reward}; may be repeated")
    parser.add_argument("--prompt", metavar="COLUMN", help=f"default: {', else '.join(PROMPT)}")
    parser.add_argument("--completion", metavar="COLUMN", help=f"default: {', else '.join(COMPLETION)}")
    parser.add_argument("--answer", metavar="COLUMN", help="what rewards compare with; default: answer, if present")
    parser.add_argument("--model", metavar="PATH", help="count tokens with this model's tokenizer; loads no weights")
    parser.add_argument("--rows", type=int, default=20, metavar="N", help="completions to print; default: 20; 0: all")
    parser.add_argument("--json-out", type=Path, metavar="FILE", help="write the summary and every score for programs")


def run(arguments: argparse.Namespace) -> int:
    from proxima.runtime.watch.interrupt import quiet_transformers

    if arguments.rows < 0:
        raise UserError(f"--rows {arguments.rows} must be >= 0; 0 prints all")
    resolved = resolve_rewards(arguments.reward, arguments.override)
    with resolved.locating():
        asked = read_texts(arguments)
        with quiet_transformers():
            groups, labels = score(resolved.config, asked, arguments)
    facts = summarise_scores(groups)
    if arguments.json_out is not None:
        from proxima.data.atomic_files import write_atomic
        from proxima.data.jsonl import dumps

        content = {"file": arguments.file, "rewards": labels, **facts, "rows": [row for row, _ in each(groups)]}
        write_atomic(arguments.json_out, dumps(content, indent=2) + "\n")
    print_scores(groups, facts, arguments.rows)
    return 1 if facts["failed"] else 0


def resolve_rewards(given: Sequence[str], overrides: Sequence[str]) -> "Resolved[ScoreConfig]":
    """The rewards by name, path or recipe.

    Raises:
        UserError: none is given, or one beside a recipe; a name, path or field is wrong.
    """
    from proxima.config import resolve

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
    """A YAML file, a run folder, or the name of a recipe that is no kind of reward."""
    if Path(text).suffix in (".yaml", ".yml") or (Path(text) / "config.yaml").exists():
        return True
    from proxima.reward import REWARDS

    return text not in REWARDS and find_recipe(text).suffix == ".yaml"


def reward_word(text: str) -> str:
    """A reward of the command line as the value of an override."""
    module, colon, _ = text.rpartition(":")
    function = text.endswith(".py") or module.endswith(".py")
    if colon and not function and not text.startswith("{"):
        from proxima.config.describe import class_at

        try:
            class_at(text)
        except TypeError:  # it exists, and is no class
            function = True
        except Exception:  # importing runs anybody's code; the reward reports it
            pass
    if text.startswith("{"):
        return text
    return f"{{kind: function, path: {json.dumps(text)}}}" if function else f"{{kind: {json.dumps(text)}}}"


def read_texts(arguments: argparse.Namespace) -> list[tuple[Prompt, list[Completion]]]:
    """The prompts with their completions.

    Raises:
        UserError: the file can't be read, a column is missing, or a row has no text; names file and row.
    """
    from proxima.task import TASKS
    from proxima.task.column_mapping import as_messages

    file = Path(arguments.file)
    if not file.is_file():
        raise UserError(f"{file} does not exist" if not file.exists() else f"{file} is a folder; name a file in it")
    present = columns_in(file)
    prompt = chosen("prompt", arguments.prompt, PROMPT, present, file)
    completion = chosen("completion", arguments.completion, COMPLETION, present, file)
    answer = chosen("answer", arguments.answer, (), present, file) if arguments.answer else "answer"
    kind = "parquet" if file.suffix == ".parquet" else "jsonl"
    try:
        rows = TASKS[kind](path=str(file), question=prompt, answer=None).rows(0)
    except FieldError as error:  # its field is one of a task
        raise UserError(f"{file} {error.requirement}") from None
    encode = tokens_of(arguments.model)
    asked = []
    for number in range(len(rows)):
        row, place = rows[number], f"{file}, row {number}"
        columns = {name: value for name, value in row.metadata.items() if name != completion}
        texts = completion_texts(row.metadata.get(completion), f"{place}: column {completion!r}")
        chat = as_messages(row.metadata[prompt], place) if isinstance(row.metadata[prompt], list) else None
        made = Prompt(
            uid=number,
            messages=chat or row.messages,
            tokens=NO_TOKENS,
            answer=columns.get(answer),
            metadata=columns,
            chat=chat is not None,
        )
        asked.append((made, [Completion.of_text(number, i, text, encode(text)) for i, text in enumerate(texts)]))
    return asked


def columns_in(file: Path) -> list[str]:
    """The columns of a Parquet file, or the keys of the first row of any other; UserError if it has none."""
    from proxima.task.local_files import content_lines, json_object

    if file.suffix == ".parquet":
        from proxima.evaluate.suites import columns_of

        return sorted(columns_of(file))
    if (line := next(content_lines(file), None)) is None:
        raise UserError(f"{file} is empty; a row is {{prompt, completion, …}}")
    return list(json_object(line[2], f"{file}:{line[0]}"))


def chosen(what: str, given: str | None, names: Sequence[str], present: Sequence[str], file: Path) -> str:
    """The column that is named, or the first usual one."""
    found = given if given in present else next((name for name in names if name in present and given is None), None)
    if found is None:
        reason = f"{file} has no column {given or names[0]!r}"
        raise UserError(reason, remedy=f"name it with --{what} COLUMN; columns: {', '.join(present) or 'none'}")
    return found


def completion_texts(value: Any, place: str) -> list[str]:
    """The texts of a completion, or of a list of them; each may be a list of messages, whose last one counts."""
    several = isinstance(value, list) and bool(value) and not isinstance(value[0], dict)
    texts = []
    for one in value if several else [value]:
        text = one[-1].get("content") if isinstance(one, list) and one and isinstance(one[-1], dict) else one
        if not isinstance(text, str):
            raise UserError(f"{place} holds {one!r:.60}, expected a text, a list of texts, or messages")
        texts.append(text)
    return texts


def tokens_of(model: str | None) -> Callable[[str], list[int]]:
    """What counts the tokens of a text; without a model there are none."""
    if model is None:
        return lambda text: []
    from proxima.model.load import load_tokenizer

    tokenizer = load_tokenizer(model)
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


def score(
    config: ScoreConfig, asked: Sequence[tuple[Prompt, list[Completion]]], arguments: argparse.Namespace
) -> tuple[list[Group], list[str]]:
    """The scored groups, and the names of the rewards.

    Raises:
        UserError: a reward asks for a column that is not there, counts tokens without a model, or is not ready.
    """
    from proxima.reward import Function, ModelReward, RewardRunner
    from proxima.runtime.launch.preflight import ReferenceAnswers, require_columns

    prompts: Any = [prompt for prompt, _ in asked]
    require_columns(config.reward, ReferenceAnswers(name=arguments.file, rows=prompts, count=len(prompts)), 0, 0)
    for number, reward in enumerate(config.reward):
        tokens = isinstance(reward, ModelReward) and reward.encode == "tokens"
        reason = "reads the policy's tokens, and a file has texts alone"
        require(not tokens, f"reward.{number}.encode", "tokens", reason, remedy="set encode=text")
    if arguments.model is None:
        require_no_tokens(config.reward)
    objects = any(isinstance(reward, Function) and reward.call.gets_tokens for reward in config.reward)
    if objects and all(prompt.answer is None for prompt in prompts):
        print("NOTE prompt.answer is None; name the column of the answers with --answer COLUMN", file=sys.stderr)
    limits = config.runtime
    rewards = RewardRunner(
        config.reward,
        timeout=limits.reward_timeout,
        workers=max(limits.reward_workers, os.cpu_count() or 1),
        memory_mb=limits.reward_memory_mb,
    )
    try:
        rewards.check()
        if rewards.needs_answers and all(prompt.answer is None for prompt in prompts):
            raise UserError(
                f"{arguments.file} has no answers to compare with", remedy="name their column with --answer"
            )
        return asyncio.run(_score(rewards, asked)), list(rewards.labels)
    finally:
        rewards.close()


async def _score(rewards: "RewardRunner", asked: Sequence[tuple[Prompt, list[Completion]]]) -> list[Group]:
    scores = await asyncio.gather(*(rewards.score(prompt, texts) for prompt, texts in asked))
    pairs = zip(asked, scores, strict=True)
    groups = [Group(prompt=p, completions=tuple(texts), scores=tuple(found)) for (p, texts), found in pairs]
    return await rewards.score_batch(groups)


def require_no_tokens(rewards: Sequence[Any]) -> None:
    """Refuse a reward that counts tokens; where a function may, say that there are none."""
    from proxima.reward import Function, Length, Overlong

    for number, reward in enumerate(rewards):
        if isinstance(reward, Length | Overlong) or getattr(reward, "unit", None) == "tokens":
            raise FieldError(f"reward.{number}.kind", reward.kind, "counts tokens", remedy="add --model PATH")
    if any(isinstance(reward, Function) and reward.call.gets_tokens for reward in rewards):
        print("NOTE without --model PATH, completion.tokens is empty", file=sys.stderr)


def each(groups: Sequence[Group]) -> list[tuple[dict[str, Any], Completion]]:
    """Per completion its row in the file, its number in the row, and its score; JSON values."""
    rows = []
    for group in groups:
        for completion, one in zip(group.completions, group.scores, strict=True):
            value = one.value if one.valid else None
            place = {"row": group.prompt.uid, "sample": completion.sample}
            facts = {"value": value, "correct": one.correct, "parts": dict(one.parts), "error": one.error}
            rows.append((place | facts, completion))
    return rows


def summarise_scores(groups: Sequence[Group]) -> dict[str, Any]:
    """Counts, mean and spread (the population's) of the scores, and means of the parts; JSON values."""
    scores: list[Score] = [one for group in groups for one in group.scores]
    valid = [one for one in scores if one.valid]
    values, known = [one.value for one in valid], [one.correct for one in valid if one.correct is not None]
    parts = {name: [one.parts[name] for one in valid if name in one.parts] for one in valid for name in one.parts}
    return {
        "completions": len(scores),
        "failed": len(scores) - len(valid),
        "mean": fmean(values) if values else None,
        "sd": pstdev(values) if values else None,
        "min": min(values, default=None),
        "max": max(values, default=None),
        "known": len(known),
        "correct": sum(known),
        "parts": {name: fmean(found) for name, found in parts.items()},
        "failures": dict(Counter(one.error for one in scores if not one.valid).most_common()),
    }


def print_scores(groups: Sequence[Group], facts: dict[str, Any], most: int) -> None:
    """The table, the failures by reason, and the summary."""
    from proxima.view.formatting import NONE, fixed, printable
    from proxima.view.terminal import rendered, table_of_rows

    rows, several = each(groups), any(len(group.completions) > 1 for group in groups)
    shown = rows[: most or None]
    names = list(facts["parts"])
    table = [
        {
            "row": f"{row['row']}.{row['sample']}" if several else str(row["row"]),
            "reward": fixed(row["value"], 3),
            "correct": {True: "yes", False: "no", None: NONE}[row["correct"]],
            **({printable(name): fixed(row["parts"].get(name), 3) for name in names} if len(names) > 1 else {}),
            "completion": printable(completion.text, 60),
        }
        for row, completion in shown
    ]
    print(rendered(table_of_rows(table, left=("completion",)), sys.stdout))
    if len(rows) > len(shown):
        print(f"… and {len(rows) - len(shown):,} more; --rows 0 prints all")
    print()
    for error, count in facts["failures"].items():
        first = next(row["row"] for row, _ in rows if row["error"] == error)
        print(f"no score, {count}×, first in row {first}: {printable(error)}")
    print(summary_line(facts))
    if len(rows) > facts["failed"] + 1 and facts["min"] == facts["max"]:
        print("NOTE every score is the same: completions of equal reward teach nothing")


def summary_line(facts: dict[str, Any]) -> str:
    """`6 completions, 1 without a score: reward 0.42 (sd 0.31, 0 … 1), 3 of 5 correct`."""
    failed = f", {facts['failed']:,} without a score" if facts["failed"] else ""
    text = f"{facts['completions']:,} completion{'s' * (facts['completions'] != 1)}{failed}"
    if facts["mean"] is None:
        return text
    text += f": reward {facts['mean']:.3g} (sd {facts['sd']:.3g}, {facts['min']:.3g} … {facts['max']:.3g})"
    return text + (f", {facts['correct']:,} of {facts['known']:,} correct" if facts["known"] else "")
