"""Chats as token ids: through the chat template, with control tokens that come from the template alone."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np

from proxima.data import FieldError, UserError
from proxima.data.columns import Ints
from proxima.data.flow import IMAGE_PLACEHOLDER, Message
from proxima.data.image_tokens import image_tokens
from proxima.model.chat.template_inputs import NAME as CLOCK
from proxima.model.chat.template_inputs import (
    PLAIN,
    THOUGHT,
    THOUGHT_NAMES,
    current_clock,
    require_read,
    require_written,
    takes_text_arguments,
    thought_name,
    with_text_arguments,
)

# how a chat ends: with the generation prompt; after its last turn; or inside that turn, whose text goes on
Ending = Literal["prompt", "complete", "open"]


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def __call__(self, text: str, **options: Any) -> Any: ...


def end_of_text(tokenizer: Any) -> int | None:
    """The id of a tokenizer's end-of-text token; None without one."""
    end: int | None = getattr(tokenizer, "eos_token_id", None)  # a class of the user's may lack it
    return end


def added_tokens(tokenizer: Any) -> Mapping[int, Any]:
    """The tokens that were added to a tokenizer's vocabulary, control tokens among them, by id."""
    return getattr(tokenizer, "added_tokens_decoder", None) or {}


def image_store_of(tokenizer: Any) -> Any:
    """The `ImageStore` of an `ImageTokenizer`, which shows images in chats; None: the chats are of text alone."""
    return getattr(tokenizer, "images", None)


def prompt_tokens(
    messages: Sequence[Message], tokenizer: Tokenizer, arguments: Mapping[str, Any] = MappingProxyType({})
) -> Ints:
    """Token ids of a chat, ready for the answer. Control tokens come from the template alone: if a message contains the
    text of one, such as `<|im_start|>`, it is encoded as plain text and can't begin a turn.

    With a chat template: the template with its generation prompt, which adds the special tokens itself. Without one (a
    base model): the contents, one per line, a final newline, and the special tokens that the tokenizer puts around a
    text, except an end-of-text token, because the answer continues from there. A message that is `raw` is a prompt of
    its own: its text as the tokenizer reads it, control tokens included, without template or newline.

    If the last message is the assistant's, the answer continues it: the tokens end with its text, without generation
    prompt, end of turn or final newline.

    Args:
        arguments: further inputs of the template, by name, such as Qwen3's `enable_thinking`.

    Raises:
        UserError: the template fails, does not read one of the arguments, makes a control token of a message, or can't
            leave the assistant's last message open.
    """
    return np.array(chat_tokens(messages, tokenizer, arguments, complete=False), np.int32)


def chat_tokens(
    messages: Sequence[Message], tokenizer: Tokenizer, arguments: Mapping[str, Any], *, complete: bool
) -> list[int]:
    """The tokens of a chat: `complete`, or to be continued by an answer."""
    return chat_and_tokens(messages, tokenizer, arguments, complete=complete)[1]


def chat_and_tokens(
    messages: Sequence[Message], tokenizer: Tokenizer, arguments: Mapping[str, Any], *, complete: bool
) -> tuple[str | None, list[int]]:
    """The text of a chat as `render_chat` gives it, None for a text without chat template, and its tokens."""
    if any(message.get("raw") for message in messages):
        return None, _raw_tokens(messages, tokenizer, arguments, complete=complete)
    require_written(messages, tokenizer, arguments, partial(rendered_text, tokenizer))
    safe = [SafeMessage(message, tokenizer) for message in messages]
    ending: Ending
    if complete:
        ending = "complete"
    elif is_begun(messages):
        ending = "open"
    else:
        ending = "prompt"
    chat = render_chat(safe, tokenizer, arguments, ending=ending)
    ids = encode_chat(chat, tokenizer)
    if complete and tokenizer.chat_template is None:
        ids = _with_end(ids, tokenizer)
    return chat, ids


def _raw_tokens(
    messages: Sequence[Message], tokenizer: Tokenizer, arguments: Mapping[str, Any], *, complete: bool
) -> list[int]:
    """The tokens of a text without a chat template, and of an answer that continues it."""
    if arguments:
        remedy = "remove data.template_arguments, or map the rows with task.question or task.messages"
        raise UserError(f"a prompt without a chat template reads no {', '.join(arguments)}", remedy=remedy)
    for message in messages:
        more = [name for name in message if name not in PLAIN | {"raw"}]
        if more:
            remedy = "map the rows with task.question or task.messages"
            raise UserError(f"{NOT_A_CHAT}, and no {more[0]}", remedy=remedy)
    prompt, *answer = (str(message["content"]) for message in messages)
    answered = all(message["role"] == "assistant" for message in messages[1:])
    if not messages[0].get("raw") or len(answer) > 1 or not answered:
        raise UserError(NOT_A_CHAT, remedy="map the rows with task.question or task.messages")
    ids = _without_end(tokenizer(prompt)["input_ids"], tokenizer)
    for text in answer:
        complete_ids = _without_end(tokenizer(prompt + text)["input_ids"], tokenizer)
        if complete_ids[: len(ids)] == ids:
            ids = complete_ids
        else:
            ids = ids + list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if complete:
        ids = _with_end(ids, tokenizer)
    return ids


NOT_A_CHAT = "a prompt that is text, without a chat template, has no system prompt and no further turns"


def rendered_text(tokenizer: Tokenizer, messages: Sequence[Message], arguments: Mapping[str, Any]) -> str:
    """The text of a chat, complete if it ends with the assistant, to see what the template writes of it."""
    safe = [SafeMessage(message, tokenizer) for message in messages]
    if tokenizer.chat_template is None:
        return "\n".join(message.text for message in safe)
    ending: Ending = "complete" if is_begun(messages) else "prompt"
    return _rendered([message.safe for message in safe], tokenizer, arguments, ending)


def is_begun(messages: Sequence[Message]) -> bool:
    """True if a prompt ends with a message of the assistant, which its answer continues."""
    return bool(messages) and messages[-1]["role"] == "assistant"


class SafeMessage:
    """A message as it is passed to a template: `safe`, with stand-ins for control texts, and `neutral`, with other
    words. Built once for each message of a chat that is rendered repeatedly. `text` is the safe content; where the
    tokenizer shows images, the template gets it in parts, and `images` has the numbers of those that it shows."""

    def __init__(self, message: Message, tokenizer: Tokenizer) -> None:
        shows = image_store_of(tokenizer) is not None
        self.images: tuple[int, ...] = ()
        if shows:
            self.images = tuple(message.get("images", ()))
        pieces = [message["content"]]
        if self.images:
            pieces = message["content"].split(IMAGE_PLACEHOLDER)
            if len(pieces) != len(self.images) + 1:
                what = f"a message has {len(self.images)} images and {IMAGE_PLACEHOLDER} {len(pieces) - 1} times"
                raise UserError(f"{what}: {message['content']!r:.100}")
        safe = [with_stand_ins(piece, tokenizer) for piece in pieces]
        neutral = [_neutral(piece) for piece in pieces]
        self.text = IMAGE_PLACEHOLDER.join(safe)
        named = {name: value for name, value in message.items() if name not in PLAIN}
        if THOUGHT in named:
            named[thought_name(tokenizer)] = named.pop(THOUGHT)

        def shown(texts: list[str], others: Mapping[str, Any]) -> Message:
            content = _parts(texts) if shows else texts[0]
            return {"role": message["role"], **others, "content": content}

        self.safe = shown(safe, safe_value(named, tokenizer))
        self.neutral = shown(neutral, _neutral_keys(named))


def safe_value(value: Any, tokenizer: Any) -> Any:
    """A JSON value with stand-ins (`with_stand_ins`) in its texts, but not in the keys of its objects."""
    if isinstance(value, str):
        return with_stand_ins(value, tokenizer)
    if isinstance(value, Mapping):
        return {key: safe_value(item, tokenizer) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [safe_value(item, tokenizer) for item in value]
    return value


def _neutral_keys(named: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a message beside its content with other words in long texts; names and types, by which a template
    may choose what it writes, are unchanged."""
    neutral = dict(named)
    for key in THOUGHT_NAMES:
        if isinstance(neutral.get(key), str):
            neutral[key] = _neutral(neutral[key])
    calls = neutral.get("tool_calls")
    if calls:
        functions = [call["function"] for call in calls]
        values = [{**of, "arguments": _neutral(of["arguments"])} for of in functions]
        neutral["tool_calls"] = [{**call, "function": of} for call, of in zip(calls, values, strict=True)]
    return neutral


def _neutral(value: Any) -> Any:
    if isinstance(value, str):
        return re.sub(r"\S+", "x", value)
    if isinstance(value, Mapping):
        return {key: _neutral(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_neutral(item) for item in value]
    return value


def _parts(texts: Sequence[str]) -> list[dict[str, str]]:
    """The parts of a message with an image between each two texts."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        if number > 0:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts or [{"type": "text", "text": ""}]


def render_chat(
    messages: Sequence[SafeMessage], tokenizer: Tokenizer, arguments: Mapping[str, Any], *, ending: Ending = "prompt"
) -> str:
    """The text of a chat, with a stand-in (`with_stand_ins`) for each control text of its messages, so that all
    remaining ones are the template's.

    Raises:
        UserError: the template fails, does not read one of the arguments, makes a control token of a message, or can't
            leave the last message open.
    """
    if any(message.safe.get("raw") for message in messages):
        raise UserError(NOT_A_CHAT, remedy="map the rows with task.question or task.messages")
    if tokenizer.chat_template is not None:
        chat = _rendered([message.safe for message in messages], tokenizer, arguments, ending)
        if ending == "open":
            _require_open(chat, messages, tokenizer, arguments)
        _refuse_made_tokens(chat, messages, tokenizer, arguments, ending)
        return _with_images(chat, messages, tokenizer)
    if any(message.images for message in messages):
        raise UserError("the tokenizer has no chat template that could show an image")
    if arguments:
        remedy = "remove data.template_arguments, or put a chat_template.jinja into the model's folder"
        raise UserError(f"the tokenizer has no chat template that could read {', '.join(arguments)}", remedy=remedy)
    text = "\n".join(message.text for message in messages)
    if ending == "prompt":
        text += "\n"
    return text


def encode_chat(chat: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text of `render_chat`; for a base model, after those that its tokenizer puts before a text."""
    if tokenizer.chat_template is not None:
        return encode_part(chat, tokenizer)
    if not re.search(f"[{chr(STAND_INS)}-{chr(ESCAPED)}]", chat):
        return _without_end(tokenizer(chat)["input_ids"], tokenizer)
    return _without_end(tokenizer("")["input_ids"], tokenizer) + encode_part(chat, tokenizer)


def encode_part(chat: str, tokenizer: Any) -> list[int]:
    """The tokens of a part of a text of `render_chat`; control texts with stand-ins are split into ordinary tokens, and
    images have tokens of their own."""
    split = _split_controls(tokenizer)
    ids = list[int]()
    mark = image_mark(tokenizer)
    controls = f"|[{''.join(split)}]" if split else ""
    for part in re.split(f"({mark}[0-9 ]+{mark}{controls})", chat):
        if part.startswith(mark):
            ids += image_tokens(*map(int, part.strip(mark).split())).tolist()
            continue
        text = re.sub(f"{chr(STAND_INS)}(.)", lambda m: chr(ord(m[1]) - ESCAPED + STAND_INS), part)
        if part in split:
            ids += split[part]
        else:
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _with_images(chat: str, messages: Sequence[SafeMessage], tokenizer: Any) -> str:
    """The rendered text with what stands for an image where the template shows one: the texts that its processor puts
    around and between its tokens, and these as their number, count and first patch between marks."""
    store = image_store_of(tokenizer)
    if store is None:
        return chat
    numbers = list[int]()
    for message in messages:
        numbers += message.images
    mark = image_mark(tokenizer)
    start, *rest = chat.split(store.placeholder)
    if len(rest) != len(numbers):
        remedy = "repair the template in the model's folder"
        raise UserError(f"the chat template wrote {len(rest)} of {len(numbers)} images", remedy=remedy)
    shown = (store.text(number, mark) for number in numbers)
    return start + "".join(image + part for image, part in zip(shown, rest, strict=True))


def _rendered(messages: Sequence[Message], tokenizer: Tokenizer, arguments: Mapping[str, Any], ending: Ending) -> str:
    """Render the messages with the chat template.

    Raises:
        UserError: the template fails (it is a program and may raise anything), or does not read an argument.
    """
    if arguments:
        require_read(tokenizer, arguments)
    clock = current_clock()
    if clock is not None and CLOCK in str(tokenizer.chat_template):
        clock.named = True
    options = {"add_generation_prompt": ending == "prompt", "continue_final_message": ending == "open"}
    try:
        shown = list(messages)
        if any(message.get("tool_calls") for message in shown) and takes_text_arguments(tokenizer):
            shown = [with_text_arguments(message) for message in shown]
        text = str(tokenizer.apply_chat_template(shown, **arguments, **options, tokenize=False))
        text.encode()  # no tokenizer reads half of a surrogate pair
        return text
    except Exception as error:
        if ending == "open" and str(error).startswith("continue_final_message"):  # transformers does not find its text
            raise _not_open(messages[-1], "the chat template changes its text") from error
        what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        remedy = "repair the template in the model's folder, or the row"
        if any(message["role"] == "system" for message in messages):
            remedy += "; if it has no system role, set data.system=null, and put that text into the question"
        raise UserError(
            f"the chat template fails for {messages[-1]['content']!r:.60}: {what}", remedy=remedy
        ) from error


def _require_open(
    chat: str, messages: Sequence[SafeMessage], tokenizer: Tokenizer, arguments: Mapping[str, Any]
) -> None:
    """Refuse a chat that does not end with exactly the text of its last message, or in which the template writes more
    before that text than before an answer: Qwen3's puts an empty thought before a last turn.

    Raises:
        FieldError: names the message.
    """
    *before, begun = messages
    content = begun.safe["content"]
    text = _last_text(content)
    if not chat.endswith(text):
        raise _not_open(begun.safe, "the chat template changes its text")
    opened = chat.removesuffix(text)
    if not before or not isinstance(content, str):
        return
    prompt = _rendered([message.safe for message in before], tokenizer, arguments, "prompt")
    if not prompt.startswith(opened):
        written = opened.removeprefix(prompt)[-40:]
        raise _not_open(begun.safe, f"the chat template writes {written!r} before it")


def _not_open(message: Message, why: str) -> FieldError:
    shown = _last_text(message["content"])[:60]
    remedy = "end the chat with the user's message and ask for that beginning there, or repair the template"
    reason = f"ends the prompt with the assistant, whose text can't be continued: {why}"
    return FieldError("messages", shown, reason, remedy=remedy)


def _last_text(content: Any) -> str:
    """The content of a message, or its last part, where it has parts."""
    if isinstance(content, str):
        return content
    return str(content[-1].get("text", ""))


def _refuse_made_tokens(
    chat: str, messages: Sequence[SafeMessage], tokenizer: Any, arguments: Mapping[str, Any], ending: Ending
) -> None:
    """Refuse a chat with more control tokens than the template writes around neutral words: a template that changes its
    text (`lower`, `replace`, `trim` between two contents) can form a control token from text that contains none.

    Raises:
        UserError: names the message.
    """
    pattern = _any_of(control_texts(tokenizer))
    neutral = [message.neutral for message in messages]
    written = Counter(pattern.findall(_rendered(neutral, tokenizer, arguments, ending)))
    made = Counter(pattern.findall(chat)) - written
    if made:
        what = f"the chat template turns a message's own text into the control token {next(iter(made))}"
        shown = " | ".join(message.text for message in messages)
        raise UserError(f"{what}: {shown!r:.100}", remedy="remove or change the row, or repair the template")


# private-use characters: see `_stand_ins`
STAND_INS = 0xF0000
ESCAPED = 0x100000


def with_stand_ins(text: str, tokenizer: Any) -> str:
    """The text with a private-use character in place of each control text, ready to be passed to a template."""
    table = _stand_ins(tokenizer)
    return _any_of(tuple(table)).sub(lambda match: table[match[0]], text)


@lru_cache(maxsize=8)
def _stand_ins(tokenizer: Any) -> dict[str, str]:
    """Map each control text, the longest first, to its stand-in character, and each such character, and the mark of
    images, to two, the first stand-in and an escape, so that a text that already contains them is restored exactly."""
    control = control_texts(tokenizer)
    characters = [chr(STAND_INS + i) for i in range(len(control) + 2)]
    escaped = {character: characters[0] + chr(ESCAPED + i) for i, character in enumerate(characters)}
    return dict(zip(control, characters[1:-1], strict=True)) | escaped


def image_mark(tokenizer: Any) -> str:
    """The character around the number of an image, in a text of `render_chat`."""
    return chr(STAND_INS + len(control_texts(tokenizer)) + 1)


@lru_cache(maxsize=8)
def _split_controls(tokenizer: Any) -> dict[str, list[int]]:
    """The ordinary tokens of each control text, by its stand-in. Computed once, because splitting is a state of the
    tokenizer, and several threads may encode with it."""
    texts = [(text, stand_in) for text, stand_in in _stand_ins(tokenizer).items() if len(stand_in) == 1]
    split = {s: tokenizer(t, add_special_tokens=False, split_special_tokens=True)["input_ids"] for t, s in texts}
    tokenizer("")  # without splitting
    return split


@lru_cache(maxsize=8)
def control_texts(tokenizer: Any) -> tuple[str, ...]:
    """The texts of the tokenizer's control tokens, the longest first."""
    added = added_tokens(tokenizer).values()
    return tuple(sorted({token.content for token in added if token.special}, key=lambda text: (-len(text), text)))


@lru_cache(maxsize=16)
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def _with_end(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    end = end_of_text(tokenizer)
    return list(ids) if end is None else [*ids, end]


def _without_end(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    end = end_of_text(tokenizer)
    if len(ids) > 1 and end is not None and ids[-1] == end:
        return list(ids[:-1])
    return list(ids)
