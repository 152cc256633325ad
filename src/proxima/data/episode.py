"""Record of an episode: its messages as spans of tokens, the rewards of its turns, and how it ended."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

Cut = Literal["", "turns", "tokens", "context"]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that the model wrote: the tool's name, and its arguments by name."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a response that one message gave, or several between two turns: one span, with the role of the
    first and the texts joined by line ends.

    Args:
        role: whose message: `assistant`, `user`, `tool`, `system`.
        tokens: how many tokens of the response it has; the spans of a path, in order, have all of them.
        text: the message's content; of the model, its tokens decoded.
        sampled: the model wrote it in this path, and it is trained on here.
        turn: number of the model's turn, from 0; of an observation, the turn that it answers.
        reward: of this turn by the environment, in reward units; 0 for an observation.
        calls: those that could be read in the model's message.
        unreadable: why a call could not be read, one line each.
        error: of an observation: a tool raised, or a call could not be read.
        state: what the environment calls its state before this turn, for advantages that compare turns of one state;
            None: it gives none, and the last observation stands for it.
    """

    role: str
    tokens: int
    text: str = ""
    sampled: bool = False
    turn: int = 0
    reward: float = 0.0
    calls: tuple[ToolCall, ...] = ()
    unreadable: tuple[str, ...] = ()
    error: bool = False
    state: str | None = None


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A path of an episode, with facts about the whole episode.

    Args:
        spans: the messages after the opening, in order; see `Span`.
        reward: reward units, the sum over the turns and what the environment gave at the end; None: it gives none, or
            this path is not the last one.
        cut: the limit that ended it; empty: it ended by itself.
        failure: why there is no result, one line; such an episode has no valid score. Empty: none.
        attempts: how many times it was started.
        forks: paths that the episode has in addition to this one.
    """

    spans: tuple[Span, ...] = ()
    reward: float | None = None
    cut: Cut = ""
    failure: str = ""
    attempts: int = 1
    forks: int = 0

    @property
    def turns(self) -> tuple[Span, ...]:
        """The spans that the model wrote in this path."""
        return tuple(span for span in self.spans if span.sampled)

    def to_json(self) -> str:
        """The record as one line of JSON, read by `from_json`."""
        return json.dumps(asdict(self), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> "Episode":
        values = json.loads(text)
        return cls(**{**values, "spans": tuple(_span(value) for value in values["spans"])})


def _span(values: Mapping[str, Any]) -> Span:
    calls: Sequence[Mapping[str, Any]] = values["calls"]
    made = tuple(ToolCall(**call) for call in calls)
    return Span(**{**values, "calls": made, "unreadable": tuple(values["unreadable"])})


class EpisodeLife(NamedTuple):
    """The times between which an episode was played, over all attempts, and waited for each turn of the model; the
    remaining time was its environment's. Seconds of the event loop's clock."""

    uid: int
    sample: int
    begin: float
    end: float
    turns: Sequence[tuple[float, float]]
