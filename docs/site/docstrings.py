"""Docstrings of the code, as reStructuredText.

A docstring has paragraphs, formulas as indented blocks, and sections: `Args:`, with items `name: text`, and others,
whose text begins on the line of their name. Continuation lines are indented. `Code` is between single backticks, TeX
between `$`. Public names of `proxima.core` become links.
"""

import re

import proxima.core

SECTION = re.compile(r"(Args|Returns|Yields|Raises|Edge cases|Metrics|Reads|Source|Differs):(?: (.*))?")
ITEM = re.compile(r"([a-z_]\w*(?:, \w+)*): (.*)")
NEXT = ",\u200b"  # between two arguments: with a space, the first would be a type
SPECIAL = re.compile(r"([\\*|_`])")
CODE_OR_TEX = re.compile(r"`([^`]+)`|\$([^$]+)\$")
ENUMERATOR = re.compile(r"\(?\w+[.)]\s|[-+•]\s|\.\.")
PUBLIC = {name: getattr(proxima.core, name) for name in proxima.core.__all__}
PLACES = {name: f"{one.__module__}.{name}" for name, one in PUBLIC.items() if hasattr(one, "__qualname__")}


def as_rst(lines: list[str]) -> None:
    """Replaces the lines of a docstring by reStructuredText."""
    made: list[str] = []
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines).strip("\n"))
    for place, paragraph in enumerate(paragraphs):
        rows = paragraph.split("\n")
        if all(row.startswith("    ") for row in rows):
            made += ["::", "", *rows, ""]
        elif SECTION.fullmatch(rows[0]) or (place and is_items(rows)):
            made += [*fields(rows), ""]
        else:
            made += [*mixed(rows), ""]
    lines[:] = made


def is_items(rows: list[str]) -> bool:
    """Whether every line begins or continues an item `name: text`."""
    return bool(ITEM.match(rows[0])) and all(row.startswith("    ") or ITEM.match(row) for row in rows)


def mixed(rows: list[str]) -> list[str]:
    """A paragraph, behind which sections may begin without an empty line."""
    for place, row in enumerate(rows):
        if SECTION.fullmatch(row):
            return [text(rows[:place]), "", *fields(rows[place:])]
    if all(row.startswith(("- ", "  ")) for row in rows):
        return [escaped(row) for row in rows]
    return [text(rows)]


def fields(rows: list[str]) -> list[str]:
    """A field list: one field per section, and one per argument."""
    found: list[tuple[str, list[str]]] = []
    arguments = False
    for row in rows:
        if section := SECTION.fullmatch(row):
            arguments = section[1] == "Args"
            if not arguments:
                found.append((section[1], [section[2] or ""]))
        elif item := ITEM.fullmatch(row.removeprefix("    ") if arguments else row):
            found.append((f"param {item[1].replace(', ', NEXT)}", [item[2]]))
        elif found and (row.startswith("    ") or not found[-1][0]):
            found[-1][1].append(row.strip())
        else:  # a paragraph after the sections
            found.append(("", [row]))
            arguments = False
    made: list[str] = []
    for name, words in found:
        made += [f":{name}: {text(words)}"] if name else ["", text(words), ""]
    return made


def text(rows: list[str]) -> str:
    """One line of text. What is special in reStructuredText is escaped."""
    line = " ".join(row.strip() for row in rows)
    made, end = "", 0
    for part in CODE_OR_TEX.finditer(line):
        made += escaped(line[end : part.start()]) + f"\\ {role(part[1], part[2])}\\ "
        end = part.end()
    made = (made + escaped(line[end:])).strip()
    return f"\\{made}" if ENUMERATOR.match(made) else made


def role(code: str | None, tex: str | None) -> str:
    if code is None:
        return f":math:`{tex}`"
    name = code.removeprefix("core.")
    return f":py:obj:`{code} <{PLACES[name]}>`" if name in PLACES else f"``{code}``"


def escaped(words: str) -> str:
    return SPECIAL.sub(r"\\\1", words)
