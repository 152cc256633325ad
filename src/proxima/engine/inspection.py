"""What an engine may be asked besides completions: the log-probs of given tokens, and what is in flight."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from proxima.data import Completion
from proxima.data.columns import Columns, Ints
from proxima.data.flow import Key


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreRequest(Columns):
    """Tokens to be scored.

    Args:
        prompt_tokens: [P] int32, the tokens that they are conditioned on; at least one.
        tokens: [T] int32.
        temperature: the logits are divided by it; 0 counts as 1, as for a greedy completion.
    """

    other_length: ClassVar[tuple[str, ...]] = ("prompt_tokens",)

    prompt_tokens: Ints
    tokens: Ints
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not len(self.prompt_tokens):
            raise ValueError("ScoreRequest.prompt_tokens: empty; nothing predicts the first token.")


@dataclass(frozen=True, kw_only=True, eq=False)
class InFlight(Columns):
    """A completion not yet delivered to its caller: it is running, or has ended and waits to be yielded.

    Args:
        key: prompt uid, sample and turn; the `key` that the completion will have.
        prompt_tokens: [P] int32, of its request.
        tokens: [T] int32, sampled so far.
        policy_version: [T] int32, the version of the weights that sampled each token.
        temperature: of its request.
    """

    other_length: ClassVar[tuple[str, ...]] = ("prompt_tokens",)

    key: Key
    prompt_tokens: Ints
    tokens: Ints
    policy_version: Ints
    temperature: float = 1.0

    @classmethod
    def of(cls, completion: Completion, prompt_tokens: Ints) -> "InFlight":
        """Convert a finished completion. No column is copied."""
        names = ("key", "tokens", "policy_version", "temperature")
        return cls(prompt_tokens=prompt_tokens, **{name: getattr(completion, name) for name in names})

    @classmethod
    def not_taken(cls, prompts: Mapping[Key, Ints], replies: Iterable[Any]) -> "list[InFlight]":
        """The finished completions among the replies that their caller has not taken yet; `prompts` are the tokens of
        each request's prompt, by its key."""
        completions = [reply for reply in replies if isinstance(reply, Completion)]
        return [cls.of(completion, prompts[completion.key]) for completion in completions]
