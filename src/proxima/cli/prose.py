"""Wraps prose for the terminal, and leaves commands whole."""

import re
import textwrap

WIDTH = 100  # columns at most
# or the comment of a file
COMMAND = re.compile(r" *(?:#|export|(?:[A-Z_]+=\S+ )*(?:proxima|make|python)) .*")
COLUMNS = re.compile(r"( *[A-Z][\w ]*?  +)\S.*")  # a word, then text in a column of its own
TABLE_ROW = re.compile(r" *\S.*\S   +\S.*")


def laid_out(comment: str, width: int) -> str:
    """Wrap the prose of a recipe's comment, or of a command's docstring, to `width` columns. Texts beside a word stay
    in their column, rows of tables stay as they are, and so do commands; a remark after a command that has no room for
    it is put above."""
    lines: list[str] = []  # printed
    paragraph = ""  # not yet printed
    hang = 0  # the column of its continuation
    for line in [*comment.splitlines(), ""]:
        column = COLUMNS.fullmatch(line)
        goes_on = not paragraph and bool(lines) and lines[-1].endswith("\\")
        command = goes_on or COMMAND.fullmatch(line)
        row = not column and TABLE_ROW.fullmatch(line)
        indent = len(line) - len(line.lstrip())
        if paragraph and line and not (column or command or row) and indent == hang:
            paragraph += f" {line.strip()}"
            continue
        if paragraph:
            lines.append(wrapped(paragraph, width, " " * hang))
        paragraph = ""
        code, mark, remark = line.partition("  # ")
        if command and mark and len(line) > width:
            lines += [wrapped(f"{' ' * indent}# {remark.strip()}", width, f"{' ' * indent}# "), code.rstrip()]
        elif command or row or not line:
            lines.append(line)
        else:
            paragraph = line
            hang = len(column[1]) if column else indent
    return "\n".join(lines).strip("\n")


def wrapped(line: str, width: int, indent: str) -> str:
    """Wrap a line to `width` columns, between words only; spaces are kept except at the breaks."""
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False, replace_whitespace=False)
