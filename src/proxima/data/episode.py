"""The record of an episode: its messages as spans of tokens, the rewards of its turns, and how it ended."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from proxima.data.json_reader import load_json

Cut = Literal["", "turns", "tokens", "context"]


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A call that the model wrote: the tool's name, and its arguments by name."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Span:
    """The part of a response that comes from one message. Several messages between two turns form one span, with the
    role of the first and their texts joined by newlines.

    Args:
        role: the author of the message: `assistant`, `user`, `tool`, `system`.
        tokens: the number of response tokens in the span; the spans of a path, in order, cover all of them.
        text: the message's content; for the model's messages, the decoded tokens.
        sampled: the model wrote it in this path, and it is trained on here, unless a grammar restricted it.
        grammar: the model wrote it under a grammar, whose mask is unknown, so that it is not trained on.
        turn: number of the model's turn, from 0; for an observation, the turn that it answers.
        reward: the environment's reward for this turn, in reward units; 0 for an observation.
        calls: the tool calls that could be parsed from the model's message.
        unreadable: why each other call could not be parsed, one line each.
        written_as: the format of its calls, if that is not the one that is read; empty: it is, or there are none.
        error: for an observation: a tool raised, or a call could not be parsed.
        state: the environment's name for its state before this turn, for advantages that compare turns in the same
            state; None: the last observation identifies the state.
    """

    role: str
    tokens: int
    text: str = ""
    sampled: bool = False
    grammar: bool = False
    turn: int = 0
    reward: float = 0.0
    calls: tuple[ToolCall, ...] = ()
    unreadable: tuple[str, ...] = ()
    written_as: str = ""
    error: bool = False
    state: str | None = None


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A path of an episode, and facts about the whole episode.

    Args:
        spans: the messages after the initial prompt, in order; see `Span`.
        reward: reward units, the sum over the turns plus the environment's final reward; None: the environment gives no
            reward, or this path is not the last one.
        cut: the limit that ended the episode; empty: it ended by itself.
        failure: why there is no result, one line; such an episode has no valid score. Empty: no failure.
        attempts: how many times the episode was started.
        forks: the number of other paths of the episode.
        player: who wrote the turns of this path if the policy plays several roles: a role, or a numbered attempt of
            one, `solver/2`; empty: the episode has no roles.
        rewards: the reward of each player by name, reward units; only on the last path. `reward` is then the mean over
            the roles. Empty: `reward` counts for all players.
        parts: the values from which the environment computed its reward, by name; only on the last path.
        unrewarded: why there is no reward although nothing failed: a limit cut the episode, and then the agent failed;
            only on the last path.
        seconds: where its time went, over all attempts: `queued`, for a place to play; `own`, of its environment or
            agent, which alone `episode.seconds` limits; `policy`, for the model. Only on the last path; empty: unknown.
    """

    spans: tuple[Span, ...] = ()
    reward: float | None = None
    cut: Cut = ""
    failure: str = ""
    attempts: int = 1
    forks: int = 0
    player: str = ""
    rewards: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    unrewarded: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def turns(self) -> tuple[Span, ...]:
        """The spans that the model wrote in this path."""
        return tuple(span for span in self.spans if span.sampled)

    def facts(self) -> dict[str, Any]:
        """Return the fields as JSON values; those of roles, parts, `unrewarded`, `seconds`, `written_as` and
        `grammar` only where set."""
        optional = ("player", "rewards", "parts", "unrewarded", "seconds")
        facts = {name: value for name, value in asdict(self).items() if value or name not in optional}
        for span in facts["spans"]:
            for name in ("written_as", "grammar"):
                if not span[name]:
                    del span[name]
        return facts

    def to_json(self) -> str:
        """Serialise as a line of JSON, which `from_json` reads."""
        return json.dumps(self.facts(), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> "Episode":
        facts = dict(load_json(text))
        facts["spans"] = tuple(map(_span, facts["spans"]))
        return cls(**facts)


def _span(facts: Mapping[str, Any]) -> Span:
    facts = dict(facts)
    facts["calls"] = tuple(ToolCall(**call) for call in facts["calls"])
    facts["unreadable"] = tuple(facts["unreadable"])
    return Span(**facts)


class EpisodeLife(NamedTuple):
    """The start and end of an episode, over all attempts; `turns`, the start and end of each wait for the model, and
    `queued`, of each wait for a place to play. The rest of the time was spent in the environment. Seconds on the event
    loop's clock."""

    uid: int
    sample: int
    begin: float
    end: float
    turns: Sequence[tuple[float, float]]
    queued: Sequence[tuple[float, float]] = ()
