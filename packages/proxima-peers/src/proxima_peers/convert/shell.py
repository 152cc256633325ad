"""Splits a shell script into statements as `bash` would, without running or expanding anything."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Statement:
    """Words of one command, without quotes; `$…` stays as written.

    Args:
        words: words of the command, or of the array.
        array: name of the array that the words are assigned to, `DATA` of `DATA=(…)`.
    """

    words: list[str] = field(default_factory=list)
    array: str | None = None


_ARRAY = re.compile(r"([A-Za-z_]\w*)\+?=")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_BLANK = " \t\r"


def statements(text: str) -> Iterator[Statement]:
    """The statements of a script in order, including those inside branches, loops and functions.

    Comments and the texts of here-documents are left out. An unclosed quote extends to the end of the script.
    """
    statement = Statement()
    scan = _Scan(text.replace("\r\n", "\n"))
    for token, operator in scan.tokens():
        array = _ARRAY.fullmatch(token)
        if not operator:
            statement.words.append(token)
        elif array:  # words before it, such as `declare`, have no meaning here
            statement = Statement(array=array[1])
        elif token == ")" or statement.array is None:
            if statement.words or statement.array:
                yield statement
            statement = Statement()
    if statement.words or statement.array:
        yield statement


class _Scan:
    """A position in the text, and the pending here-documents, which begin at the end of its line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.pending: list[str] = []  # end markers of here-documents

    def tokens(self) -> Iterator[tuple[str, bool]]:
        """Words, and operators: a newline, `;`, `&`, `|`, a parenthesis, or `DATA=(` as `DATA=`."""
        while self.at < len(self.text):
            letter = self.text[self.at]
            heredoc = _HEREDOC.match(self.text, self.at)
            if letter in _BLANK:
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif letter == "#":
                self.skip_to("\n")
            elif letter in "\n;&|()":
                self.at += 1
                if letter == "\n":
                    self.skip_heredocs()
                yield letter, True
            elif heredoc:
                self.pending.append(heredoc[2])
                self.at = heredoc.end()
            else:
                word = self.word()
                array = self.text[self.at : self.at + 1] == "(" and _ARRAY.fullmatch(word) is not None
                self.at += array
                yield word, array

    def word(self) -> str:
        """Read the word at the current position, which ends before a blank or an operator outside quotes."""
        parts: list[str] = []
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter in "\n;|()" or letter in _BLANK or (letter == "&" and not (parts and parts[-1] == ">")):
                break
            if letter in "'\"":
                parts.append(self.quoted())
            else:
                parts.append(self.piece())
        return "".join(parts)

    def piece(self) -> str:
        """Read one character, an escaped one, or a whole `$(…)`, `${…}` or `…` in backquotes."""
        letter = self.text[self.at]
        start = self.at
        if letter == "\\":
            self.at += 2
            if self.text[start + 1 : start + 2] == "\n":
                return ""
            return self.text[start + 1 : self.at]
        if letter == "`":
            self.at += 1
            self.skip_to("`")
            self.at += 1
        elif letter == "$" and self.text[start + 1 : start + 2] in ("(", "{"):
            self.at += 1
            self.skip_pair()
        else:
            self.at += 1
        return self.text[start : self.at]

    def quoted(self) -> str:
        """Read the text of the quote at the current position."""
        mark = self.text[self.at]
        self.at += 1
        if mark == "'":
            start = self.at
            self.skip_to("'")
            self.at += 1
            return self.text[start : self.at - 1]
        parts: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != '"':
            if self.text[self.at] == "\\" and self.text[self.at + 1 : self.at + 2] not in ('"', "$", "`", "\\", "\n"):
                parts.append("\\")
                self.at += 1
            else:
                parts.append(self.piece())
        self.at += 1
        return "".join(parts)

    def skip_pair(self) -> None:
        """Skip a `(…)` or `{…}` with everything nested in it."""
        opening = self.text[self.at]
        closing = ")" if opening == "(" else "}"
        depth = 0
        while self.at < len(self.text):
            letter = self.text[self.at]
            self.at += 1
            if letter == "\\":
                self.at += 1
            elif letter == "'" and opening == "(":
                self.skip_to("'")
                self.at += 1
            depth += (letter == opening) - (letter == closing)
            if not depth:
                return

    def skip_to(self, end: str) -> None:
        place = self.text.find(end, self.at)
        self.at = len(self.text) if place < 0 else place

    def skip_heredocs(self) -> None:
        for end in self.pending:
            match = re.compile(rf"^\t*{end}$", re.MULTILINE).search(self.text, self.at)
            if match:
                self.at = match.end()
            else:
                self.at = len(self.text)
        self.pending = []
