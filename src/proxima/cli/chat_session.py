"""`proxima generate --chat`: answer the messages of standard input, one after the other."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from proxima.cli.model_asked import Inference, ModelAsked, model_asked, open_table, warn
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.api.episode_chat import Table
    from proxima.rollout.episodes.played import PlayedTurn

NEW = "/new"
MOST = 512  # new tokens


def converse_with(model: str, inference: Inference) -> None:
    """Answer standard input, message by message, until it ends.

    Raises:
        UserError: the model or an option is wrong.
    """
    from proxima.model.chat.template import fixed_clock

    asked = model_asked(model, inference)
    with fixed_clock(asked.data.template_date), open_table(asked) as table:
        return _talk(asked, inference) if table is None else EpisodeTalk(asked, table, inference).run()


def _talk(asked: ModelAsked, inference: Inference) -> None:
    """A chat without tools."""
    from proxima.api.local_answers import ChatSession, local_engine

    sampling, data = inference.sampling(MOST), asked.data
    place: Any = {"max_length": asked.max_length, "stop": sampling.stop}
    conversation = ChatSession(
        *local_engine(asked.path, inference.dtype, inference.device, warn, **place),
        sampling,
        seed=inference.seed,
        system=data.system,
        template_arguments=data.template_arguments,
    )

    def answer(line: str) -> str:
        whole = conversation.answer(line, _show)
        print(flush=True)
        return "" if whole else f"cut off at --max-tokens {sampling.max_tokens}"

    _converse(asked.path, conversation.messages.clear, answer)


def _converse(title: str, new: Callable[[], None], answer: Callable[[str], str]) -> None:
    """Answer line by line. Each callable prints its own output, and returns a note to print, or an empty one."""
    from proxima.view.formatting import visible

    def attempt(act: Callable[[], str | None]) -> None:
        try:
            if note := act():
                print(f"({note})", file=sys.stderr)
        except KeyboardInterrupt:
            print(" …", flush=True)
        except UserError as error:
            print(f"error: {visible(str(error))}; {NEW} begins a new chat", file=sys.stderr)

    asked = sys.stdin.isatty()  # a person, who sees a prompt
    if asked:
        print(f"{title}: Ctrl-D ends the chat, Ctrl-C an answer, {NEW} begins a new chat", file=sys.stderr)
    while (line := _line(asked)) is not None:
        if line:
            attempt(new if line == NEW else partial(answer, line))


def _show(piece: str) -> None:
    from proxima.view.formatting import visible, write_safely

    write_safely(sys.stdout, visible(piece))


class EpisodeTalk:
    """A chat with tools or an environment: prints the events of an `EpisodeChat`."""

    def __init__(self, asked: ModelAsked, table: "Table", inference: Inference) -> None:
        from proxima.api.episode_chat import EpisodeChat
        from proxima.api.local_answers import local_engine

        self.title, self.settings, self.tools = asked.path, table.world.rules.settings, table.world.rules.tools
        self.sampling = inference.sampling(MOST, asked.played)
        place: Any = {"max_length": asked.max_length, "stop": self.sampling.stop}
        _, engine = local_engine(asked.path, inference.dtype, inference.device, warn, **place)
        self.chat = EpisodeChat(table, engine, self.sampling, inference.seed, self)
        self.length = 0  # tokens of the last turn
        self.dim = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def run(self) -> None:
        """Chat until the input ends."""
        tools = f" with {', '.join(sorted(self.tools))}" if self.tools else ""
        _converse(f"{self.title}{tools}", self.chat.new, self._answer)

    def _answer(self, line: str) -> str:
        """Let the model answer, and name the limit that cut the answer off."""
        cut = self.chat.ask(line)
        if cut == "turns":
            return f"cut off at episode.turns {self.settings.turns}"
        if cut == "context":
            return "cut off: the context is full"
        most = self.sampling.max_tokens if self.length >= self.sampling.max_tokens else None
        limit = f"--max-tokens {most}" if most else f"episode.tokens {self.settings.tokens}"
        return f"cut off at {limit}" if cut else ""

    # ---- events of the chat ------------------------------------------------------------------------------------------

    def opening(self, text: str) -> None:
        from proxima.view.episode_lines import labelled

        self._print([labelled("user", text)])

    def piece(self, text: str) -> None:
        _show(text)

    def turn(self, turn: "PlayedTurn") -> None:
        from proxima.view.episode_lines import answer_lines

        print(flush=True)
        self.length = len(turn.completion.tokens)
        self._print(answer_lines(turn.calls, [(message["role"], message["content"]) for message, _ in turn.answers]))

    def over(self, reward: float | None) -> None:
        gained = "" if reward is None else f": reward {reward:g}"
        print(f"(the episode is over{gained})", file=sys.stderr)

    def _print(self, lines: Sequence[str]) -> None:
        for line in lines:
            print(f"\x1b[2m{line}\x1b[0m" if self.dim else line, flush=True)


def _line(asked: bool) -> str | None:
    """The next message; None at the end of the input."""
    try:
        return input("> " if asked else "").strip()
    except EOFError:
        if asked:
            print()
        return None
