"""The chat template over several turns: the text that it renders for a chat, and the tokens of parts of that text."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

import numpy as np

from proxima.data import UserError
from proxima.data.columns import Ints
from proxima.data.flow import Message
from proxima.model import chat
from proxima.model.template_variables import reads_tools
from proxima.task.prompts import tokens_in_common

Ids = Sequence[int] | Ints


class TurnTemplate:
    """Renders and encodes the chats of a run. Control texts in contents are replaced by stand-ins, so that control
    tokens come only from the template (`model/chat.py`).

    Args:
        tokenizer: the policy's tokenizer.
        arguments: arguments of the template other than messages and tools.
        tools: JSON schemas for the template's `tools`; None or empty: none.
    """

    def __init__(
        self, tokenizer: chat.Tokenizer, arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self.tokenizer: Any = tokenizer
        self.supports_tools = reads_tools(tokenizer)
        given = {"tools": chat.safe_value(tools, tokenizer)} if tools and self.supports_tools else {}
        self._arguments = {**arguments, **given}
        self._ends: dict[tuple[str, ...], bool] = {}
        self._beginnings: dict[tuple[tuple[str, str], ...], Ints] = {}

    def message(self, message: Message) -> chat.SafeMessage:
        """Prepare a message for `render`. A lone surrogate, which no tokenizer encodes, becomes a question mark."""
        content = message["content"].encode(errors="replace").decode()
        return chat.SafeMessage({**message, "content": content}, self.tokenizer)

    def render(self, messages: Sequence[chat.SafeMessage], *, ending: chat.Ending = "prompt") -> str:
        """Render a chat as text, by default with its generation prompt.

        Raises:
            UserError: the template fails, turns a message's own text into a control token, or can't leave the last
                message `open`.
        """
        return chat.render_chat(messages, self.tokenizer, self._arguments, ending=ending)

    def encode_opening(self, text: str) -> list[int]:
        """Encode the text of an opening."""
        return chat.encode_opening(text, self.tokenizer)

    def opening(self, messages: Sequence[Message], tokens: Ints) -> int:
        """Compute `Prompt.opening` of an episode: the number of tokens in its first prompt for tools and for the
        messages before the first user message. Which part of a `reset` text is constant can't be told from other
        rows."""
        before = tuple(takewhile(lambda message: message["role"] != "user", messages))
        key = tuple((message["role"], message["content"]) for message in before)
        if key not in self._beginnings:
            try:
                text, _ = self.around([self.message(message) for message in before], (), "user")
            except UserError:  # the template wants more messages
                text = ""
            self._beginnings[key] = np.array(self.encode_opening(text) if text else (), np.int32)
        return tokens_in_common(tokens, self._beginnings[key])

    def encode_after(self, before: str, text: str) -> list[int]:
        """Encode a text that follows another. If a control token ends the first text, it is encoded together with the
        text, since such a token may absorb the space around it."""
        anchor = next((c for c in chat.control_texts(self.tokenizer) if before.endswith(c)), "")
        return chat.encode_part(anchor + text, self.tokenizer)[1 if anchor else 0 :]

    def safe(self, text: str) -> str:
        """Return the text of a content in the form in which `render` shows it."""
        return chat.with_stand_ins(text, self.tokenizer)

    def decode(self, tokens: Ids, *, after_text: bool = False) -> str:
        """Decode sampled tokens, including control tokens. Invalid bytes become replacement characters.

        Args:
            after_text: decode as after other text, with the leading space that some tokenizers drop from the first
                token of a text.
        """
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        if not after_text:
            return str(self.tokenizer.decode(tokens, **options))
        first = self.tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        text, before = (self.tokenizer.decode([*first, *ids], **options) for ids in (tokens, ()))
        return str(text[len(before) :])

    def without_end(
        self, tokens: Ids, history: Sequence[chat.SafeMessage], following: Sequence[chat.SafeMessage]
    ) -> int:
        """Count the tokens of a turn that belong to the message: all, or all but the last if that is the control token
        that the template itself writes after a message in this position."""
        control = self.decode(tokens[-1:])
        if control not in chat.control_texts(self.tokenizer):
            return len(tokens)
        place = (control, *(message.safe["role"] for message in following))
        if place not in self._ends:
            self._ends[place] = self.around(history, following)[1].lstrip().startswith(control)
        return len(tokens) - self._ends[place]

    def around(
        self, history: Sequence[chat.SafeMessage], following: Sequence[chat.SafeMessage], role: str = "assistant"
    ) -> tuple[str, str]:
        """Return the text that the template writes before and after a message between two parts of a chat."""
        contents = "".join(message.text for message in (*history, *following))
        mark = next(chr(code) for code in range(0xFFFFD, 0, -1) if chr(code) not in contents)
        text = self.render([*history, self.message({"role": role, "content": mark}), *following])
        before, _, behind = text.rpartition(mark)
        return before, behind

    def rewritten(self, tokens: Ids, text: str, before: str, new: str) -> list[int]:
        """Return the tokens of a text that replaces another: unchanged tokens at the beginning and end are kept, the
        text between them is encoded.

        Args:
            tokens, text: the old tokens and their text.
            before, new: the text before them, and the text that replaces them.
        """
        pieces = self._pieces(tokens, text)
        if pieces is None:
            return self.encode_after(before, new)
        texts = [piece for _, piece in pieces]
        counts = [0, *accumulate(count for count, _ in pieces)]
        head = tail = 0
        starts = [0, *accumulate(map(len, texts))]
        while head < len(texts) and new.startswith(texts[head], starts[head]):
            head += 1
        length = len(new) - starts[head]
        while (
            tail < len(texts) - head
            and starts[-1] - starts[-2 - tail] <= length
            and new.endswith(text[starts[-2 - tail] :])
        ):
            tail += 1
        end = len(new) - (starts[-1] - starts[-1 - tail])
        middle = self.encode_after(before + new[: starts[head]], new[starts[head] : end])
        return [*tokens[: counts[head]], *middle, *tokens[counts[-1 - tail] :]]

    def _pieces(self, tokens: Ids, text: str) -> list[tuple[int, str]] | None:
        """Split the tokens of a text into pieces of whole characters, of one to four tokens: the number of tokens of
        each and its text. None if the pieces don't add up to the text, or show an image."""
        if any(token < 0 for token in tokens):
            return None
        pieces, start, place = [], 0, 0
        for end in range(1, len(tokens) + 1):
            decoded = self.decode(tokens[start:end], after_text=True)
            if decoded.endswith("\ufffd") and end - start < 4 and end < len(tokens):
                continue
            piece = decoded if text.startswith(decoded, place) else self.safe(decoded)  # the template's, or a content's
            if not text.startswith(piece, place):
                return None
            pieces.append((end - start, piece))
            start, place = end, place + len(piece)
        return pieces if place == len(text) else None
