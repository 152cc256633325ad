"""`proxima data inspect`: show an episode of a recipe with its tokens, before anything is trained."""

import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from proxima.cli.output import AsJson, Overrides, Recipe, print_json
from proxima.cli.parameters import Argument
from proxima.data import FieldError, UserError, require
from proxima.data.episode import ToolCall
from proxima.data.flow import Completion, Prompt
from proxima.data.image_tokens import patch_text

if TYPE_CHECKING:
    from proxima.engine.protocol import Request
    from proxima.rollout.episodes.worlds import World

SAY = "what the model says in a turn; repeatable; default: a call of the first tool, then a sentence"
ROW = "which prompt of the training data, from 0; 0"
KINDS = {  # the letter in front of a line, its colour, and what it means
    "prompt": ("p", "2", "the prompt: conditioned on"),
    "sampled": ("S", "1;32", "sampled and trained"),
    "observed": ("o", "36", "written by the environment and the chat template: conditioned on"),
    "earlier": ("e", "33", "written by the model, trained on an earlier path: conditioned on"),
}
SENTENCE = "It is 7."


def inspect_episode(
    recipe: Recipe,
    override: Overrides = (),
    *,
    say: Annotated[Sequence[str], Argument(SAY, "TEXT", words="append")] = (),
    row: Annotated[int, Argument(ROW)] = 0,
    as_json: AsJson = False,
) -> None:
    """Play an episode of a recipe's task in its environment, with scripted turns of the model, and print its tokens:
    which are the prompt, which are sampled and trained, which are not. Loads no weights."""
    from proxima.api.episode_chat import episodes_of
    from proxima.config.validate import load_recipe
    from proxima.engine.protocol import Request
    from proxima.rollout.episodes.worlds import AgentWorld
    from proxima.runtime.launch.run_data import load_run_data

    resolved = load_recipe(recipe, override)
    if resolved.config.replayed is not None:
        raise UserError("a replay plays no episode", remedy="leave rollouts out")
    with resolved.locating():
        data = load_run_data(resolved.config)
    with closing(data):
        if data.world is None:
            remedy = "set task.environment or task.tools; of a run, proxima view shows every answer token by token"
            raise UserError("the task has no environment, so that an episode is one answer", remedy=remedy)
        if isinstance(data.world, AgentWorld):
            remedy = "play one with proxima train, and look at it with proxima view"
            raise UserError("an agent from outside makes its own messages", remedy=remedy)
        prompt = _prompt(data.source, row)
        engine: Any = MadeTurns(data.world, tuple(say))  # it only generates
        request = Request(prompt=prompt, sample=0, sampling=resolved.config.sampling)
        (completion,) = episodes_of(data.world.player(engine), [request])
    shown = [_path(engine.tokenizer, path.opening or prompt, path) for path in completion.paths]
    failure = completion.episode.failure if completion.episode else ""
    if as_json:
        return print_json({"notes": data.notes, "failure": failure, "paths": shown})
    _print(shown, [*data.notes, *([f"the episode failed: {failure}"] if failure else [])])
    return None


def _prompt(source: Any, row: int) -> Prompt:
    rows = len(source.rows)
    require(0 <= row < rows, "--row", row, f"must be in [0, {rows - 1}]")
    prompt: Prompt | None = source.prompt(row, uid=row)
    if prompt is None:
        raise FieldError("--row", row, "is too long for the model; take another")
    return prompt


@dataclass
class MadeTurns:
    """An engine that answers with the given turns in order, and then repeats the last one."""

    world: "World"
    turns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.tokenizer: Any = self.world.template.tokenizer
        self.turns = self.turns or (*_call(self.world), SENTENCE)

    async def generate(self, requests: Sequence["Request"]) -> AsyncIterator[Completion]:
        """Yield each request's turn as the tokenizer encodes it, ended by the end-of-text token unless cut off."""
        for request in requests:
            text = self.turns[min(request.turn, len(self.turns) - 1)]
            tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens = [*tokens, self.tokenizer.eos_token_id][: request.sampling.max_tokens]
            ended = "stop" if tokens[-1] == self.tokenizer.eos_token_id else "length"
            yield Completion.of_text(request.prompt.uid, request.sample, text, tokens, ended)  # type: ignore[arg-type]


def _call(world: "World") -> Iterator[str]:
    """A call of the first tool, with a number for each argument."""
    from proxima.environment.tool_calls import write_call

    if world.rules.tool_format is not None:
        name, parameters = next(iter(world.rules.tools.items()))
        call = ToolCall(name=name, arguments=dict.fromkeys(parameters.get("properties", {}), "7"))
        yield write_call(call, world.rules.tool_format, world.rules.tools)


def _path(tokenizer: Any, prompt: Prompt, completion: Completion) -> list[dict[str, Any]]:
    """The parts of a path, each with its tokens."""
    parts = [{"kind": "prompt", "of": "", "tokens": prompt.tokens.tolist()}]
    start, ids = 0, completion.tokens.tolist()
    for span in completion.episode.spans if completion.episode else ():
        kind = "sampled" if span.sampled else "earlier" if span.role == "assistant" else "observed"
        about = f"turn {span.turn}" if span.role == "assistant" else f"{span.role}, after turn {span.turn}"
        parts.append({"kind": kind, "of": about, "tokens": ids[start : start + span.tokens]})
        start += span.tokens
    return [{**part, "texts": [_text(tokenizer, token) for token in part["tokens"]]} for part in parts]


def _text(tokenizer: Any, token: int) -> str:
    return patch_text(token) if token < 0 else str(tokenizer.decode([token]))


def _print(paths: Sequence[Sequence[dict[str, Any]]], notes: Sequence[str]) -> None:
    from proxima.view.formatting import visible

    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def painted(kind: str, text: str) -> str:
        return f"\x1b[{KINDS[kind][1]}m{text}\x1b[0m" if colours else text

    for kind, (letter, _, meaning) in KINDS.items():
        print(painted(kind, f"{letter}  {meaning}"))
    print("tokens are between bars; ⏎ is a line end\n")
    for number, parts in enumerate(paths):
        if len(paths) > 1:
            print(f"path {number} of {len(paths)}: the chat template rewrote what came before")
        for part in parts:
            letter, count = KINDS[part["kind"]][0], len(part["tokens"])
            print(painted(part["kind"], f"{letter}  {part['of'] or part['kind']}: {count} tokens"))
            text = "|".join(visible(token).replace("\n", "⏎") for token in part["texts"])
            for line in text.replace("⏎", "⏎\n").rstrip("\n").split("\n"):
                print(painted(part["kind"], f"{letter}    {line}"))
        total = sum(len(part["tokens"]) for part in parts)
        trained = sum(len(part["tokens"]) for part in parts if part["kind"] == "sampled")
        print(f"{trained} of {total} tokens are trained\n")
    for note in notes:
        print(f"WARNING {note}", file=sys.stderr)
