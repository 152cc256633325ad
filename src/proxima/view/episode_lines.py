"""An episode as text: messages with their roles, tool calls, the tools' answers, and the limits that ended it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from proxima.data.episode import Episode, Span, ToolCall
from proxima.data.flow import Completion
from proxima.view.formatting import percent, shortened, signed, visible

TIMES = {"queued": "queued", "own": "own", "policy": "the policy's"}  # see `Episode.seconds`
LABEL = 8  # columns of a role's label
MESSAGE = 400  # characters of a message on a page
MESSAGES = 24  # of an episode there


def labelled(label: str, text: str) -> str:
    """`user    What is 2 + 2?`, further lines below the first."""
    lines = (f"{'':<{LABEL}}{line}".rstrip() for line in visible(text.strip("\n")).split("\n"))
    return f"{label:<{LABEL}}" + "\n".join(lines).removeprefix(" " * LABEL)


def call_text(call: ToolCall) -> str:
    """`calculate(expression="3*4")`."""
    arguments = []
    for name, value in call.arguments.items():
        text = json.dumps(value, ensure_ascii=False)
        if name:
            text = f"{name}={text}"
        arguments.append(text)
    return f"{call.name}({', '.join(arguments)})"


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
        speaker = "model" if span.role == "assistant" else span.role
        yield labelled(speaker, span.text)
        yield from map(call_line, span.calls)
    if episode.failure:
        yield f"failed: {visible(episode.failure)}"
    if episode.cut:
        yield f"(cut off by the limit of {episode.cut})"
    if episode.unrewarded:
        yield f"(no reward: {visible(episode.unrewarded)})"
    if episode.reward is not None:
        yield f"(reward {episode.reward:g})"
    for player, reward in episode.rewards.items():
        yield f"(reward of {player} {reward:g})"
    if episode.seconds:
        spent = (f"{name} {episode.seconds[account]:.1f} s" for account, name in TIMES.items())
        yield f"(time: {', '.join(spent)})"


def shown_messages(episode: str) -> list[dict[str, Any]]:
    """Return the messages of a stored episode in order, for a page: the model's text, its calls, and the answers."""
    path = Episode.from_json(episode)
    spans = path.spans
    shown = [
        {
            "role": span.role,
            "text": shortened(span.text, MESSAGE),
            "calls": [call_text(call) for call in span.calls],
            "unreadable": list(span.unreadable),
            "error": span.error,
            "reward": _beside(span, path.player),
        }
        for span in spans[:MESSAGES]
    ]
    if len(spans) > MESSAGES:
        shown.append({**dict.fromkeys(shown[0], ""), "text": f"… {len(spans) - MESSAGES} further messages"})
    return shown


def _beside(span: Span, player: str) -> str:
    """What stands beside a message: its reward, or else who wrote it."""
    if span.reward:
        return f"reward {signed(span.reward, 2)}"
    return player if span.sampled else ""


def limits_reached(share: float, figures: Mapping[str, Any], max_tokens: str) -> str:
    """Name the limits that ended a share of the episodes, the most frequent first, and the settings that raise them.

    Args:
        figures: metrics of `episode_metrics`; records of earlier versions do not distinguish the limits.
        max_tokens: the setting that bounds a turn.
    """
    remedies = {"turns": "episode.turns", "tokens": f"{max_tokens} or episode.tokens", "context": "model.max_length"}
    counts = {limit: figures.get(f"episode/cut/{limit}") or 0 for limit in remedies}
    reached = sorted((limit for limit in remedies if counts[limit]), key=lambda limit: -counts[limit])
    if not reached:
        return f"a limit; raise {max_tokens}, episode.turns or episode.tokens"
    total = sum(counts.values())
    shares = ", ".join(f"{limit} {percent(share * counts[limit] / total)}" for limit in reached)
    return f"a limit ({shares}); raise {', '.join(remedies[limit] for limit in reached)}"
