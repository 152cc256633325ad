"""Answers the prompts of `proxima generate`, or the messages of a chat."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.api.episode_chat import EpisodeChat, Table, make_table, play_episodes
from proxima.api.local_answers import ChatSession, generate, local_engine
from proxima.cli.parameters import Inference, print_json
from proxima.config.outcomes import engine_dtype
from proxima.config.problems import one_problem
from proxima.config.resolution import resolve
from proxima.config.schema import PlayedConfig, PromptConfig
from proxima.config.sections.data import DataConfig
from proxima.config.sections.model import model_problem, refuse_checkpoint
from proxima.config.validate import fetch_demo_model
from proxima.data import FieldError, UserError
from proxima.data.flow import Completion
from proxima.engine.local.local_engine import LocalEngine
from proxima.engine.protocol import Sampling
from proxima.model.chat.template_inputs import fixed_clock
from proxima.model.precision import ComputeDtype
from proxima.rollout.episodes.played import PlayedTurn
from proxima.runtime.resume.changes import written_config
from proxima.runtime.state.folder import run_of_model
from proxima.runtime.state.run_checkpoints import find_checkpoint
from proxima.runtime.watch.clock import Clock
from proxima.task.image_files import open_image
from proxima.view.episode_lines import answer_lines, episode_lines, labelled
from proxima.view.formatting import printable, visible, write_safely

if TYPE_CHECKING:
    from PIL.Image import Image

NEW = "/new"
MOST = 256  # new tokens
MOST_IN_CHAT = 512


@dataclass(frozen=True)
class ChosenModel:
    """The model that answers the user's prompts.

    Args:
        path: the path of the weights; for a run, of its checkpoint.
        data: system prompt and template arguments: those given, else the run's own.
        max_length: tokens of prompt and completion together; None: the model's own limit.
        dtype: of the engine's products: that given, else the run's own.
        played: the config of the episodes, if there are tools or an environment; None: the model answers once.
    """

    path: str
    data: DataConfig
    max_length: int | None = None
    played: PlayedConfig | None = None
    dtype: ComputeDtype = "auto"
    locating: Callable[[], AbstractContextManager[None]] = nullcontext


def complete(
    model: str, prompt: Sequence[str], inference: Inference, *, samples: int, images: Sequence[str], as_json: bool
) -> int:
    """Print the completions of prompts; with tools or an environment, play whole episodes. Returns 1 if an episode
    failed.

    Raises:
        UserError: the model, a prompt or an option is wrong.
    """
    prompts = _prompts(prompt)
    shown = [open_image(file) for file in images]
    chosen = chosen_model(model, inference)
    if shown and chosen.played is not None:
        raise UserError("--image can't be shown to a model with tools or an environment", remedy="leave it out")
    with fixed_clock(chosen.data.template_date), open_table(chosen) as table:
        completions, seconds = _completed(chosen, table, prompts, samples, inference, shown)
    tokens = sum(map(_tokens_written, _paths(completions)))
    rate = tokens / seconds if seconds else 0.0
    if as_json:
        facts = {"model": chosen.path, "seconds": seconds, "tokens": tokens, "tokens_per_second": rate}
        print_json({**facts, "completions": [_as_json(prompts[c.prompt_uid], c) for c in _paths(completions)]})
    else:
        print("\n".join(_text(prompts, completions)))
        print(f"{tokens} tokens in {seconds:.1f} s, {rate:,.0f} tok/s", file=sys.stderr)
    if any(c.episode is not None and c.episode.failure for c in completions):
        return 1
    return 0


def _completed(
    chosen: ChosenModel,
    table: Table | None,
    prompts: Sequence[str],
    samples: int,
    inference: Inference,
    images: "Sequence[Image]",
) -> tuple[list[Completion], float]:
    """Generate the answers, or whole episodes; return them and the seconds that they took."""
    sampling = inference_sampling(inference, MOST, chosen.played)
    data = chosen.data
    clock = Clock()
    tokenizer, engine = _engine_of(chosen, inference, sampling, images=bool(images))
    began = clock.now()
    if table is not None:
        completions = play_episodes(table, engine, prompts, sampling=sampling, samples=samples, seed=inference.seed)
        return completions, clock.now() - began
    completions = generate(
        tokenizer,
        engine,
        prompts,
        sampling=sampling,
        samples=samples,
        system=data.system,
        template_arguments=data.template_arguments,
        seed=inference.seed,
        images=images,
    )
    return completions, clock.now() - began


def _engine_of(
    chosen: ChosenModel, inference: Inference, sampling: Sampling, *, images: bool = False
) -> tuple[Any, LocalEngine]:
    """The tokenizer and the engine of the model."""
    return local_engine(
        chosen.path,
        chosen.dtype,
        inference.device,
        warn,
        max_length=chosen.max_length,
        images=images,
        stop=sampling.stop,
    )


def _paths(completions: Sequence[Completion]) -> list[Completion]:
    return list(chain.from_iterable(completion.paths for completion in completions))


def _tokens_written(path: Completion) -> int:
    """The number of a path's tokens that the model wrote."""
    return int(path.tokens.size if path.sampled is None else path.sampled.sum())


def _prompts(words: Sequence[str]) -> list[str]:
    if list(words) != ["-"]:
        return list(words)
    lines = [line.rstrip("\n") for line in sys.stdin]
    if not lines:
        raise UserError("prompt=- reads prompts from standard input, one a line; the input was empty")
    return lines


def _text(prompts: Sequence[str], completions: Sequence[Completion]) -> list[str]:
    """The lines to print: the text alone for one completion, else each text with its prompt; or whole episodes."""
    if any(completion.episode is not None for completion in completions):
        episodes = ("\n".join(episode_lines(prompts[c.prompt_uid], c)) for c in completions)
        return "\n\n".join(episodes).split("\n")
    if len(completions) == 1:
        text = completions[0].text
        if sys.stdout.isatty():  # it would obey escape sequences; a file or a pipe gets the text unchanged
            text = visible(text)
        return [text]
    return [f"{printable(prompts[c.prompt_uid])}  →  {printable(c.text)}" for c in completions]


def _as_json(prompt: str, completion: Completion) -> dict[str, Any]:
    scalars = ("sample", "text", "finish_reason", "temperature")
    columns = ("tokens", "sampled_log_prob", "untruncated_log_prob")
    facts = {name: getattr(completion, name) for name in scalars}
    facts |= {name: getattr(completion, name).tolist() for name in columns}
    if completion.episode is not None and completion.sampled is not None:  # a path of it
        facts |= {
            "turn": completion.turn,
            "sampled": completion.sampled.tolist(),
            "episode": completion.episode.facts(),
        }
    return {"prompt": prompt, **facts}


def converse_with(model: str, inference: Inference) -> None:
    """Answer standard input, message by message, until it ends.

    Raises:
        UserError: the model or an option is wrong.
    """
    chosen = chosen_model(model, inference)
    with fixed_clock(chosen.data.template_date), open_table(chosen) as table:
        if table is None:
            return _talk(chosen, inference)
        return EpisodeTalk(chosen, table, inference).run()


def _talk(chosen: ChosenModel, inference: Inference) -> None:
    """A chat without tools."""
    sampling = inference_sampling(inference, MOST_IN_CHAT)
    data = chosen.data
    conversation = ChatSession(
        *_engine_of(chosen, inference, sampling),
        sampling,
        seed=inference.seed,
        system=data.system,
        template_arguments=data.template_arguments,
    )

    def answer(line: str) -> str:
        whole = conversation.answer(line, _show)
        print(flush=True)
        if whole:
            return ""
        return f"cut off at --max-tokens {sampling.max_tokens}"

    _converse(chosen.path, conversation.messages.clear, answer)


def _converse(title: str, new: Callable[[], None], answer: Callable[[str], str]) -> None:
    """Answer line by line. Each callable prints its own output, and returns a note to print, or an empty one."""

    def attempt(act: Callable[[], str | None]) -> None:
        try:
            note = act()
            if note:
                print(f"({note})", file=sys.stderr)
        except KeyboardInterrupt:
            print(" …", flush=True)
        except UserError as error:
            print(f"error: {visible(str(error))}; {NEW} begins a new chat", file=sys.stderr)

    asked = sys.stdin.isatty()  # a person, who sees a prompt
    if asked:
        print(f"{title}: Ctrl-D ends the chat, Ctrl-C an answer, {NEW} begins a new chat", file=sys.stderr)
    while (line := _line(asked)) is not None:
        if line == NEW:
            attempt(new)
        elif line:
            attempt(partial(answer, line))


def _show(piece: str) -> None:
    write_safely(sys.stdout, visible(piece))


class EpisodeTalk:
    """A chat with tools or an environment: prints the events of an `EpisodeChat`."""

    def __init__(self, chosen: ChosenModel, table: Table, inference: Inference) -> None:
        self.title = chosen.path
        self.settings = table.world.rules.settings
        self.tools = table.world.use.tools
        self.sampling = inference_sampling(inference, MOST_IN_CHAT, chosen.played)
        _, engine = _engine_of(chosen, inference, self.sampling)
        self.chat = EpisodeChat(table, engine, self.sampling, inference.seed, self)
        self.length = 0  # tokens of the last turn
        self.dim = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def run(self) -> None:
        """Chat until the input ends."""
        title = self.title
        if self.tools:
            title += f" with {', '.join(sorted(self.tools))}"
        _converse(title, self.chat.new, self._answer)

    def _answer(self, line: str) -> str:
        """Let the model answer, and name the limit that cut the answer off."""
        cut = self.chat.ask(line)
        if not cut:
            return ""
        if cut == "turns":
            return f"cut off at episode.turns {self.settings.turns}"
        if cut == "context":
            return "cut off: the context is full"
        if self.length >= self.sampling.max_tokens:
            return f"cut off at --max-tokens {self.sampling.max_tokens}"
        return f"cut off at episode.tokens {self.settings.tokens}"

    # ---- events of the chat ------------------------------------------------------------------------------------------

    def opening(self, text: str) -> None:
        self._print([labelled("user", text)])

    def piece(self, text: str) -> None:
        _show(text)

    def turn(self, turn: PlayedTurn) -> None:
        print(flush=True)
        self.length = len(turn.completion.tokens)
        messages = [answer.message for answer in turn.answers]
        self._print(answer_lines(turn.calls, [(message["role"], message["content"]) for message in messages]))

    def over(self, reward: float | None) -> None:
        gained = "" if reward is None else f": reward {reward:g}"
        print(f"(the episode is over{gained})", file=sys.stderr)

    def _print(self, lines: Sequence[str]) -> None:
        for line in lines:
            if self.dim:
                line = f"\x1b[2m{line}\x1b[0m"
            print(line, flush=True)


def _line(asked: bool) -> str | None:
    """The next message; None at the end of the input."""
    try:
        return input("> " if asked else "").strip()
    except EOFError:
        if asked:
            print()
        return None


def warn(note: str) -> None:
    print(f"warning: {note}", file=sys.stderr)


def chosen_model(model: str, inference: Inference) -> ChosenModel:
    """Find the model that the command line names.

    Raises:
        UserError: the model does not exist, or an option is wrong.
    """
    given = [f"data.template_arguments.{pair}" for pair in inference.template_argument]
    if inference.system is not None:
        given.append(f"data.system={json.dumps(inference.system, ensure_ascii=False)}")
    world = []
    if inference.tools is not None:
        world.append(f"task.tools=[{inference.tools}]")
    if inference.environment is not None:
        world.append(f"task.environment={inference.environment}")
    recipe: Any = {}
    plays = bool(world)
    longest = inference.max_length
    dtype = inference.dtype
    if longest is not None and longest < 2:
        raise FieldError("--max-length", longest, "must be >= 2")
    stored = written_config(run_of_model(model))
    if (Path(model) / "config.yaml").is_file():
        recipe = model
        path = str(find_checkpoint(model, inference.checkpoint).model)
        plays = plays or _plays(stored)
        longest = longest or (stored.get("model") or {}).get("max_length")
    else:
        remedy = model_problem(model)
        if remedy:
            raise one_problem("model", f"{remedy}; or the folder of a run", model, "command line")
        refuse_checkpoint(model, inference.checkpoint)
        fetch_demo_model(model)
        path = model
        if inference.environment:  # it alone reads rows, and only their numbers
            world += ["task.kind=seeds", "task.count=1000000"]
        else:
            world.append("task.kind=arithmetic")
    if dtype == "auto":
        dtype = engine_dtype(stored)
    if not plays:
        return ChosenModel(path, resolve(recipe, given, root=PromptConfig).config.data, longest, dtype=dtype)
    place = [f"model.path={json.dumps(path, ensure_ascii=False)}", "model.lora=null"]
    resolved = resolve(recipe, [*given, *world, *place], root=PlayedConfig)
    return ChosenModel(path, resolved.config.data, longest, resolved.config, dtype, resolved.locating)


def _plays(config: Mapping[str, Any]) -> bool:
    """True if the task of a run's config has an environment or tools."""
    task = config.get("task")
    return isinstance(task, dict) and bool(task.get("environment") or task.get("tools"))


@contextmanager
def open_table(chosen: ChosenModel) -> Iterator[Table | None]:
    """The player of the episodes of a model with tools or an environment, created before its weights load; otherwise
    None."""
    if chosen.played is None:
        yield None
        return
    with chosen.locating():
        table = make_table(chosen.played)
    if table is None:
        warn("the run's agent is a program of its own, which this command does not start")
        yield None
        return
    with closing(table.world):
        for note in table.notes:
            warn(note)
        table.require_question()
        yield table


def inference_sampling(inference: Inference, max_tokens: int, played: PlayedConfig | None = None) -> Sampling:
    """The sampling options; defaults: `max_tokens` or, if episodes are played, the run's limit and stop texts.

    Raises:
        FieldError: names the option as the user wrote it.
    """
    usual = Sampling(max_tokens=max_tokens) if played is None else played.sampling
    most = usual.max_tokens if inference.max_tokens is None else inference.max_tokens
    try:
        return Sampling(
            temperature=inference.temperature,
            top_k=inference.top_k,
            top_p=inference.top_p,
            min_p=inference.min_p,
            max_tokens=most,
            stop=tuple(inference.stop or usual.stop),
        )
    except FieldError as error:
        error.field = f"--{error.field.replace('_', '-')}"
        raise
