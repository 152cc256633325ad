"""The tokens of an episode, turn by turn; sampled tokens are never re-encoded.

`TurnTemplate` is the chat template over several turns, `Conversation` the episode as a graph of messages.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from proxima.data import UserError
from proxima.data.columns import Bools, Ints
from proxima.data.episode import Span
from proxima.data.flow import Message
from proxima.model.chat.encode import (
    Ending,
    SafeMessage,
    Tokenizer,
    control_texts,
    encode_chat,
    encode_part,
    is_begun,
    render_chat,
    safe_value,
    with_stand_ins,
)
from proxima.model.chat.template_inputs import reads_tools
from proxima.model.chat.written_text import answer_beginning, sampled_text
from proxima.task.prompts import tokens_in_common

Ids = Sequence[int] | Ints
MOST_BEGINNINGS = 1024  # kept, of a template's chats


class TurnTemplate:
    """Renders and encodes the chats of a run. Control texts in contents are replaced by stand-ins, so that control
    tokens come only from the template (`model/chat/encode.py`).

    Args:
        tokenizer: the policy's tokenizer.
        arguments: arguments of the template other than messages and tools.
        tools: JSON schemas for the template's `tools`; None or empty: none.
    """

    def __init__(
        self, tokenizer: Tokenizer, arguments: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self.tokenizer: Any = tokenizer
        self.supports_tools = reads_tools(tokenizer)
        if tools and self.supports_tools:
            given = {"tools": safe_value(tools, tokenizer)}
        else:
            given = {}
        self._arguments = {**arguments, **given}
        self._ends: dict[tuple[str, ...], bool] = {}
        self._beginnings: dict[tuple[tuple[str, str], ...], Ints] = {}

    def message(self, message: Message) -> SafeMessage:
        """Prepare a message for `render`. A lone surrogate, which no tokenizer encodes, becomes a question mark."""
        content = message["content"].encode(errors="replace").decode()
        return SafeMessage({**message, "content": content}, self.tokenizer)

    def render(self, messages: Sequence[SafeMessage], *, ending: Ending = "prompt") -> str:
        """Render a chat as text, by default with its generation prompt.

        Raises:
            UserError: the template fails, turns a message's own text into a control token, or can't leave the last
                message `open`.
        """
        return render_chat(messages, self.tokenizer, self._arguments, ending=ending)

    def encode_chat(self, text: str) -> list[int]:
        """Encode the text of an initial prompt."""
        return encode_chat(text, self.tokenizer)

    def shared_prefix(self, messages: Sequence[Message], tokens: Ints) -> int:
        """Compute `Prompt.shared_prefix` of an episode: the number of tokens in its first prompt for tools and for the
        messages before the first user message. Which part of a `reset` text is constant can't be told from other
        rows."""
        before = tuple(takewhile(lambda message: message["role"] != "user", messages))
        key = tuple((message["role"], message["content"]) for message in before)
        beginning = self._beginnings.get(key)
        if beginning is None:
            try:
                text, _ = self.around([self.message(message) for message in before], (), "user")
            except UserError:  # the template wants more messages
                text = ""
            tokens_of_text = self.encode_chat(text) if text else []
            beginning = np.array(tokens_of_text, np.int32)
            if len(self._beginnings) >= MOST_BEGINNINGS:  # agents that write the time into each
                self._beginnings.clear()
            self._beginnings[key] = beginning
        return tokens_in_common(tokens, beginning)

    def encode_after(self, before: str, text: str) -> list[int]:
        """Encode a text that follows another. If a control token ends the first text, it is encoded together with the
        text, since such a token may absorb the space around it."""
        anchor = next((control for control in control_texts(self.tokenizer) if before.endswith(control)), "")
        tokens = encode_part(anchor + text, self.tokenizer)
        return tokens[1:] if anchor else tokens

    def safe(self, text: str) -> str:
        """Return the text of a content in the form in which `render` shows it."""
        return with_stand_ins(text, self.tokenizer)

    def decode(self, tokens: Ids, *, after_text: bool = False) -> str:
        """Decode sampled tokens, see `sampled_text`."""
        return sampled_text(self.tokenizer, tokens, after_text=after_text)

    def beginning(self, chat: str, content: str = "") -> str:
        """The beginning of the next answer that a rendered chat has, see `Prompt.begun`; `content` is that of the
        assistant's last message, if the answer continues it."""
        return answer_beginning(chat, self.tokenizer, self._arguments, content)

    def without_end(self, tokens: Ids, history: Sequence[SafeMessage], following: Sequence[SafeMessage]) -> int:
        """Count the tokens of a turn that belong to the message: all, or all but the last if that is the control token
        that the template itself writes after a message in this position."""
        control = self.decode(tokens[-1:])
        if control not in control_texts(self.tokenizer):
            return len(tokens)
        place = (control, *(message.safe["role"] for message in following))
        if place not in self._ends:
            _, behind = self.around(history, following)
            self._ends[place] = behind.lstrip().startswith(control)
        return len(tokens) - self._ends[place]

    def around(
        self, history: Sequence[SafeMessage], following: Sequence[SafeMessage], role: str = "assistant"
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
        begun = 0  # characters of the unchanged pieces at the beginning, and their tokens
        kept_before = 0
        left = deque(pieces)
        while left and new.startswith(left[0][1], begun):
            count, piece = left.popleft()
            kept_before += count
            begun += len(piece)
        ended = 0  # of those at the end, which may not overlap the beginning in the new text
        kept_behind = 0
        while left and begun + ended + len(left[-1][1]) <= len(new):
            count, piece = left[-1]
            if not new.endswith(piece, begun, len(new) - ended):
                break
            left.pop()
            kept_behind += count
            ended += len(piece)
        middle = self.encode_after(before + new[:begun], new[begun : len(new) - ended])
        return [*tokens[:kept_before], *middle, *tokens[len(tokens) - kept_behind :]]

    def _pieces(self, tokens: Ids, text: str) -> list[tuple[int, str]] | None:
        """Split the tokens of a text into pieces of whole characters, of one to four tokens: the number of tokens of
        each and its text. None if the pieces don't add up to the text, or show an image."""
        if any(token < 0 for token in tokens):
            return None
        pieces = []
        start = 0
        place = 0
        for end in range(1, len(tokens) + 1):
            decoded = self.decode(tokens[start:end], after_text=True)
            if decoded.endswith("\ufffd") and end - start < 4 and end < len(tokens):
                continue
            piece = decoded
            if not text.startswith(piece, place):  # not the template's text, but a content's
                piece = self.safe(decoded)
            if not text.startswith(piece, place):
                return None
            pieces.append((end - start, piece))
            start = end
            place += len(piece)
        return pieces if place == len(text) else None


class ForkRefused(UserError):
    """The template rewrites what the model saw, and the settings refuse that."""


@dataclass(frozen=True)
class Path:
    """The part of an episode that the model saw, up to its last turn on this path.

    Args:
        tokens: [T] int32, all after the prompt.
        sampled: [T] bool, tokens that the model wrote under no grammar and that no earlier path marks as sampled.
        written: [T] bool, the same with those under a grammar.
        spans: the messages, which cover all of the tokens, in order. Messages between two turns form one span.
        initial_prompt: the prompt tokens before them, if they differ from the conversation's `prompt`.
    """

    tokens: Ints
    sampled: Bools
    written: Bools
    spans: tuple[Span, ...]
    initial_prompt: Ints | None = None


@dataclass(frozen=True)
class _MessageNode:
    """A message, or all messages between two turns: the tokens that they add, and the text of these tokens."""

    span: Span
    tokens: Ints
    text: str


class Conversation:
    """An episode as a graph of messages: a node holds the tokens that it adds, and a path of nodes is exactly what the
    model saw.

    Each observation renders the whole chat. If the text begins with what the model saw, only the rest is encoded.
    Otherwise the template rewrites the past, as Qwen3's does by removing the thoughts of earlier turns. That is a fork:
    a new path, on which unchanged messages keep their tokens. The path has its own initial prompt if the template
    rewrites that, too: most templates omit from the history a generation prompt that begins a thought.

    Args:
        template: the run's template.
        initial_messages: the messages before the first turn.
        forks: `train`: continue on the new path; `refuse`: raise ForkRefused.
        continues: the first turn continues an initial prompt that ends with the assistant; false: it is a message of
            its own.

    `prompt` are the tokens of the initial prompt, with the generation prompt, or with the beginning of the first turn
    if the initial prompt ends with the assistant; `awaits_turn`: the next message is the model's. A `copy.copy`
    continues independently of the original.

    Raises:
        UserError: the template fails for the initial prompt, or makes nothing of it.
    """

    def __init__(
        self,
        template: TurnTemplate,
        initial_messages: Sequence[Message],
        forks: Literal["train", "refuse"] = "train",
        *,
        continues: bool = True,
    ) -> None:
        self._template = template
        self._forks = forks
        self._messages = [template.message(message) for message in initial_messages]
        self._begun = ""  # the text of the initial prompt that the first turn continues
        ending: Ending = "prompt"
        if continues and is_begun(initial_messages):
            self._begun = initial_messages[-1]["content"]
            ending = "open"
        self._initial_prompt = template.render(self._messages, ending=ending)
        self._seen = self._initial_prompt
        if ending == "open":
            self._messages.pop()  # it is part of the first turn
        self._first = len(self._messages)  # index of the first turn
        self.prompt = self._encoded_initial_prompt()
        self._own: Ints | None = None  # tokens of `_initial_prompt`, if they differ from `prompt`
        self._nodes: list[_MessageNode] = []
        self._ended: list[Path] = []
        self._turns = 0
        self.awaits_turn = True

    @property
    def beginning(self) -> str:
        """The beginning of the next turn that `context` has, see `Prompt.begun`."""
        begun = self._begun if self._turns == 0 else ""
        return self._template.beginning(self._seen, begun)

    @property
    def context(self) -> Ints:
        """The tokens that the next turn is conditioned on."""
        initial_prompt = self.prompt if self._own is None else self._own
        return np.concatenate([initial_prompt, *(node.tokens for node in self._nodes)])

    def add_turn(self, tokens: Ints, text: str, finish_reason: str, *, grammar: bool = False) -> None:
        """Add the tokens that the model wrote after `context`, perhaps under a grammar. The chat template gets their
        decoded text instead of `text`, which begins with what the template wrote itself."""
        span = Span(role="assistant", tokens=len(tokens), text=text, sampled=True, grammar=grammar, turn=self._turns)
        self._nodes = [*self._nodes, _MessageNode(span, np.asarray(tokens, np.int32), "")]
        self._turns += 1
        self.awaits_turn = False

    def branch(self) -> "Conversation":
        """Return another conversation whose initial prompt is `context`: its next turn sees the same tokens, and the
        turns before it are not its own."""
        other = copy(self)
        if self._turns:
            other.prompt = self.context
            other._own = None
            other._initial_prompt = self._seen
            other._begun = ""
            other._first = len(self._messages)
            other._nodes = []
            other._ended = []
            other._turns = 0
        return other

    def with_turn(self, tokens: Ints, *, grammar: bool = False) -> "Conversation":
        """Return a copy with the tokens sampled so far of an unfinished turn."""
        other = copy(self)
        other.add_turn(tokens, "", "", grammar=grammar)
        return other

    def observe(self, messages: Sequence[Message]) -> bool:
        """Add the messages that answer the last turn. Return True if the template rewrote what the model saw: a fork.

        Raises:
            ForkRefused: it did, and forks are refused; the conversation is unchanged.
            UserError: the template fails for these messages.
        """
        template = self._template
        turn = self._nodes[-1]
        following = [template.message(message) for message in messages]
        length = template.without_end(turn.tokens, self._messages, following)
        wrote = turn.tokens[:length]
        end = template.decode(turn.tokens[length:])
        begun = self._begun if turn.span.turn == 0 else ""
        content = begun + template.decode(wrote, after_text=bool(begun))
        history = [*self._messages, template.message({"role": "assistant", "content": content})]
        chat = template.render([*history, *following])
        turn = replace(turn, text=template.safe(template.decode(wrote, after_text=True)) + end)
        seen = self._seen + turn.text
        nodes = [*self._nodes[:-1], turn]
        forks = not chat.startswith(seen)
        if forks:
            if self._forks == "refuse":
                raise _refusal(chat, seen)
            _, answer = template.around(self._messages, following)
            if end:
                _, _, answer = answer.partition(end)
            place = len(chat)
            if chat.endswith(answer):
                place -= len(answer)
            self._ended = [*self._ended, _path(nodes, self._own)]
            if not chat.startswith(self._initial_prompt):
                self._rewrite_initial_prompt([*history, *following], chat[:place], nodes[0].text)
            place = max(len(self._initial_prompt), place)
            nodes = self._carried_over(nodes, chat[:place])
            seen = chat[:place]
        self._nodes = [*nodes, self._observation(messages, seen, chat[len(seen) :])]
        self._messages = [*history, *following]
        self._seen = chat
        self.awaits_turn = True
        return forks

    def paths(self) -> tuple[Path, ...]:
        """Return the paths on which the model wrote, oldest first, each up to its last turn there."""
        return tuple(path for path in (*self._ended, _path(self._nodes, self._own)) if path.spans)

    def _rewrite_initial_prompt(self, messages: Sequence[SafeMessage], chat: str, turn: str) -> None:
        """Set the new path's initial prompt to the text before the first turn in a chat, or to the whole chat if the
        template gives no such position. White space before a turn may belong to the turn."""
        before, _ = self._template.around(messages[: self._first], messages[self._first + 1 :])
        initial_prompt = before + self._template.safe(self._begun)
        if not chat.startswith(initial_prompt):
            initial_prompt = before
        if not chat.startswith(initial_prompt):
            initial_prompt = chat
        stripped = initial_prompt.rstrip()
        if not chat.startswith(turn, len(initial_prompt)) and chat.startswith(turn, len(stripped)):
            initial_prompt = stripped
        self._initial_prompt = initial_prompt
        self._own = self._encoded_initial_prompt()

    def _encoded_initial_prompt(self) -> Ints:
        tokens = np.array(self._template.encode_chat(self._initial_prompt), np.int32)
        if not len(tokens):  # nothing would predict the first token of a turn
            raise UserError("these messages give a prompt without tokens")
        return tokens

    def _observation(self, messages: Sequence[Message], before: str, text: str) -> _MessageNode:
        """Create the node of messages that the template renders as `text`."""
        tokens = np.array(self._template.encode_after(before, text), np.int32)
        role = messages[0]["role"] if messages else "user"
        shown = "\n".join(message["content"] for message in messages)
        span = Span(role=role, tokens=len(tokens), text=shown, turn=self._turns - 1)
        return _MessageNode(span, tokens, text)

    def _carried_over(self, nodes: Sequence[_MessageNode], chat: str) -> list[_MessageNode]:
        """Carry the nodes of a path over to another chat, which begins with the initial prompt: an observation that is
        found again and a turn at its old position keep their tokens; everything between them is re-encoded."""
        place = len(self._initial_prompt)
        carried = list[_MessageNode]()
        changed = list[_MessageNode]()
        for node in nodes:
            if not changed and chat.startswith(node.text, place):
                start = place
            elif node.span.role != "assistant":
                start = chat.find(node.text, place)
            else:
                start = -1
            if start < 0:
                changed.append(node)
                continue
            carried += self._rewritten(changed, chat, place, start)
            carried.append(_not_sampled(node))
            place = start + len(node.text)
            changed = []
        return [*carried, *self._rewritten(changed, chat, place, len(chat))]

    def _rewritten(self, nodes: Sequence[_MessageNode], chat: str, start: int, stop: int) -> list[_MessageNode]:
        """Return the nodes that replace `nodes` in a part of a chat; none if both are empty."""
        before = chat[:start]
        new = chat[start:stop]
        if not nodes and not new:
            return []
        if len(nodes) > 1 and nodes[-1].span.role == "assistant" and new.endswith(nodes[-1].text):
            last = _not_sampled(nodes[-1])  # its context has changed
            return [*self._rewritten(nodes[:-1], chat, start, stop - len(last.text)), last]
        tokens = np.empty(0, np.int32)
        span = Span(role="system", tokens=0)
        if nodes:
            tokens = np.concatenate([node.tokens for node in nodes])
            span = nodes[0].span
        text = "".join(node.text for node in nodes)
        made = np.array(self._template.rewritten(tokens, text, before, new), np.int32)
        return [_MessageNode(replace(span, tokens=len(made), sampled=False), made, new)]


def _not_sampled(node: _MessageNode) -> _MessageNode:
    """The same message, as context on a new path: an earlier path has marked its tokens as sampled."""
    return replace(node, span=replace(node.span, sampled=False))


def _refusal(chat: str, seen: str) -> ForkRefused:
    """Build the error that shows what a fork rewrites."""
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(chat, seen, strict=False))
    place = sum(1 for _ in shared)
    shown = f"{seen[place : place + 40]!r} becomes {chat[place : place + 40]!r}"
    remedy = "use a chat template that leaves earlier turns as they were, or set episode.forks=train"
    return ForkRefused(f"the chat template rewrites what the model saw: {shown}", remedy=remedy)


def _path(nodes: Sequence[_MessageNode], initial_prompt: Ints | None = None) -> Path:
    """Build a path from the nodes up to the last turn that was sampled on it."""
    last = max((i for i, node in enumerate(nodes) if node.span.sampled), default=-1)
    tokens = [np.empty(0, np.int32)]
    written = [np.empty(0, np.bool_)]
    sampled = [np.empty(0, np.bool_)]
    spans: list[Span] = []
    for node in nodes[: last + 1]:
        span = node.span
        tokens.append(node.tokens)
        written.append(np.full(len(node.tokens), span.sampled))
        sampled.append(np.full(len(node.tokens), span.sampled and not span.grammar))
        spans.append(span)
    return Path(np.concatenate(tokens), np.concatenate(sampled), np.concatenate(written), tuple(spans), initial_prompt)
