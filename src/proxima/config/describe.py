"""Describe config dataclasses: fields with type, default and meaning."""

import dataclasses
import inspect
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import cache, cached_property
from pkgutil import resolve_name
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from proxima.data.kinds import Kinds, Slot
from proxima.system.user_modules import import_user_module


@dataclass(frozen=True)
class FieldInfo:
    """One field of a config dataclass.

    Args:
        name: as in a recipe.
        hint: its type, without `Annotated`.
        note: the text in its `Annotated[...]`; empty without one.
        default: the value if a recipe does not set the field; `MISSING` for a required field.
        slot: set if the field holds specs of a table.
        owner: the dataclass.
    """

    name: str
    hint: Any
    note: str
    default: Any
    slot: Slot | None
    owner: type

    @property
    def help(self) -> str:
        """Meaning and unit in one line, may be empty: the note, else its entry under `Args:` in the docstring."""
        return self.note or documented(self.owner).get(self.name, "")

    @cached_property
    def section(self) -> type | None:
        """The dataclass (of `C` or `C | None`) whose fields are nested in this field; None for a slot or a value."""
        classes = (option for option in options_of(self.hint) if isinstance(option, type))
        if self.slot:
            return None
        return next(filter(dataclasses.is_dataclass, classes), None)

    @property
    def presets(self) -> str | None:
        """The table of presets by which the section may be named, "package.module:DICT"; None: it has none."""
        if self.section is None:
            return None
        return vars(self.section).get("PRESETS")

    @property
    def head(self) -> str | None:
        """`kind` or `preset`, the key that says what the keys beside it mean; None elsewhere."""
        if self.slot:
            return "kind"
        if self.presets:
            return "preset"
        return None

    @property
    def entry(self) -> "FieldInfo":
        """The field as which each entry of a list of specs is read."""
        return dataclasses.replace(self, slot=self.slot and dataclasses.replace(self.slot, many=False))

    def child(self, name: str) -> "FieldInfo":
        """The field of that name in the section; `NO_FIELD` if there is none."""
        below = () if self.section is None else fields_of(self.section)
        return next((info for info in below if info.name == name), NO_FIELD)


def root_field(cls: type) -> FieldInfo:
    """A config class as the field that holds the whole config."""
    return FieldInfo("", cls, "", MISSING, None, cls)


NO_FIELD = root_field(object)  # of a key that no config class declares: its value is plain YAML


@cache
def fields_of(cls: type) -> tuple[FieldInfo, ...]:
    """The fields a recipe may set, in the order of the class; TypeError if the class is not a dataclass."""
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is not a dataclass; a spec is one, and its fields are its config")
    hints = get_type_hints(cls, include_extras=True)
    infos = []
    for field in dataclasses.fields(cls):
        if field.init:
            full = hints[field.name]
            hint = full
            notes: list[Any] = []
            if get_origin(full) is Annotated:
                hint, *notes = get_args(full)
            text = next((note for note in notes if isinstance(note, str)), "")
            slot = next((note for note in notes if isinstance(note, Slot)), None)
            default = field.default if field.default_factory is MISSING else field.default_factory()
            infos.append(FieldInfo(field.name, hint, text, default, slot, cls))
    return tuple(infos)


def all_fields(cls: type, path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field of a config class and of its sections, with its dotted path."""
    for info in fields_of(cls):
        yield f"{path}{info.name}", info
        if info.section is not None:
            yield from all_fields(info.section, f"{path}{info.name}.")


def options_of(hint: object) -> tuple[Any, ...]:
    """The members of a union, else the type itself."""
    if get_origin(hint) in (Union, types.UnionType):
        return get_args(hint)
    return (hint,)


def table_of(reference: str) -> Mapping[str, Any]:
    """The table at "package.module:NAME"."""
    table: Mapping[str, Any] = resolve_name(reference)
    return table


def kinds_of(slot: Slot) -> Kinds:
    """The kinds of a slot; each class is imported when it is looked up."""
    kinds: Kinds = resolve_name(slot.table)
    return kinds


def class_at(reference: str) -> type:
    """The class that `package.module:Class` names; raises whatever its import raises."""
    module, _, name = reference.partition(":")
    if module.endswith(".py"):
        raise ValueError("a class is named by its module, not by a file")
    value = getattr(import_user_module(module), name)
    if not isinstance(value, type):
        raise TypeError(f"{reference} is not a class")
    return value


def setting(spec: Any, name: str, default: Any = None) -> Any:
    """A field of a spec whose class may be the user's and lack it."""
    return getattr(spec, name, default)


def kind_of(spec: object) -> str:
    """The kind by which a recipe names this spec: a key of the table of any slot of `RunConfig`, else
    `package.module:Class`."""
    run = class_at("proxima.config.schema:RunConfig")
    names = (kinds_of(info.slot).kind_of(spec) for _, info in all_fields(run) if info.slot)
    return next((name for name in names if ":" not in name), f"{type(spec).__module__}:{type(spec).__qualname__}")


def summary_of(cls: type) -> str:
    """The first sentence of the docstring; empty for a dataclass without one."""
    text = cls.__doc__ or ""
    paragraph = " ".join(inspect.cleandoc(text).split("\n\n", 1)[0].split())
    if text.startswith(f"{cls.__name__}("):
        return ""
    return first_sentence(paragraph)


def first_sentence(text: str) -> str:
    """The text up to its first full stop that is not in brackets."""
    parts = text.split(". ")
    for count in range(1, len(parts) + 1):
        sentence = ". ".join(parts[:count])
        if sentence.count("(") == sentence.count(")"):
            return sentence.removesuffix(".")
    return text


@cache
def documented(cls: type) -> Mapping[str, str]:
    """The entries under `Args:` of the class and its bases, each as one line; `Args: as `K1`` includes those of K1."""
    meanings: dict[str, str] = {}
    for base in cls.__mro__:
        for names, text in args_section(base.__doc__ or ""):
            for name in names:
                meanings.setdefault(name, text)
        other = re.search(r"Args[^:.]*: as `(\w+)`", base.__doc__ or "")
        named = None
        if other:
            named = vars(sys.modules[base.__module__]).get(other[1])
        if isinstance(named, type) and named is not base:
            meanings = {**documented(named), **meanings}
    return meanings


def args_section(docstring: str) -> list[tuple[tuple[str, ...], str]]:
    """The entries under `Args:` of a docstring: pairs of the names before the colon and the text after it."""
    lines = inspect.cleandoc(docstring).splitlines()
    start = next((i for i, line in enumerate(lines) if line.strip().startswith("Args:")), None)
    if start is None:
        return []
    margin = _indent(lines[start])
    entries: list[tuple[tuple[str, ...], str]] = []
    depth = None
    for line in lines[start + 1 :]:
        if not line.strip():
            continue
        if _indent(line) <= margin:
            break
        if depth is None:
            depth = _indent(line)
        match = re.match(r"\s*`?(\w+(?:`?, `?\w+)*)`?:\s*(.*)", line)
        if _indent(line) == depth and match:
            names = tuple(re.findall(r"\w+", match[1]))
            entries.append((names, match[2].strip()))
        elif entries:
            names, text = entries[-1]
            entries[-1] = (names, f"{text} {line.strip()}".strip())
    return entries


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
