"""Chat templates as programs with a budget: of steps, of characters, and of time.

A template is code of whoever published the model. transformers renders it in jinja's sandbox, which keeps it from files
and processes, but not from nested loops, or from a text that doubles until memory ends. Here the same environment
charges every pass of a loop, every call and every value that it makes to a budget, before the value is made; its
templates render as before, or fail with `TemplateBudgetError`. The bounds are counts, so that a template is refused on
every machine, or on none.
"""

import functools
import re
import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

STEPS = 1_000_000  # passes of loops, calls, and elements that are written
CHARACTERS = 1 << 29  # of all values that are made while a chat is rendered, and elements of lists
SOURCE = 1 << 20  # characters of a template
BITS = 10_000  # of an integer
SECONDS = 20.0  # of CPU time of the thread; a step of few characters takes a microsecond
CLOCK_STEPS, CLOCK_PASSES = 256, 16  # steps, and passes of a loop, between two checks of the clock

# filters and methods whose result may be longer than what they are given, by how much
PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?[hlL]?[a-zA-Z]")  # width and precision
PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
GROWING = PADDING | {"batch", "expandtabs", "indent", "slice", "tojson", "wordwrap"}
WRITING = frozenset({"format", "format_map", "join", "list", "pprint", "string", "tojson", "urlencode", "xmlattr"})
REFUSED = frozenset({"to_bytes", "translate"})  # methods that no template needs


class TemplateBudgetError(Exception):
    """A chat template takes too many steps, makes too long a text, or is too long itself."""


class Budget:
    """What is left to one rendering."""

    def __init__(self) -> None:
        self.steps = 0
        self.characters = 0
        self.ends = time.thread_time() + SECONDS
        self.next_check = CLOCK_STEPS

    def charge(self, characters: int = 0, steps: int = 1) -> None:
        """Raise TemplateBudgetError if this exceeds what is left."""
        self.steps += steps
        self.characters += characters
        if self.steps > STEPS:
            raise TemplateBudgetError(f"it takes more than {STEPS:,} steps")
        if self.characters > CHARACTERS:
            raise TemplateBudgetError(f"it makes texts of more than {CHARACTERS:,} characters")
        if self.steps >= self.next_check:
            self.next_check = self.steps + CLOCK_STEPS
            self.check_clock()

    def check_clock(self) -> None:
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


def charge(characters: int = 0, steps: int = 1) -> None:
    budget = _budget.get()
    if budget is not None:
        budget.charge(characters, steps)


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
    text = text if isinstance(text, str) else ""
    if braces:
        with suppress(ValueError):  # it is none; formatting says so
            specs = [spec or "" for _, _, spec, _ in string.Formatter().parse(text)]
            charge(CHARACTERS + 1 if any("{" in spec for spec in specs) else 0, 0)
            charge(sum(int(digits[:12]) for spec in specs for digits in re.findall(r"\d{3,}", spec)), 0)
    else:
        for width in PERCENT.findall(text):
            charge(CHARACTERS + 1 if "*" in width else sum(int(digits[:12]) for digits in width if digits), 0)
    charge(len(text))
    for value in values:
        charge_written(value)


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
        most = max((abs(x) if isinstance(x, int) else extent(x) for x in others), default=0)
        if name == "indent" and isinstance(value, str):
            lines = value.count("\n")
        else:
            lines = extent(value)
        charge((lines + 1) * (most + 1) if name not in PADDING else most)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    first = int(hasattr(function, "jinja_pass_arg"))

    @functools.wraps(function)
    def bounded(*given: Any, **named: Any) -> Any:
        charge()
        charge_call(name, given[first] if len(given) > first else None, given[first + 1 :], named)
        result = function(*given, **named)
        charge(extent(result), 0)
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


def _looped(items: Any, characters: int) -> Any:
    """What a loop runs over, each pass charged with the text in its body."""
    if isinstance(items, Sized):
        charge(len(items) * characters, len(items))
        return _TimedItems(items)
    return _charged(items, characters)


class _TimedItems(Sized, Iterable[Any]):
    """The items of a loop that has been charged. The clock is checked between its passes, which may take much time and
    no steps, as slices do."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        budget = _budget.get()
        for number, item in enumerate(self._items):
            if budget is not None and number % CLOCK_PASSES == CLOCK_PASSES - 1:
                budget.check_clock()
            yield item


def _charged(items: Iterable[Any], characters: int) -> Iterator[Any]:
    for item in items:
        charge(characters)
        yield item


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
        self.filters = filters | {"concatenated text": _concatenated, "loop with a budget": _looped}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > SOURCE:
            raise TemplateBudgetError(f"it has {len(source):,} characters, more than {SOURCE:,}")
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            text = sum(len(data.data) for part in loop.body for data in part.find_all(nodes.TemplateData))
            loop.iter = _filter("loop with a budget", loop.iter, nodes.Const(text))
        for concat in list(tree.find_all(nodes.Concat)):
            concat.nodes = [_filter("concatenated text", nodes.List(concat.nodes))]
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            sizes = left.bit_length(), right.bit_length()
            if (sizes[0] * max(right, 0) if operator == "**" else sum(sizes)) > BITS:
                raise TemplateBudgetError(f"it computes an integer of more than {BITS:,} bits")
        elif operator == "*":
            counts = [abs(side) if isinstance(side, int) else extent(side) for side in (left, right)]
            charge(counts[0] * counts[1])
        elif operator == "%" and isinstance(left, str):
            charge_format(left, right if isinstance(right, tuple) else (right,))
        elif operator == "+":
            charge(extent(left) + extent(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *given: Any, **named: Any) -> Any:
        charge()
        owner = _owner(function)
        name = getattr(function, "__name__", "")
        if isinstance(function, Macro):
            charge(SOURCE >> 6)
        elif isinstance(function, LoopContext):
            charge(0, sum(map(extent, given)))
        elif isinstance(owner, str | bytes | int) and name in REFUSED:
            raise TemplateBudgetError(f"it calls {name}")
        elif name in ("format", "format_map"):  # of a text, in the sandbox's wrapper
            text = None
            if hasattr(function, "__wrapped__"):
                text = _owner(function.__wrapped__)
            charge_format(text, (*given, *named.values()), braces=True)
        elif isinstance(owner, str | bytes):
            given = tuple(list(items) if isinstance(items, Iterator) else items for items in given)
            charge_call(name, owner, given, named)
        result = super().call(context, function, *given, **named)
        charge(extent(result), 0)
        return result


def _owner(function: Any) -> Any:
    """The object of a method; None of any other function."""
    return getattr(function, "__self__", None)


def _filter(name: str, node: Any, *given: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(given), [], None, None)


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
