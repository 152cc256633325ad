"""How a chat template ends a turn of the assistant."""

from dataclasses import dataclass
from typing import Any

from proxima.data import UserError
from proxima.data.flow import Message
from proxima.model.chat import SafeMessage, render_chat

ASKED: Message = {"role": "user", "content": "Hello?"}
ANSWER: Message = {"role": "assistant", "content": "Hello!"}


@dataclass(frozen=True)
class TurnEnd:
    """The end of a turn.

    Args:
        text: what the template writes after an answer, without space around it; empty: nothing.
        token: the id of the control token that it begins with; None: it begins with none.
    """

    text: str
    token: int | None


def turn_end(tokenizer: Any) -> TurnEnd | None:
    """The end of a turn of the assistant in the tokenizer's chat template; None without a template, or if it can't be
    told: the template fails for a short chat, or changes its text."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    messages = [SafeMessage(message, tokenizer) for message in (ASKED, ANSWER)]
    try:
        _, answer, after = render_chat(messages, tokenizer, {}, ending="complete").rpartition(ANSWER["content"])
    except UserError:  # said where a row is rendered
        return None
    text = after.strip()
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    token = max(((len(t.content), i) for i, t in added if t.content and text.startswith(t.content)), default=None)
    return TurnEnd(text, None if token is None else int(token[1])) if answer else None
