"""The built-in environments: tools (a calculator, Python, search, a database), and a game, guessing a number."""

import ast
import json
import operator
import os
import re
import select
import signal
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from proxima.data import FieldError, as_field_errors, require
from proxima.data.json_reader import load_json
from proxima.data.random import mix
from proxima.environment.protocol import Environment, Reply
from proxima.process.code_runner import run_program
from proxima.process.sandbox import Sandbox, SandboxMissing, auto_sandbox, fallback_note, usable_kind

LONGEST = 500  # characters of an expression
LARGEST = 10**30  # larger values are refused
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class Calculator(Environment):
    """A tool `calculate` for arithmetic; the recipe's rewards judge the answer."""

    def calculate(self, expression: str) -> str:
        """Compute the value of an arithmetic expression.

        Args:
            expression: numbers, + - * / // % ** and parentheses, such as 12*(3+4)
        """
        return calculate(expression)


def calculate(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: numbers, + - * / // % ** and parentheses, such as 12*(3+4)
    """
    text = expression.strip().rstrip("=").translate(str.maketrans("×·÷−–", "**/--")).replace("^", "**")
    if len(text) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
    except (MemoryError, RecursionError, SyntaxError):
        raise ValueError(f"{expression!r:.60} is not an arithmetic expression") from None
    if float(value).is_integer():
        return str(int(value))
    return f"{value:.12g}"


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result = value
        case ast.BinOp(left, sign, right) if type(sign) in _BINARY:
            first = _value(left)
            second = _value(right)
            if isinstance(sign, ast.Pow) and (abs(second) > 100 or (first < 0 and second != int(second))):
                raise ValueError("the exponent must be a whole number of at most 100, or the base positive")
            result = _BINARY[type(sign)](first, second)
        case ast.UnaryOp(sign, operand) if type(sign) in _UNARY:
            result = _UNARY[type(sign)](_value(operand))
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses are known")
    if not abs(result) <= LARGEST:  # NaN too
        raise ValueError("the result is too large")
    return result


class PythonCode(Environment):
    """A tool `python`, which runs a program. Each call runs in a new process without state from earlier calls; it
    may not start processes, or use the network or files outside its folder. In a sandbox it can't.

    Args:
        seconds: limit of a call's wall-clock time and of its CPU time.
        memory_mb: MiB of address space.
        characters: maximum length of the output shown to the model; the middle of a longer one is left out.
        sandbox: where the program runs; see `proxima.reward.unit_tests.UnitTests`.
    """

    def __init__(self, seconds: int = 5, memory_mb: int = 512, characters: int = 2000, sandbox: str = "auto") -> None:
        require(seconds >= 1, "seconds", seconds, "must be >= 1")
        require(memory_mb >= 64, "memory_mb", memory_mb, "must be >= 64: Python itself needs that")
        require(characters >= 40, "characters", characters, "must be >= 40")
        self.seconds = seconds
        self.memory_mb = memory_mb
        self.characters = characters
        with as_field_errors(SandboxMissing):
            kind = usable_kind(sandbox)
        self.sandbox = Sandbox(kind=kind, ahead=kind == "bubblewrap")
        self.settled = {"sandbox": kind}  # arguments with which workers create it after the inspection
        note = fallback_note(sandbox)
        self.notes = [note] if note else []

    @staticmethod
    def auto_outcome(argument: str) -> tuple[str, str] | None:
        """See `proxima.config.outcomes`."""
        return auto_sandbox() if argument == "sandbox" else None

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: the program; it prints what you want to know
        """
        ended, printed = run_program(
            code, (self.seconds, self.memory_mb), self.seconds, errors=True, sandbox=self.sandbox
        )
        printed = printed.strip()
        if len(printed) > self.characters:
            printed = f"{printed[: self.characters // 2]}\n...\n{printed[-self.characters // 2 :]}"
        if ended is None:
            printed += f"\nerror: timed out after {self.seconds} s"
        elif ended < 0:
            printed += f"\nerror: a signal ended it ({-ended})"
        return printed.strip() or "(it printed nothing)"


class Search(Environment):
    """A tool `search`, which finds passages that share words with a query (BM25).

    Args:
        corpus: a JSONL file; each line has a `text` and optionally a `title`. All episodes of a worker share it.
        top: maximum number of passages that a search returns.
        characters: maximum length of a passage shown to the model.
    """

    needs = {"bm25s": "proxima-rl[search]"}  # noqa: RUF012

    def __init__(self, corpus: str, top: int = 3, characters: int = 500) -> None:
        require(top >= 1, "top", top, "must be >= 1")
        require(characters >= 1, "characters", characters, "must be >= 1")
        require(Path(corpus).is_file(), "corpus", corpus, "does not exist", remedy="name a JSONL file of passages")
        self.passages, self.index = read_corpus(str(Path(corpus).resolve()))
        self.top = min(top, len(self.passages))
        self.characters = characters

    def search(self, query: str) -> str:
        """Search for passages.

        Args:
            query: some words that the passage should have
        """
        import bm25s

        words = bm25s.tokenize([query[:1000]], return_ids=False, show_progress=False)
        numbers, scores = self.index.retrieve(words, k=self.top, show_progress=False)
        best = [self.passages[number] for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]
        lines = [f"[{i}] {passage[: self.characters]}" for i, passage in enumerate(best, 1)]
        return "\n".join(lines) or "nothing was found"


@lru_cache(maxsize=4)
def read_corpus(path: str) -> tuple[list[str], Any]:
    """Read the passages of a file and index them; FieldError if a line is not a passage."""
    missing = "needs the package bm25s, which is not installed"
    require(find_spec("bm25s") is not None, "corpus", path, missing, remedy="pip install 'proxima-rl[search]'")
    import bm25s

    passages = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = load_json(line)
                title = row.get("title")
                text = str(row["text"])
                passages.append(f"{title}: {text}" if title else text)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                bound = f"has a line {number} that is not a passage: {type(error).__name__}: {error}"
                raise FieldError("corpus", path, bound, remedy='write {"text": ...} in each line') from error
    require(bool(passages), "corpus", path, "is empty")
    index = bm25s.BM25()
    index.index(bm25s.tokenize(passages, show_progress=False), show_progress=False)
    return passages, index


ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE)
PRAGMAS = ("table_info", "table_list", "data_version")  # FTS5 reads the last one
# Those that compute from their arguments or search; none tells of the process, takes or gives an address, or is random:
# a replayed episode must take the same course.
FUNCTIONS = frozenset({
    "->", "->>", "abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "avg", "bm25", "ceil", "ceiling",
    "char", "coalesce", "concat", "concat_ws", "cos", "cosh", "count", "cume_dist", "date", "datetime", "degrees",
    "dense_rank", "exp", "first_value", "floor", "format", "glob", "group_concat", "hex", "highlight", "if", "ifnull",
    "iif", "instr", "json", "json_array", "json_array_length", "json_error_position", "json_extract",
    "json_group_array", "json_group_object", "json_insert", "json_object", "json_patch", "json_pretty", "json_quote",
    "json_remove", "json_replace", "json_set", "json_type", "json_valid", "julianday", "lag", "last_value", "lead",
    "length", "like", "likelihood", "likely", "ln", "log", "log10", "log2", "lower", "ltrim", "match", "matchinfo",
    "max", "median", "min", "mod", "nth_value", "ntile", "nullif", "octet_length", "offsets", "percent_rank",
    "percentile", "percentile_cont", "percentile_disc", "pi", "pow", "power", "printf", "quote", "radians", "rank",
    "regexp", "replace", "round", "row_number", "rtrim", "sign", "sin", "sinh", "snippet", "soundex", "sqrt",
    "strftime", "string_agg", "substr", "substring", "sum", "tan", "tanh", "time", "timediff", "total", "trim",
    "trunc", "typeof", "unhex", "unicode", "unixepoch", "unlikely", "upper", "zeroblob",
})  # fmt: skip
LONGEST_CELL = 200  # characters shown of a cell
LARGEST_VALUE = 1 << 20  # maximum bytes of a value
GRACE = 0.1  # seconds after which a query that did not end itself is killed


class Sqlite(Environment):
    """A tool `query`, which reads a database. All episodes of a worker share it. A query runs in a process of its own,
    which is killed when its time is up, and may call the functions of SQL that compute or search.

    Args:
        script: a file of SQL statements that create the database, in memory.
        file: a database; either this or `script`.
        rows: maximum number of result rows shown to the model.
        seconds: time limit of a query.
    """

    def __init__(
        self, script: str | None = None, file: str | None = None, rows: int = 20, seconds: float = 2.0
    ) -> None:
        named = "file" if script is None else "script"
        remedy = "name a file of SQL statements, or a database"
        require(
            (script is None) != (file is None), named, file, "must be given, or script: one of the two", remedy=remedy
        )
        require(rows >= 1, "rows", rows, "must be >= 1")
        require(seconds > 0, "seconds", seconds, "must be > 0")
        path = script or file or ""
        require(Path(path).is_file(), named, path, "does not exist")
        self.rows = rows
        self.seconds = seconds
        try:
            self.path = str(Path(path).resolve())
            self.script = script is not None
            self.database = open_database(self.path, self.script)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise FieldError(named, path, f"can't be read as a database: {error}", remedy=remedy) from error

    def query(self, sql: str) -> str:
        """Run a SELECT on the database. Its tables are in sqlite_master.

        Args:
            sql: one statement
        """
        deadline = time.monotonic() + self.seconds
        receive, send = os.pipe()
        pid = os.fork()
        if pid == 0:  # a call of one function, such as printf, can't be interrupted, but killed
            try:
                with open(send, "wb", buffering=0) as pipe:
                    pipe.write(json.dumps(self._answer(sql, deadline)).encode())
            finally:
                os._exit(0)
        os.close(send)
        data = b""
        ended = False
        try:
            while not ended and readable(receive, deadline + GRACE - time.monotonic()):
                part = os.read(receive, 1 << 16)
                data += part
                ended = not part
        finally:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(receive)
        if not ended:
            raise ValueError(f"the query was ended after {self.seconds:g} s")
        if not data:
            raise ValueError("the query ended its process")
        answer, problem = json.loads(data)
        if problem:
            raise ValueError(problem)
        return str(answer)

    def _answer(self, sql: str, deadline: float) -> tuple[str, str]:
        """The rows as text, and the problem with the query, one of the two empty; in a fork of the worker."""
        database = self.database
        if not self.script:  # a connection to a file must not be used in a fork
            database = opened(self.path, script=False)
        database.set_progress_handler(lambda: time.monotonic() > deadline, 10_000)
        try:
            cursor = database.execute(sql)
            names = [column[0] for column in cursor.description or ()]
            rows = cursor.fetchmany(self.rows + 1)
        except (sqlite3.Error, sqlite3.Warning, OverflowError, MemoryError, UnicodeError) as error:
            if isinstance(error, sqlite3.OperationalError) and time.monotonic() > deadline:
                return "", f"the query was ended after {self.seconds:g} s"
            return "", str(error) or type(error).__name__
        lines = [" | ".join(map(_shown, row)) for row in [names, *rows[: self.rows]]]
        if len(rows) > self.rows:
            lines.append("(more rows)")
        if not rows:
            lines.append("(no rows)")
        return "\n".join(lines), ""


def readable(file: int, seconds: float) -> bool:
    """Wait until a file can be read, or has ended; False if that takes longer."""
    ready, _, _ = select.select([file], [], [], max(0.0, seconds))
    return bool(ready)


def _shown(value: object) -> str:
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    text = "NULL" if value is None else str(value)
    if len(text) <= LONGEST_CELL:
        return text
    return text[:LONGEST_CELL] + "..."


@lru_cache(maxsize=8)
def open_database(path: str, script: bool) -> sqlite3.Connection:
    """Open a read-only connection, which all episodes of a worker share."""
    return opened(path, script)


def opened(path: str, script: bool) -> sqlite3.Connection:
    """Open a read-only connection."""
    if script:
        database = sqlite3.connect(":memory:", check_same_thread=False)
        database.executescript(Path(path).read_text(encoding="utf-8"))
    else:
        database = sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True, check_same_thread=False)
        database.execute("SELECT count(*) FROM sqlite_master")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
    database.text_factory = lambda data: data.decode(errors="replace")
    database.set_authorizer(_authorize)
    return database


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    function = action == sqlite3.SQLITE_FUNCTION and str(second).lower() in FUNCTIONS
    allowed = action in ALLOWED or function or (action == sqlite3.SQLITE_PRAGMA and first in PRAGMAS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


class Guess(Environment):
    """A game: find a whole number; the answer to a guess is "higher" or "lower".

    The reward is 1 for a correct first guess and falls by 1 / guesses with each further one; it is 0 if the number is
    not found. A message without a number counts as a guess. For a task of `seeds`: `reset` writes the prompt.

    Args:
        low, high: range of the number, both ends included.
        guesses: the game is lost after this many guesses.
    """

    def __init__(self, low: int = 1, high: int = 10, guesses: int = 6) -> None:
        require(low < high, "high", high, f"must be above low={low}")
        require(guesses >= 1, "guesses", guesses, "must be >= 1")
        self.low = low
        self.high = high
        self.guesses = guesses
        self.used = 0
        self.number = low
        self.left = (low, high)

    def reset(self, row: Mapping[str, Any], seed: int) -> Reply:
        self.number = self.low + mix(seed) % (self.high - self.low + 1)
        rules = f"Guess a number from {self.low} to {self.high}. I answer higher or lower."
        return Reply(content=rules, state=self._state())

    def respond(self, text: str) -> Reply:
        """Judge the last number in the message."""
        self.used += 1
        numbers = re.findall(r"(?<!\d)-?\d{1,18}(?!\d)", text)
        guess = int(numbers[-1]) if numbers else None
        if guess == self.number:
            return Reply(reward=1 - (self.used - 1) / self.guesses, done=True)
        if self.used == self.guesses:
            return Reply(done=True)
        if guess is None:
            return Reply(content=f"Write a number from {self.low} to {self.high}.", state=self._state())
        first, last = self.left
        if guess < self.number:
            self.left = (max(first, guess + 1), last)
            return Reply(content="higher", state=self._state())
        self.left = (first, min(last, guess - 1))
        return Reply(content="lower", state=self._state())

    def _state(self) -> str:
        first, last = self.left
        return f"{first}-{last}, {self.guesses - self.used} guesses left"
