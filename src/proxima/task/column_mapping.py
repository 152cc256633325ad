"""Maps the columns of a table to rows: by name, by a path into nested objects, or by a template over several."""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.data import FieldError, Message, UserError
from proxima.data.errors import raise_together
from proxima.task.protocol import EmptyPromptError, PlayedTask, Row, user_message
from proxima.task.template import as_text, fill, look_up, template_fields, to_json_value

ANSWER = "answer"  # the only column that may be missing, unless there is one with a similar name
ROLES = ("system", "user", "assistant", "tool")
# columns of pictures and sound, which would otherwise be dropped silently
MEDIA = frozenset({"audio", "audios", "image", "images", "video", "videos"})


@dataclass(frozen=True, kw_only=True)
class ColumnMapping(PlayedTask):
    """Base of the tasks that read a table. Dots in a name lead into a column of objects (`reward_model.truth`).

    Args:
        question: column with the question, or a template over several, as "{question}\\n{hint}".
        messages: column with a whole chat, a list of {role, content}, in place of `question`; null: off.
        answer: column with the answer, or a template; null: the rows have no answer, which is also the case if the data
            lacks the default column `answer`.
        metadata: columns that are passed to rewards and reports; null: all.
        images: column with an image, or a list of them: paths, bytes, or images of `datasets`. Each is shown where the
            messages have `<image>`, or before the question if none has it. The column of `messages` itself: they have
            parts, `{type: image, path}` among them. null: text alone.
    """

    question: str = "question"
    messages: str | None = None
    answer: str | None = ANSWER
    metadata: tuple[str, ...] | None = None
    images: str | None = None

    def __post_init__(self) -> None:
        if self.metadata is not None:
            object.__setattr__(self, "metadata", tuple(self.metadata))
        self.fields_by_column()

    def fields_by_column(self) -> dict[str, str]:
        """Return each required column, with the field that names it."""
        texts = {"question": self.question} if self.messages is None else {"messages": self.messages}
        if self.answer is not None:
            texts["answer"] = self.answer
        columns = dict.fromkeys(self.metadata or (), "metadata")
        if self.images is not None:
            texts["images"] = self.images
        for field, text in texts.items():
            columns |= dict.fromkeys(sorted(template_fields(text, field)) if "{" in text else [text], field)
        return columns

    def require_columns(self, present: Iterable[str], source: str) -> None:
        """Raise FieldError for a mapped column that does not exist, with the nearest name and those present;
        FieldErrors for several."""
        columns, errors = list(present), list[FieldError]()
        for name, field in self.fields_by_column().items():
            if name in columns or name.partition(".")[0] in columns:
                continue
            near = difflib.get_close_matches(name.lower(), [column.lower() for column in columns], 1)
            near = [column for column in columns if column.lower() in near][:1]
            if name == ANSWER and field == "answer" and not near:
                continue
            nullable = ", or null for no answers" if field == "answer" else ""
            hint = f"did you mean {near[0]!r}?" if near else f"set it to one that exists{nullable}"
            reason = f"names no column: {source} has no column {name!r}"
            remedy = f"{hint}; columns: {', '.join(columns) or 'none'}"
            errors.append(FieldError(field, getattr(self, field), reason, remedy=remedy))
        raise_together(errors)

    def lacks_answer(self, columns: Iterable[str]) -> bool:
        """Return True if the answer is null because the default column `answer` is not among these columns."""
        return self.answer == ANSWER and ANSWER not in columns

    def columns(self) -> tuple[str, ...] | None:
        """Return the columns of the data if a local file gives them without much reading; None: unknown."""
        return None

    def refuse_media(self, columns: Iterable[str], source: str) -> None:
        """Raise UserError for a column of images, video or sound, unless `metadata` or `images` names it."""
        if media := sorted(MEDIA.intersection(columns) - {*(self.metadata or ()), self.images}):
            show = f"show it with images={media[0]}, " if media[0].startswith("image") and not self.images else ""
            what = f"{source} has a column {media[0]!r}, which the model would not see"
            raise UserError(what, remedy=f"{show}remove it, or keep it for rewards with metadata=[{media[0]}]")

    def row(self, values: Mapping[str, Any], source: str, folder: Path = Path()) -> Row:
        """Build the row from these values; paths of images are relative to `folder`.

        Raises:
            EmptyPromptError: its question or its chat is empty.
            UserError: a column is missing or not a chat; names source and column.
        """
        self.refuse_media((name for name in MEDIA & values.keys() if values[name]), source)
        try:
            answer = None if self.answer is None or self.lacks_answer(values) else _value(self.answer, values)
            names = [name for name in values if name != self.images] if self.metadata is None else self.metadata
            metadata = {name: to_json_value(look_up(values, name)) for name in names}
            chat = None if self.messages is None else look_up(values, self.messages)
            images: tuple[Any, ...] = ()
            if self.images is not None:
                from proxima.task.image_files import image_list, without_parts

                among = self.images == self.messages
                chat, column = without_parts(chat) if among else (chat, look_up(values, self.images))
                images = image_list(column, folder, source)
            if self.messages is not None:
                if chat is None or (isinstance(chat, (str, list, tuple)) and not chat):
                    raise _without_prompt("messages", chat, self.messages, source)
                messages = as_messages(chat, f"{source}: column {self.messages!r}")
                return Row(messages=messages, answer=answer, metadata=metadata, chat=True, images=images)
            question = _value(self.question, values)
        except KeyError as error:
            columns = ", ".join(values) or "none"
            raise UserError(f"{source} has no column {error.args[0]!r}; columns: {columns}") from None
        if question is None or question == "":
            raise _without_prompt("question", question, self.question, source)
        return Row(messages=user_message(as_text(question)), answer=answer, metadata=metadata, images=images)


def as_messages(value: Any, source: str) -> tuple[Message, ...]:
    """Read a chat: a list of {role, content}, or the same as JSON text; other keys are dropped. UserError, with the
    source, for anything else, an empty chat, or an unknown role."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise UserError(f"{source} holds text, expected a list of {{role, content}}; map it as question") from None
    if not isinstance(value, (list, tuple)) or not value:
        raise UserError(f"{source} holds {value!r:.60}, expected a list of {{role, content}}")
    for message in value:
        fits = isinstance(message, Mapping) and message.get("role") in ROLES
        content = message["content"] if fits and isinstance(message.get("content"), (list, tuple)) else ()
        kinds = [str(part.get("type")) for part in content if isinstance(part, Mapping)]
        if other := next((kind for kind in kinds if kind != "text"), None):
            column = source.rpartition("column ")[2].strip("'")
            show = f"images={column} shows it; else " if other == "image" else ""
            what = f"{source} holds a message with a part of type {other!r}, which the model would not see"
            raise UserError(what, remedy=f"{show}remove these rows, or give the text as the message's content")
        if not fits or not isinstance(message.get("content"), str):
            expected = f"expected a role among {', '.join(ROLES)} and a text content"
            raise UserError(f"{source} holds the message {message!r:.80}, {expected}")
    return tuple({"role": str(message["role"]), "content": str(message["content"])} for message in value)


def _without_prompt(field: str, value: Any, column: str, source: str) -> EmptyPromptError:
    return EmptyPromptError(field, value, "is empty", remedy=f"remove {source}, or map another column than {column!r}")


def _value(text: str, values: Mapping[str, Any]) -> Any:
    """Return the value of a column, or a filled template."""
    return fill(text, values) if "{" in text else to_json_value(look_up(values, text))
