"""Chat templates as programs with a budget: of CPU time, and of characters.

A template is code of whoever published the model. transformers renders it in jinja's sandbox, which keeps it from files
and processes, but not from nested loops, or from a text that doubles until memory ends. Here the same environment looks
at the clock in every pass of a loop and at every call; its templates render as before, or fail with
`TemplateBudgetError`.

The clock ends whatever takes many steps. It can't end one long step: `'x' * 10**10`, a width in a format, or the text
of a list that holds itself twice, 64 times over. So the characters of a value are charged before the value is made, and
an integer has few bits.
"""

import functools
import re
import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 5.0  # of CPU time of the thread; an ordinary chat takes milliseconds
CHARACTERS = 1 << 29  # of all values that are made while a chat is rendered, and elements of lists
SOURCE = 1 << 20  # characters of a template
BITS = 10_000  # of an integer

# filters and methods whose result may be longer than what they are given, by how much
PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?[a-zA-Z]")  # width and precision
PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
GROWING = PADDING | {"batch", "expandtabs", "indent", "slice", "tojson", "wordwrap"}
WRITING = frozenset({"format", "format_map", "join", "list", "pprint", "string", "tojson", "urlencode", "xmlattr"})
REFUSED = frozenset({"to_bytes", "translate"})  # methods that no template needs


class TemplateBudgetError(Exception):
    """A chat template takes too long, makes too long a text, or is too long itself."""


class Budget:
    """What is left to one rendering."""

    def __init__(self) -> None:
        self.characters = 0
        self.ends = time.thread_time() + SECONDS

    def charge(self, characters: int = 0) -> None:
        """Raise TemplateBudgetError if this exceeds what is left, or the time is over."""
        self.characters += characters
        if self.characters > CHARACTERS:
            raise TemplateBudgetError(f"it makes texts of more than {CHARACTERS:,} characters")
        if time.thread_time() > self.ends:
            raise TemplateBudgetError(f"it takes more than {SECONDS:g} s of CPU time")


_budget: ContextVar[Budget | None] = ContextVar("budget of a template", default=None)


@contextmanager
def new_budget() -> Iterator[None]:
    """Within the block, templates share one new budget."""
    token = _budget.set(Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def charge(characters: int = 0) -> None:
    budget = _budget.get()
    if budget is not None:
        budget.charge(characters)


def charge_written(value: Any) -> None:
    """Charge a value that is written as text, with all that it holds."""
    if isinstance(value, str | bytes):
        charge(len(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            charge_written(key)
            charge_written(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            charge_written(item)
    else:
        charge(8)


def extent(value: Any) -> int:
    """Characters of a value, or eight for each of its elements; 0 of others."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple | dict | range):
        return 8 * len(value)
    return 0


def charge_format(text: Any, values: Iterable[Any], *, braces: bool = False) -> None:
    """Charge a text that is formatted, by `%` or as by `str.format`: its widths and precisions, of which those that are
    values themselves are refused, and what is put into it."""
    if isinstance(text, str):
        for width in _widths(text, braces):
            if not width.isdecimal():
                raise TemplateBudgetError(f"it makes texts of more than {CHARACTERS:,} characters")
            charge(int(width[:12]))
        charge(len(text))
    for value in values:
        charge_written(value)


def _widths(text: str, braces: bool) -> Iterator[str]:
    """The widths and precisions in a text to be formatted: digits, or `*` and `{`, where they are values."""
    if not braces:
        for pair in PERCENT.findall(text):
            yield from filter(None, pair)
        return
    with suppress(ValueError):  # it is none; formatting says so
        for _, _, spec, _ in string.Formatter().parse(text):
            yield from re.findall(r"\d{3,}|\{", spec or "")


def charge_call(name: str, value: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Charge a filter or a method of this name before it is called for a value."""
    others = (*given, *named.values())
    if name in WRITING and name not in ("format", "format_map"):
        charge_written(value)
    if name in ("format", "format_map"):
        charge_format(value, others)
    elif name == "replace" and isinstance(value, str) and len(given) > 1 and isinstance(given[0], str):
        charge(len(value) + value.count(given[0]) * extent(given[1]))
    elif name == "join":
        for items in others:
            charge_written(items)
        charge((extent(value) + 1) * (max(map(extent, others), default=0) + 1))
    elif name in GROWING:
        most = max(map(_count, others), default=0)
        lines = extent(value)
        if name in PADDING:
            lines = 0
        elif name == "indent" and isinstance(value, str):
            lines = value.count("\n")
        charge((lines + 1) * (most + 1))


def _count(value: Any) -> int:
    """How many times an argument may repeat something, or its extent."""
    return abs(value) if isinstance(value, int) else extent(value)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    first = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def bounded(*given: Any, **named: Any) -> Any:
        value = given[first] if len(given) > first else None
        charge_call(name, value, given[first + 1 :], named)
        result = function(*given, **named)
        charge(extent(result))
        return result

    return bounded


@pass_context
def _charge_output(context: Any, value: Any) -> Any:
    """Charge what `{{ … }}` writes; with a context, so that jinja computes nothing when it compiles."""
    charge_written(value)
    return value


def _concatenated(parts: list[Any]) -> str:
    for part in parts:
        charge_written(part)
    return "".join(map(str, parts))


class BoundedTemplate(Template):
    """A template that is rendered within a budget of its own."""

    def render(self, *given: Any, **named: Any) -> str:
        with new_budget():
            return super().render(*given, **named)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of transformers with a budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    template_class = BoundedTemplate

    def __init__(self, like: Any) -> None:
        kinds = [type(extension) for extension in like.extensions.values()]
        options = {"trim_blocks": like.trim_blocks, "lstrip_blocks": like.lstrip_blocks, "optimized": False}
        super().__init__(**options, extensions=kinds, finalize=_charge_output)
        self.globals = {name: value for name, value in like.globals.items() if name != "lipsum"}
        filters = {name: _bounded_filter(name, function) for name, function in like.filters.items()}
        self.filters = filters | {"concatenated text": _concatenated, "charged pass": charge}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > SOURCE:
            raise TemplateBudgetError(f"it has {len(source):,} characters, more than {SOURCE:,}")
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            text = 0
            for part in loop.body:
                text += sum(len(data.data) for data in part.find_all(nodes.TemplateData))
            loop.body.insert(0, nodes.ExprStmt(_filter("charged pass", nodes.Const(text))))
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [_filter("concatenated text", nodes.List(concat.nodes))]
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
            if operator == "**":
                bits = left.bit_length() * max(right, 0)
            if bits > BITS:
                raise TemplateBudgetError(f"it computes an integer of more than {BITS:,} bits")
        elif operator == "*":
            charge(_count(left) * _count(right))
        elif operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else (right,)
            charge_format(left, values)
        elif operator == "+":
            charge(extent(left) + extent(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *given: Any, **named: Any) -> Any:
        charge()
        owner = getattr(function, "__self__", None)  # of a method
        name = getattr(function, "__name__", "")
        if isinstance(owner, str | bytes | int) and name in REFUSED:
            raise TemplateBudgetError(f"it calls {name}")
        if name in ("format", "format_map"):  # of a text, in the sandbox's wrapper
            wrapped = getattr(function, "__wrapped__", None)
            text = getattr(wrapped, "__self__", None)
            charge_format(text, (*given, *named.values()), braces=True)
        elif isinstance(owner, str | bytes):
            given = tuple(map(_listed, given))
            charge_call(name, owner, given, named)
        result = super().call(context, function, *given, **named)
        charge(extent(result))
        return result


def _listed(value: Any) -> Any:
    """An iterator's items, which can be counted before they are used."""
    return list(value) if isinstance(value, Iterator) else value


def _filter(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


@functools.lru_cache(maxsize=32)
def bounded_template(source: str) -> Any:
    """The compiled template of a source.

    Raises:
        TemplateBudgetError: it is too long. TemplateError: it is no template.
    """
    with new_budget():
        return bounded_environment().from_string(source)


@functools.cache
def bounded_environment() -> BoundedEnvironment:
    """The environment of transformers' chat templates with a budget; from the first call on transformers renders with
    it."""
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    environment = BoundedEnvironment(module._compile_jinja_template("").environment)
    module._compile_jinja_template = bounded_template
    return environment
