"""Columns into rows: which column is what, templates over several columns, and errors that name the column that isn't
there."""

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, ClassVar

from proxima.data import FieldError, Message, UserError, require
from proxima.task.protocol import Row

ROLES = ("system", "user", "assistant")


def template_fields(template: str, field: str) -> set[str]:
    """The names in the braces of a template.

    Raises:
        ValueError: a brace that doesn't close, or one without a name; names the field.
    """
    try:
        names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as problem:
        raise FieldError(
            field, template, f"is not a template: {problem}", remedy="write a literal brace twice"
        ) from None
    require(
        all(names) and not any("[" in name for name in names),
        field,
        template,
        "must name a column in each pair of braces",
    )
    return names


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The template with each `{name}` replaced; names are looked up whole first, then along their dots."""
    return "".join(
        text + ("" if name is None else as_text(look_up(values, name)))
        for text, name, _, _ in Formatter().parse(template)
    )


def look_up(values: Mapping[str, Any], name: str) -> Any:
    """`values[name]`, or for `a.b` the `b` inside of `a`.

    Raises:
        KeyError: with the part of the name that isn't there.
    """
    if name in values:
        return values[name]
    head, dot, rest = name.partition(".")
    if dot and isinstance(values.get(head), Mapping):
        return look_up(values[head], rest)
    raise KeyError(name)


def as_text(value: Any) -> str:
    """Text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(to_json_value(value), ensure_ascii=False)


def to_json_value(value: Any) -> Any:
    """A value as JSON can hold it: dates, decimals and bytes become text."""
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Base of the tasks that read a table: which column is what. A name may follow dots into a column of objects
    (`reward_model.truth`).

    Args:
        question: column with the question, or a template over several, as "{question}\\n{hint}".
        messages: column with a whole chat, a list of {role, content}, in place of `question`; none: off.
        answer: column with the answer, or a template; none: the rows have no answer.
        metadata: columns kept for rewards and reports.
    """

    question: str = "question"
    messages: str | None = None
    answer: str | None = "answer"
    metadata: tuple[str, ...] = ()

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metadata", tuple(self.metadata))
        self.mapped()

    def mapped(self) -> dict[str, str]:
        """Each needed column with the field that asks for it."""
        texts = {"question": self.question} if self.messages is None else {"messages": self.messages}
        if self.answer is not None:
            texts["answer"] = self.answer
        names = {name: field for field, text in texts.items() for name in sorted(_names(text, field))}
        return {**dict.fromkeys(self.metadata, "metadata"), **names}

    def check(self, present: Iterable[str], source: str) -> None:
        """Every mapped column is there.

        Raises:
            ValueError: the first that is not, with the nearest name and those present.
        """
        known = list(present)
        for name, field in self.mapped().items():
            if name in known or name.partition(".")[0] in known:
                continue
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "; map one with"
            remedy = "" if near else f" {field}=COLUMN" + (" (or answer=null)" if field == "answer" else "")
            raise UserError(
                f"{source} has no column {name!r} ({field}){hint}{remedy}; columns: {', '.join(known) or 'none'}"
            )

    def row(self, values: Mapping[str, Any], source: str) -> Row:
        """The row that these values make.

        Raises:
            ValueError: a value is missing, empty, or no chat; names the source and the column.
        """
        try:
            answer = None if self.answer is None else _take(self.answer, values)
            metadata = {name: to_json_value(look_up(values, name)) for name in self.metadata}
            if self.messages is not None:
                return Row(
                    messages=as_messages(look_up(values, self.messages), f"{source}: column {self.messages!r}"),
                    answer=answer,
                    metadata=metadata,
                )
            question = _take(self.question, values)
        except KeyError as missing:
            name = missing.args[0]
            raise UserError(f"{source} has no column {name!r}; columns: {', '.join(values) or 'none'}") from None
        if question is None or question == "":
            raise UserError(f"{source}: column {self.question!r} is empty; remove the row or map another column")
        return Row(messages=({"role": "user", "content": as_text(question)},), answer=answer, metadata=metadata)


def as_messages(value: Any, source: str) -> tuple[Message, ...]:
    """A chat: a list of {role, content}, or the same as JSON text; other keys are left out.

    Raises:
        ValueError: anything else, an empty chat, or an unknown role; names the source.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise UserError(f"{source} holds text, expected a list of {{role, content}}; map it as question") from None
    if not isinstance(value, (list, tuple)) or not value:
        raise UserError(f"{source} holds {value!r:.60}, expected a list of {{role, content}}")
    for message in value:
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("content"), str)
            or message.get("role") not in ROLES
        ):
            raise UserError(
                f"{source} holds the message {message!r:.80}, expected a role among {', '.join(ROLES)} and a text "
                "content"
            )
    return tuple({"role": str(message["role"]), "content": str(message["content"])} for message in value)


def _names(text: str, field: str) -> set[str]:
    return template_fields(text, field) if "{" in text else {text}


def _take(text: str, values: Mapping[str, Any]) -> Any:
    return fill(text, values) if "{" in text else to_json_value(look_up(values, text))
