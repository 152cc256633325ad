"""A chat between an agent and the policy, whichever API the agent speaks."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from proxima.data.episode import ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]
Stored = Mapping[str, tuple["ChatMessage", ...]]  # the chats of earlier responses, by the response's id


@dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """A message as an agent sends it.

    Args:
        role: `system`, `user`, `assistant` or `tool`.
        content: its text, with `IMAGE_PLACEHOLDER` where it shows an image.
        calls: those of the assistant.
        images: the files of the images, or their numbers in the run's store.
    """

    role: str
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    images: tuple[bytes | int, ...] = ()


@dataclass(frozen=True)
class Grammar:
    """The form that an answer must have: a JSON schema, as JSON, and the field that asks for it."""

    schema: str
    field: str


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """An agent's request.

    Args:
        messages: at least one.
        tools: schemas of the tools that the model may call.
        max_tokens: limit of the answer; None: the run's limit.
        stop: texts that end the answer.
        model: the name that the agent sent; empty: none.
        forced: the tool that the answer must call; empty: the model decides.
        continues: the answer continues the last message, which is the assistant's.
        answers: number of answers, each of them a turn of a conversation of its own.
        log_probs: the answer has the log-probs of its tokens.
        grammar: the form of the answer; None: any.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    model: str = ""
    forced: str = ""
    continues: bool = False
    answers: int = 1
    log_probs: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True, kw_only=True)
class TokenLogProb:
    """A sampled token: its text, and its log-prob, nats, in the distribution from which it was sampled."""

    text: str
    log_prob: float

    @property
    def bytes(self) -> list[int] | None:
        """The bytes of the text; None for a part of a character."""
        if "\ufffd" in self.text:
            return None
        return list(self.text.encode())


@dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    """The model's message: its content without the calls, and the calls by id.

    Args:
        turn: its number in the episode.
        stopped_by: the stop string that ended it, which the content lacks; empty: none.
        log_probs: of all sampled tokens, where they were asked for.
    """

    content: str
    turn: int = 0
    calls: Mapping[str, ToolCall] = field(default_factory=dict)
    finish_reason: FinishReason = "stop"
    stopped_by: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    log_probs: tuple[TokenLogProb, ...] | None = None

    @property
    def message(self) -> ChatMessage:
        """The answer as a message of the chat."""
        return ChatMessage(role="assistant", content=self.content, calls=tuple(self.calls.values()))


class ChatRefused(Exception):
    """A refused request: OpenAI's status and code, and a message of one line."""

    def __init__(self, message: str, *, code: str = "invalid_request_error", status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status


Answer = Callable[[str, ChatRequest], Awaitable[Sequence[ChatAnswer]]]
"""Answers the request of the episode with this key, as often as it asks; may raise ChatRefused."""
Count = Callable[[str, ChatRequest], Awaitable[int]]
"""The number of tokens of the chat; may raise ChatRefused."""
Pay = Callable[[str, int, float], None]
"""Gives a turn of the episode with this key a reward; may raise ChatRefused."""


class ApiFormat(Protocol):
    """One API."""

    def parse(self, body: object, stored: Stored) -> ChatRequest:
        """The request. ChatRefused names the field that is invalid or unsupported."""

    def written(self, body: Mapping[str, Any], answers: Sequence[ChatAnswer], name: str, model: str) -> dict[str, Any]:
        """The JSON of the answers to a request.

        Args:
            name: unique among the answers of an episode.
            model: the name of the model.
        """

    def events(self, body: Mapping[str, Any], written: Mapping[str, Any]) -> Iterator[str]:
        """The answer as a stream of server-sent events."""

    def error(self, refusal: ChatRefused) -> dict[str, Any]:
        """The JSON of a refusal."""
