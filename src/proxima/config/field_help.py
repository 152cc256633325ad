"""What docstrings say about config dataclasses and their fields: for `explain`, `list`, JSON schema and pages."""

import inspect
import re
import sys
from collections.abc import Mapping
from functools import cache


def summary_of(cls: type) -> str:
    """The first sentence of the docstring; empty for a dataclass without one."""
    text = cls.__doc__ or ""
    paragraph = " ".join(inspect.cleandoc(text).split("\n\n", 1)[0].split())
    return "" if text.startswith(f"{cls.__name__}(") else first_sentence(paragraph)


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
        named = getattr(sys.modules[base.__module__], other[1], None) if other else None
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
        depth = _indent(line) if depth is None else depth
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
