"""The text of a completion, independent of the engine that sampled its tokens."""

from collections.abc import Sequence
from typing import Any

from proxima.data.columns import Ints


def decoded(tokenizer: Any, tokens: Ints) -> str:
    """The text of tokens, without special tokens."""
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text


def stop_at(text: str, stop: Sequence[str]) -> int | None:
    """The index where the first stop string starts, or None. The whole text is searched: a stop string may span
    tokens."""
    return min((at for string in stop if (at := text.find(string)) >= 0), default=None)
