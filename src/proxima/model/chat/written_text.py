"""What the policy wrote, as text: one definition for rewards, tool readers, environments, evaluations, the viewer and
the files of a run.

The text of an answer runs from the end of the chat's prefix, which is the header that the template writes before every
answer, to the end of the turn. So it includes

    the beginning that the prompt already has: a thought that the template opens, and the text of a prefilled answer
    control tokens that the policy sampled, such as a `<think>` or an `<answer>` that the tokenizer knows as special
    the stop string that ended it; what a last token has beyond the string is left out

and leaves out only the token that ended the turn. A thought that the template opens and closes itself, as Qwen3's does
with `enable_thinking: false`, is the template's, and no part of the text.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from proxima.data import UserError
from proxima.data.columns import Ints
from proxima.data.flow import Message
from proxima.model.chat.answer import ANSWER, ASKED
from proxima.model.chat.encode import (
    SafeMessage,
    Tokenizer,
    added_tokens,
    chat_and_tokens,
    end_of_text,
    is_begun,
    render_chat,
    with_stand_ins,
)

_NAMES = "think|thinking|thought|thoughts|reason|reasoning|scratchpad|analysis|reflection"  # of tags around a thought
OPENS_THOUGHT = re.compile(rf"<(?:\w+:)?(?:{_NAMES})>|\[THINK\]|◁think▷|<\|begin_of_thought\|>")
CLOSES_THOUGHT = re.compile(rf"(?:</(?:\w+:)?(?:{_NAMES})>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>)\s*")
Ids = Sequence[int] | Ints


# ---- the text of an answer -------------------------------------------------------------------------------------------


class WrittenText(NamedTuple):
    """`Completion.text` and `Completion.stopped_by`."""

    text: str
    stopped_by: str


def written_text(
    tokenizer: Any, tokens: Ids, *, begun: str = "", ends: Collection[int] = (), stop: Sequence[str] = ()
) -> WrittenText:
    """The text of an answer, and the stop string that ended it.

    Args:
        tokens: [T], the ids that the policy sampled, in order.
        begun: the beginning of the answer that the prompt has, see `Prompt.begun`.
        ends: ids that end a completion; the last token is left out if it is one of them, and a control token.
        stop: the stop strings of the sampling.
    """
    if len(tokens) and int(tokens[-1]) in ends and _ends_a_turn(tokenizer, int(tokens[-1])):
        tokens = tokens[:-1]
    text = sampled_text(tokenizer, tokens, after_text=bool(begun))
    start, end = stop_string(text, stop) or (len(text), len(text))
    return WrittenText(begun + text[:end], text[start:end])


def sampled_text(tokenizer: Any, tokens: Ids, *, after_text: bool = False) -> str:
    """The text of sampled tokens, control tokens included; bytes that are no character become U+FFFD.

    Args:
        after_text: decode as after other text, with the leading space that some tokenizers drop from the first token
            of a text.
    """
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    if not after_text:
        return str(tokenizer.decode(tokens, **options))
    first = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    before = tokenizer.decode(first, **options)
    text = tokenizer.decode([*first, *tokens], **options)
    return str(text[len(before) :])


def stop_string(text: str, stop: Sequence[str]) -> tuple[int, int] | None:
    """Start and end of the stop string that is complete first, or None. The whole text is searched: a stop string may
    span tokens. Of several with the same end, the one that starts first."""
    places = []
    for string in stop:
        start = text.find(string)
        if start >= 0:
            places.append((start + len(string), start))
    if not places:
        return None
    end, start = min(places)
    return start, end


@lru_cache(maxsize=1024)
def _ends_a_turn(tokenizer: Any, token: int) -> bool:
    """True for a control token, unless it closes a tag, such as an `</answer>` among a model's stop tokens."""
    known = added_tokens(tokenizer)
    if token == end_of_text(tokenizer):
        return True
    if token not in known or not known[token].special:
        return False
    text = known[token].content
    if not text.startswith("</"):
        return True
    return text.replace("</", "<") not in {added.content for added in known.values()}


# ---- the beginning that a prompt has ---------------------------------------------------------------------------------


def prompt_and_beginning(
    messages: Sequence[Message], tokenizer: Tokenizer, arguments: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Ints, str]:
    """The token ids of a chat, ready for the answer (`prompt_tokens`), and the beginning of the answer that they
    have."""
    chat, tokens = chat_and_tokens(messages, tokenizer, arguments, complete=False)
    content = messages[-1]["content"] if is_begun(messages) else ""
    return np.array(tokens, np.int32), answer_beginning(chat, tokenizer, arguments, content)


def answer_beginning(chat: str | None, tokenizer: Tokenizer, arguments: Mapping[str, Any], content: str = "") -> str:
    """The beginning of the next answer that a chat has.

    Args:
        chat: as `render_chat` gives it, ready for the answer; None: a text without chat template.
        content: of the assistant's last message, which the answer continues; empty: it continues none.
    """
    if chat is None or tokenizer.chat_template is None:
        return content
    before = chat
    if content:
        before = chat.removesuffix(with_stand_ins(content, tokenizer))
    named = json.dumps({name: value for name, value in arguments.items() if name != "tools"}, default=repr)
    untyped: Any = tokenizer
    header, opened = _answer_header(untyped, str(tokenizer.chat_template), named)
    if header and header in before:
        opened = before.rpartition(header)[2]
    elif not opened or not before.endswith(opened):
        opened = ""
    return CLOSES_THOUGHT.split(opened)[-1] + content


@lru_cache(maxsize=64)
def _answer_header(tokenizer: Any, template: str, named: str) -> tuple[str, str]:
    """What the template writes before the text of every answer, and what it then opens, in a short chat; `named` are
    its arguments. Some write a thought, maybe an empty one, before a last answer: the header ends before it."""
    arguments = json.loads(named)

    def rendered(*messages: Message, ending: Any = "complete") -> str:
        return render_chat(
            [SafeMessage(message, tokenizer) for message in messages], tokenizer, arguments, ending=ending
        )

    try:
        prompt = rendered(ASKED, ending="prompt")
        asked = rendered(ASKED)
    except UserError:  # said where a row is rendered
        return "", ""
    end = len(prompt)
    for chat in ((ASKED, ANSWER), (ASKED, ANSWER, ASKED)):
        try:
            before, answer, _ = rendered(*chat).rpartition(ANSWER["content"])
        except UserError:  # the template refuses such a chat, or changes its text
            continue
        if answer:
            end = min(end, _common(prompt, before))
    start = min(_common(prompt, asked), end)
    header = prompt[start:end]
    thought = OPENS_THOUGHT.search(header)
    if thought is not None:
        header = header[: thought.start()]
    return header, prompt[start + len(header) :]


def _common(text: str, other: str) -> int:
    """The length of the common prefix."""
    for place, (ours, theirs) in enumerate(zip(text, other, strict=False)):
        if ours != theirs:
            return place
    return min(len(text), len(other))
