"""The texts that a regular expression requires: what every match contains, in order."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from re import _constants, _parser  # type: ignore[attr-defined]  # the library keeps its parser to itself
from typing import Any

REPEATS = {_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT}


@dataclass(frozen=True)
class RequiredText:
    """What every match of a pattern contains.

    Args:
        runs: texts without a gap, in order, one after the other.
        anchored: a match begins with the first run, at the beginning of the text.
        after_space: white space may come before it.
    """

    runs: tuple[str, ...] = ()
    anchored: bool = False
    after_space: bool = False


@dataclass
class _Reader:
    runs: list[str] = field(default_factory=lambda: [""])
    at_beginning: bool = False
    after_space: bool = False
    anchored: bool = False
    gap: bool = False  # something precedes the first run that may be of any text

    def read(self, parsed: Iterable[tuple[Any, Any]]) -> None:
        for code, value in parsed:
            if code is _constants.LITERAL:
                self._literal(chr(value))
            elif code is _constants.AT:
                self._place(value)
            elif code is _constants.SUBPATTERN and not (value[1] or value[2]):  # without flags of its own
                self.read(value[3])
            elif code in REPEATS:
                self._repeat(*value)
            elif code not in (_constants.ASSERT, _constants.ASSERT_NOT):
                self._break()

    def _literal(self, letter: str) -> None:
        if len(self.runs) == 1 and not self.runs[0]:
            self.anchored = self.at_beginning and not self.gap
        self.runs[-1] += letter

    def _place(self, place: object) -> None:
        if place in (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING) and self.runs == [""] and not self.gap:
            self.at_beginning = True
        elif place not in (_constants.AT_BOUNDARY, _constants.AT_NON_BOUNDARY):
            self._break()

    def _repeat(self, least: int, most: Any, inside: Any) -> None:
        space = [(_constants.IN, [(_constants.CATEGORY, _constants.CATEGORY_SPACE)])]
        if list(inside) == space and self.runs == [""] and self.at_beginning and not self.gap:
            self.after_space = True
            return
        self._break()
        if least:
            self.read(inside)
            self._break()

    def _break(self) -> None:
        if self.runs[-1]:
            self.runs.append("")
        elif len(self.runs) == 1:
            self.gap = True


def required_text(pattern: str, flags: int = re.DOTALL) -> RequiredText:
    """What a match of `pattern` contains; nothing for one that ignores case."""
    parsed = _parser.parse(pattern, flags)
    if parsed.state.flags & (re.IGNORECASE | re.VERBOSE):
        return RequiredText()
    reader = _Reader()
    reader.read(parsed)
    anchored = reader.anchored and not parsed.state.flags & re.MULTILINE
    return RequiredText(tuple(run for run in reader.runs if run), anchored, reader.after_space)
