"""Answers to chats as token ids, for answers that no engine has generated, and how a template ends them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from proxima.data import FieldError, UserError
from proxima.data.columns import Ints
from proxima.data.flow import Message
from proxima.model.chat.encode import SafeMessage, Tokenizer, added_tokens, chat_tokens, is_begun, render_chat
from proxima.model.chat.template_inputs import THOUGHT

ASKED: Message = {"role": "user", "content": "Hello?"}
ANSWER: Message = {"role": "assistant", "content": "Hello!"}


def completion_tokens(
    prompt: Sequence[Message],
    answer: str | Message,
    tokenizer: Tokenizer,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Ints:
    """[T] token ids of the assistant's answer to a chat, a text or a message with its thought and tool calls, up to and
    including the token that ends its turn: what an engine would have generated after `prompt_tokens(prompt)`. Without a
    chat template that token is the tokenizer's EOS. If the chat ends with the assistant, the answer continues its text.

    Raises:
        UserError: as `prompt_tokens`; the tokens of the whole chat do not begin with those of the prompt; or no control
            token ends the turn, and a model trained on it would not stop.
    """
    before, tokens, common = _with_answer(prompt, answer, tokenizer, arguments)
    if common < len(before):
        what = "the tokens of the chat with this answer do not begin with those of its prompt"
        remedy = "the template or the tokenizer joins them; remove space around the answer"
        if isinstance(answer, Mapping) and answer.get(THOUGHT) and arguments.get("enable_thinking") is False:
            what = "has a thought, and with enable_thinking=false the prompt ends after an empty one"
            remedy = "remove the thought, or set enable_thinking=true for the row"
        raise UserError(what, remedy=remedy)
    return np.array(tokens[common:], np.int32)


def read_tokens(prompt: Sequence[Message], text: str, tokenizer: Tokenizer) -> tuple[Ints, Ints]:
    """The token ids of a chat with an answer, up to and including the one that ends its turn, for a model that only
    reads them: the prefix shared with `prompt_tokens(prompt)`, and the rest. The prefix is shorter than `prompt_tokens`
    where the template or tokenizer joins the two, such as a line end and an answer that begins with one.

    Raises:
        UserError: as `completion_tokens`, except for joined tokens.
    """
    before, tokens, common = _with_answer(prompt, text, tokenizer, {})
    return np.array(before[:common], np.int32), np.array(tokens[common:], np.int32)


def _with_answer(
    prompt: Sequence[Message], answer: str | Message, tokenizer: Tokenizer, arguments: Mapping[str, Any]
) -> tuple[list[int], list[int], int]:
    """The tokens of the prompt, those of the chat with the answer up to the end of its turn, and the length of their
    common prefix."""
    said = answer
    if isinstance(said, str):
        said = {"role": "assistant", "content": said}
    if is_begun(prompt):
        *prompt_before, begun = prompt
        chat = [*prompt_before, {**begun, **said, "content": begun["content"] + said["content"]}]
    else:
        chat = [*prompt, said]
    before = chat_tokens(prompt, tokenizer, arguments, complete=False)
    tokens = chat_tokens(chat, tokenizer, arguments, complete=True)
    special = cast(Any, tokenizer)
    common = 0
    for ours, theirs in zip(before, tokens, strict=False):
        if ours != theirs:
            break
        common += 1
    ends = {i for i, token in special.added_tokens_decoder.items() if token.special}
    ends.add(special.eos_token_id)
    end = next((i for i in reversed(range(common, len(tokens))) if tokens[i] in ends), None)
    if end is None or special.decode(tokens[end + 1 :]).strip():
        what = "no end-of-turn token follows the answer, so that a model trained on it would not stop"
        raise UserError(what, remedy="repair the chat template, or give the tokenizer an eos_token")
    return before, tokens[: end + 1], common


def answer_tokens(
    chat: Sequence[Message], answer: Message, tokenizer: Tokenizer, arguments: Mapping[str, Any], field: str
) -> Ints:
    """Return `completion_tokens` of a row; FieldError, with the answer's `field`, if the answer can't be used."""
    try:
        return completion_tokens(chat, answer, tokenizer, arguments)
    except FieldError:
        raise
    except UserError as error:
        raise FieldError(field, answer_excerpt(answer), f"can't be used: {error.reason}", remedy=error.remedy) from None


def shown_answer(message: Message) -> str:
    """What a message of the assistant says, its tool calls as JSON, for display."""
    texts = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    if message["content"]:
        texts.insert(0, message["content"])
    return "\n".join(texts)


def answer_excerpt(message: Message) -> str:
    """The beginning of `shown_answer`, for an error message."""
    return row_excerpt(shown_answer(message))


def row_excerpt(value: Any) -> str:
    """Return a value of a row, or its beginning, for an error message."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


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
    """The end of a turn of the assistant in the tokenizer's chat template; None without a template, or
    if the template fails for a short chat or changes its text."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    messages = [SafeMessage(message, tokenizer) for message in (ASKED, ANSWER)]
    try:
        _, answer, after = render_chat(messages, tokenizer, {}, ending="complete").rpartition(ANSWER["content"])
    except UserError:  # said where a row is rendered
        return None
    text = after.strip()
    added = added_tokens(tokenizer).items()
    begins = [(len(token.content), i) for i, token in added if token.content and text.startswith(token.content)]
    _, longest = max(begins, default=(0, None))
    if answer:
        return TurnEnd(text, longest)
    return None
