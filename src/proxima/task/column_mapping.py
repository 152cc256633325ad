"""Maps the columns of a table to rows: by name, by a path into nested objects, or by a template over several."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.data import FieldError, UserError, require
from proxima.data.errors import raise_together
from proxima.data.flow import Message
from proxima.data.json_reader import json_type, load_json
from proxima.task.held_out_part import SplitTask
from proxima.task.image_files import image_list, without_parts
from proxima.task.protocol import EmptyPromptError, Row, is_played, user_message
from proxima.task.published_chats import as_messages, as_tools, json_value, without_nulls
from proxima.task.template import fill, look_up, template_fields, to_json_value, without_nan

ANSWER = "answer"  # the only column that may be missing, unless there is one with a similar name
TOOLS = "tools"  # TRL's names of columns for the chat template
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
# columns of pictures and sound, which would otherwise be dropped silently
MEDIA = frozenset({"audio", "audios", "image", "images", "video", "videos"})
CHATS = ("messages", "conversations", "conversation", "chat", "dialog")  # columns of chats in published data
# columns beside a chat that belong to its prompt in other frameworks
BESIDE_CHATS = {
    "documents": f"move it into a column {TEMPLATE_ARGUMENTS} of {{documents: …}}, ",
    "functions": "show it with tool_schemas=functions, ",
    "system": "make it the first message of the chat, ",
}


@dataclass(frozen=True, kw_only=True)
class ColumnMapping(SplitTask):
    """Base of the tasks that read a table. Dots in a name lead into a column of objects (`reward_model.truth`).

    Args:
        question: column with the question, which must be text, or a template over several columns, as
            "{question}\\n{hint}", in which a number or a list is written as JSON. A row in which all of these are empty
            has no question.
        messages: column with a whole chat in place of `question`: a list of {role, content}, possibly with tool calls
            and thoughts, or ShareGPT's {from, value}; null: off.
        prompt: column with prompts as TRL reads them, in place of `question`: a list of {role, content} is a chat, a
            text is read by the model without a chat template; null: off.
        tool_schemas: column with the JSON schemas of the tools that the chat template shows; null: none, as when the
            data lacks the default column `tools`, or the task has its own environment or tools.
        template_arguments: column with an object of variables for the chat template, over `data.template_arguments`;
            null: none, as when the data lacks the default column `chat_template_kwargs`.
        answer: column with the answer, or a template; null: the rows have no answer, as when the data lacks the default
            column `answer`.
        metadata: columns that are passed to rewards and reports; null: all.
        json_columns: columns whose texts are JSON, such as a list of right answers in a CSV file; `messages`, tools and
            variables of the template are always read as JSON.
        images: column with an image, or a list of them: paths, bytes, or images of `datasets`. Each is shown where the
            messages have `<image>`, or before the question if none has it. Name the column of `messages` itself if
            they have parts such as `{type: image, path}`. null: text alone.
    """

    question: str = "question"
    messages: str | None = None
    prompt: str | None = None
    tool_schemas: str | None = TOOLS
    template_arguments: str | None = TEMPLATE_ARGUMENTS
    answer: str | None = ANSWER
    metadata: tuple[str, ...] | None = None
    json_columns: tuple[str, ...] = ()
    images: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tool_schemas not in (None, TOOLS):
            what = "gives the template tools that the model can't call: the task has an environment or tools of its own"
            require(not is_played(self), "tool_schemas", self.tool_schemas, what)
        if self.metadata is not None:
            object.__setattr__(self, "metadata", tuple(self.metadata))
        object.__setattr__(self, "json_columns", tuple(self.json_columns))
        both = self.messages is not None and self.prompt is not None
        require(not both, "prompt", self.prompt, "and messages both name the prompt", remedy="set one of them to null")
        self.fields_by_column()

    def fields_by_column(self) -> dict[str, str]:
        """Return each required column, with the field that names it."""
        where = next((name for name in ("messages", "prompt") if getattr(self, name) is not None), "question")
        texts = {where: getattr(self, where)}
        if self.answer is not None:
            texts["answer"] = self.answer
        columns = dict.fromkeys(self.metadata or (), "metadata") | dict.fromkeys(self.json_columns, "json_columns")
        if self.images is not None:
            texts["images"] = self.images
        if self.tool_schemas not in (None, TOOLS):
            texts["tool_schemas"] = str(self.tool_schemas)
        if self.template_arguments not in (None, TEMPLATE_ARGUMENTS):
            texts["template_arguments"] = str(self.template_arguments)
        for field, text in texts.items():
            names = sorted(template_fields(text, field)) if "{" in text else [text]
            columns |= dict.fromkeys(names, field)
        return columns

    def require_columns(self, present: Iterable[str], source: str, remedy: str = "") -> None:
        """Raise FieldError for a mapped column that does not exist, with the nearest name, the columns present and
        `remedy` if given; FieldErrors for several."""
        columns = list(present)
        errors = list[FieldError]()
        for name, field in self.fields_by_column().items():
            if name in columns or name.partition(".")[0] in columns:
                continue
            near = difflib.get_close_matches(name.lower(), [column.lower() for column in columns], 1)
            near = [column for column in columns if column.lower() in near][:1]
            if name == ANSWER and field == "answer" and not near:
                continue
            hint = "set it to one that exists"
            if field == "answer":
                hint += ", or null for no answers"
            if near:
                hint = f"did you mean {near[0]!r}?"
            if field == "question":
                hint = _layout(columns) or hint
            hint += f"; columns: {', '.join(columns) or 'none'}"
            if remedy:
                hint += f"; {remedy}"
            reason = f"names no column: {source} has no column {name!r}"
            errors.append(FieldError(field, getattr(self, field), reason, remedy=hint))
        raise_together(errors)

    def lacks_answer(self, columns: Iterable[str]) -> bool:
        """Return True if the answer is null because the default column `answer` is not among these columns."""
        return self.answer == ANSWER and ANSWER not in columns

    def columns_of(self, present: Iterable[str]) -> list[str]:
        """Return the columns among those present that the mapping reads, sorted."""
        present = list(present)
        defaults = [self.tool_schemas, self.template_arguments]
        wanted = [name for name in self.fields_by_column() if name != ANSWER or not self.lacks_answer(present)]
        wanted += [name for name in defaults if name in present]
        columns: set[str] = set()
        for name in wanted:
            if name in present:
                columns.add(name)
            else:  # a path into a column of objects
                columns.add(name.partition(".")[0])
        return sorted(columns)

    def columns(self) -> tuple[str, ...] | None:
        """Return the columns of the data if a local file gives them cheaply; None: unknown."""
        return None

    def refuse_media(self, columns: Iterable[str], source: str) -> None:
        """Raise UserError for a column that the model should see and would not: images, video or sound, unless
        `metadata` or `images` names it, or a part of a chat's prompt, such as `documents`, that is not mapped."""
        media = sorted(MEDIA.intersection(columns) - {*(self.metadata or ()), self.images})
        if media:
            remedy = f"remove it, or keep it for rewards with metadata=[{media[0]}]"
            if media[0].startswith("image") and not self.images:
                remedy = f"show it with images={media[0]}, {remedy}"
            raise UserError(f"{source} has a column {media[0]!r}, which the model would not see", remedy=remedy)
        unseen = sorted(BESIDE_CHATS.keys() & set(columns) - set(self.columns_of(columns)))
        if (self.messages or self.prompt) is not None and unseen:
            name = unseen[0]
            what = f"{source} has a column {name!r} beside its chats, which the model would not see"
            raise UserError(what, remedy=f"{BESIDE_CHATS[name]}or keep it for rewards with metadata=[{name}]")

    def row(self, values: Mapping[str, Any], source: str, folder: Path = Path(), *, fills_nulls: bool = False) -> Row:
        """Build the row from these values; paths of images are relative to `folder`. `fills_nulls`: the source gives
        each object the keys of other rows, as null.

        Raises:
            EmptyPromptError: its question or its chat is empty.
            UserError: a column is missing, or its value is not a text, chat, image list or object as required; names
                source and column.
        """
        texts = [name for name in self.json_columns if isinstance(values.get(name), str)]
        read = {name: json_value(values[name], f"{source}: column {name!r}") for name in texts}
        values = without_nan({**values, **read})
        used = [name for name in (MEDIA | BESIDE_CHATS.keys()) & values.keys() if values[name]]
        self.refuse_media(used, source)
        try:
            if self.answer is None or self.lacks_answer(values):
                answer = None
            else:
                answer = _value(self.answer, values)
            names: Iterable[str] = [name for name in values if name != self.images]
            if self.metadata is not None:
                names = self.metadata
            metadata = {name: to_json_value(look_up(values, name)) for name in names}
            arguments = self._arguments(values, source, fills_nulls)
            column, value = self._prompt(values)
            chat = column is not None and not (column == self.prompt and isinstance(value, str))
            images: tuple[Any, ...] = ()
            if self.images is not None:
                if self.images == column:
                    value, shown = without_parts(value)
                else:
                    shown = look_up(values, self.images)
                images = image_list(shown, folder, source)
        except KeyError as error:
            columns = ", ".join(values) or "none"
            raise UserError(f"{source} has no column {error.args[0]!r}; columns: {columns}") from None
        field = next(field for field in ("messages", "prompt", "question") if getattr(self, field) is not None)
        if value is None or (isinstance(value, (str, list, tuple)) and not value):
            raise _without_prompt(field, value, getattr(self, field), source)
        where = f"{source}: column {getattr(self, field)!r}"
        if chat:
            messages = as_messages(value, where, fills_nulls=fills_nulls)
        else:
            messages = self._text(value, field, where, bool(images))
        return Row(
            messages=messages,
            answer=answer,
            metadata=metadata,
            chat=chat,
            images=images,
            arguments=arguments,
            fills_nulls=fills_nulls,
        )

    def _prompt(self, values: Mapping[str, Any]) -> tuple[str | None, Any]:
        """Return the column with the chat or the prompt, if one is mapped, and the value of the row's prompt."""
        column = self.prompt if self.messages is None else self.messages
        if column is not None:
            return column, look_up(values, column)
        if "{" not in self.question:
            return None, _value(self.question, values)
        names = sorted(template_fields(self.question, "question"))
        columns = {name: look_up(values, name) for name in names}
        for name, value in columns.items():
            if _is_nested(value):
                require_text(value, f"column {name!r}, of the template in task.question,", name)
        if columns and all(value is None or value == "" for value in columns.values()):
            return None, None
        return None, _value(self.question, values)

    def _text(self, value: Any, field: str, where: str, images: bool) -> tuple[Message, ...]:
        """Return the chat of a text: a user's turn, or, for `prompt`, a text without a chat template."""
        require_text(value, where, self.prompt or self.question)
        if field == "question":
            return user_message(value)
        require(not images, "images", self.images, "has no place in a prompt that is text, without a chat template")
        (message,) = user_message(value)
        return ({**message, "raw": True},)

    def _arguments(self, values: Mapping[str, Any], source: str, fills_nulls: bool) -> dict[str, Any]:
        """The row's own variables of the chat template, its tools among them."""
        arguments: dict[str, Any] = {}
        name = self.template_arguments
        if name is not None and (name != TEMPLATE_ARGUMENTS or name in values):
            variables = look_up(values, name)
            if isinstance(variables, str) and variables.strip():
                variables = json_value(variables, f"{source}: column {name!r}")
            if not isinstance(variables or {}, Mapping):
                what = f"{source}: column {name!r} holds {variables!r:.60}, expected an object"
                raise UserError(what, remedy="map another with template_arguments, or set it to null")
            arguments = {str(key): item for key, item in to_json_value(without_nulls(variables or {})).items()}
        if arguments and is_played(self):
            what = f"{source}: column {name!r} has variables of the chat template, which all episodes of a task share"
            raise UserError(what, remedy="set data.template_arguments and template_arguments=null")
        name = self.tool_schemas
        if name is not None and not is_played(self) and (name != TOOLS or name in values):
            tools = as_tools(look_up(values, name), f"{source}: column {name!r}", fills_nulls=fills_nulls)
            if tools:
                arguments["tools"] = tools
        return arguments


def _is_nested(value: Any) -> bool:
    """Return True for an object, a list that contains one, or a chat as JSON text: a template can't show these."""
    if isinstance(value, Mapping) or is_chat(value):
        return True
    return isinstance(value, (list, tuple)) and any(map(_is_nested, value))


def is_chat(value: Any) -> bool:
    """Return True for a list of {role, content}, or the same as JSON text."""
    if isinstance(value, str):
        if not value.lstrip().startswith("[") or '"role"' not in value:
            return False
        try:
            value = load_json(value)
        except ValueError:
            return False
    return isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) and "role" in item for item in value)


def require_text(value: Any, where: str, column: str) -> None:
    """Raise UserError, with the remedy, unless the value of a question is text: the model would see anything else as
    JSON, even a whole chat as one turn of the user."""
    kind = json_type(value)
    remedy = f"write it as text, or question='{{{column}}}' to ask it as JSON"
    if is_chat(value):
        kind = "a list of messages"
        remedy = f"map it with messages={column}"
    elif _is_nested(value):
        remedy = f"name the part of it that is the question, as in question={column}.text"
    elif isinstance(value, str):
        return
    raise UserError(f"{where} holds {kind}, but a question must be text: {value!r:.60}", remedy=remedy)


def _layout(columns: Iterable[str]) -> str | None:
    """Explain how to map the columns of a known layout without a column `question`; None for other layouts."""
    present = list(columns)
    if {"instruction", "output"} <= set(present):  # Alpaca's
        more = "\\n{input}" if "input" in present else ""
        return f'for Alpaca\'s columns set question="{{instruction}}{more}" and answer=output'
    chat = next((name for name in CHATS if name in present), None)
    if chat:
        return f"set messages={chat} for a column of chats, and answer=null if they hold the answer"
    return None


def _without_prompt(field: str, value: Any, column: str, source: str) -> EmptyPromptError:
    return EmptyPromptError(field, value, "is empty", remedy=f"remove {source}, or map another column than {column!r}")


def _value(text: str, values: Mapping[str, Any]) -> Any:
    """Return the value of a column, or a filled template."""
    if "{" in text:
        return fill(text, values)
    return to_json_value(look_up(values, text))
