"""Rules of `house.py` about what differs from one computer to another.

encodings      who opens text says its encoding: without one it is that of the user's locale
"""

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = ("scripts", "benchmarks", "examples", "evidence")  # beside the packages

# Functions that open a file, each with the position of its mode; "open" as a method of a path has it first.
MODES = {"open": 1, "fdopen": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0, "SpooledTemporaryFile": 1}
TEXT_BY_DEFAULT = ("open", "io.open", "os.fdopen")
TAKE_A_NAME = ("", "io", "codecs", "gzip", "bz2", "lzma")  # whose `open` is no method of a path
OPEN_NO_TEXT = ("os", "Image", "tarfile", "zipfile", "webbrowser")


def unspecified_encodings(path: str, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the calls of a file that read or write text in the encoding of the locale."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        if "encoding" in given or None in given:
            continue
        if _is_locale_text(node, given):
            yield f'{path}:{node.lineno}: {ast.unparse(node.func)} without encoding; add encoding="utf-8"'


def _is_locale_text(call: ast.Call, given: dict[str | None, ast.expr]) -> bool:
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if name in ("read_text", "write_text"):
        return len(call.args) == (name == "write_text")
    if name == "TextIOWrapper":
        return len(call.args) == 1
    if any(_is_true(given.get(word)) for word in ("text", "universal_newlines")):
        return True
    if name not in MODES or (name == "open" and owner in OPEN_NO_TEXT):
        return False
    of_path = name == "open" and owner not in TAKE_A_NAME
    at = 0 if of_path else MODES[name]
    mode = given.get("mode", call.args[at] if len(call.args) > at else None)
    if mode is None:
        return of_path if not (call.args or given) else ast.unparse(call.func) in TEXT_BY_DEFAULT
    return (
        isinstance(mode, ast.Constant)
        and isinstance(mode.value, str)
        and re.fullmatch(r"[rwaxt+]+", mode.value) is not None
    )


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
