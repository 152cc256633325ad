"""An episode as lines of text: messages with their roles, tool calls, and the tools' answers."""

from collections.abc import Iterator, Sequence

from proxima.data import Completion, ToolCall
from proxima.view.formatting import call_text, visible

LABEL = 8  # columns of a role's label


def labelled(label: str, text: str) -> str:
    """`user    What is 2 + 2?`, further lines below the first."""
    lines = (f"{'':<{LABEL}}{line}".rstrip() for line in visible(text.strip("\n")).split("\n"))
    return f"{label:<{LABEL}}" + "\n".join(lines).removeprefix(" " * LABEL)


def call_line(call: ToolCall) -> str:
    """`call    add(a=1, b="x")`."""
    return labelled("call", call_text(call))


def answer_lines(calls: Sequence[ToolCall], answers: Sequence[tuple[str, str]]) -> list[str]:
    """Format the calls of a turn and the messages that answer it, given as role and text."""
    return [*map(call_line, calls), *(labelled(role, text) for role, text in answers)]


def episode_lines(question: str, completion: Completion) -> Iterator[str]:
    """Format a whole episode and its outcome; the last version if the chat template has rewritten it."""
    episode = completion.episode
    assert episode is not None
    yield labelled("user", question)
    for span in episode.spans:
        yield labelled("model" if span.role == "assistant" else span.role, span.text)
        yield from map(call_line, span.calls)
    if episode.failure:
        yield f"failed: {visible(episode.failure)}"
    if episode.cut:
        yield f"(cut off by the limit of {episode.cut})"
    if episode.reward is not None:
        yield f"(reward {episode.reward:g})"
