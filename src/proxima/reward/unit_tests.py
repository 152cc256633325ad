"""Runs the code in a completion against the unit tests of its row."""

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from proxima.data import require
from proxima.data.flow import Completion, Prompt, Score, prompt_name
from proxima.data.json_reader import load_json
from proxima.process.sandbox import auto_sandbox, brought_kinds, fallback_note
from proxima.reward.base import Job, PooledReward, missing_answer, required_answer
from proxima.reward.sandboxed import require_choice, sandbox_kind
from proxima.reward.workers.names_of_tests import asserts, only_defines

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class UnitTests(PooledReward):
    """1 if the completion's code passes all unit tests of the row, else 0. The tests are the row's answer.

        ["assert add(1, 2) == 3", …]                                  assertions, as `test_list` of MBPP
        "def check(candidate): …", with `entry_point`                 a program of assertions, as `test` of HumanEval
        {"inputs": ["1 2\\n", …], "outputs": ["3\\n", …]}             standard input and output, as APPS and TACO
        {"fn_name": "add", "inputs": [[1, 2], …], "outputs": [3, …]}  calls of a function, as APPS and TACO

    A list or an object may be JSON text. The code is the last block fenced as `python`, `python3` or `py`, else the
    last fenced block, else the whole text. It runs in a separate Python process that does not contain the tests: they
    call its functions from another process and get plain data back. Overriding `assert`, builtins or `__eq__`, raising
    StopIteration, exiting the process, or printing anything thus passes no test. Tests have their own names: modules
    that they use are imported for them, and with `entry_point` the code gives that function alone.

    Args:
        partial: the value is the share of the tests that pass.
        setup: column with code that runs before the tests and before the completion's, as `test_setup_code` of
            MBPP, text or a list of lines; null: none.
        entry_point: column with the name of the function passed to `check`; null: the tests call it by its name.
        seconds: wall-clock time for all tests of a completion, > 0; `runtime.reward_timeout` does not apply.
        memory_mb: MiB of address space for the code, >= 64.
        sandbox: where the code runs: `bubblewrap`, in namespaces with no network, other processes or files except the
            interpreter's; `none`, under limits that contain only accidents; `auto`: bubblewrap if it works, else none,
            with a note at the start of the run; or a kind that another package brings.
    Returns: Score of 1 or 0, or of the share; `correct` if all pass. Parts: `passed`, the share; `runs`, 1 if the code
        could be loaded; `timed_out`.
    Raises: ValueError if the tests can't be run with any code: they are not Python, need a package that is missing, or
        pass an object that is not plain data to the code. FieldError before the run if the sandbox can't be used.
    Edge cases: code that raises, exits, hangs or exceeds a limit is wrong: 0, never invalid. Output is compared by
        lines without trailing white space. Lists, dicts and sets that the code changes in place are changed for the
        tests too. Plain data are None, bools, numbers, text, bytes, the containers of Python and of `collections` with
        such data, named tuples, Fraction, Decimal, dates and times, and arrays of numpy; other objects are stand-ins
        whose methods can be called, equal only to themselves.
    The code may not start processes or threads, and has `memory_mb`, `seconds`, 64 open files and 64 MiB of disk.
    """

    partial: bool = False
    setup: str | None = None
    entry_point: str | None = None
    seconds: float = 6.0
    memory_mb: int = 1024
    sandbox: str = "auto"

    kind = "unit_tests"
    where = "function"
    warm_up = "proxima.reward.workers.run_unit_tests"
    needs_answer = True
    reads_lists = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.seconds < 1e6, "seconds", self.seconds, "must be > 0 seconds")
        require(self.memory_mb >= 64, "memory_mb", self.memory_mb, "must be >= 64 MiB")
        require_choice(self.sandbox)

    @property
    def code_servers(self) -> Mapping[str, int]:
        if self.sandbox in brought_kinds():
            return {self.sandbox: self.memory_mb}
        return {}

    def auto_outcome(self, field: str) -> tuple[str, str] | None:
        """See `proxima.config.outcomes`."""
        return auto_sandbox() if field == "sandbox" else None

    def check(self) -> None:
        sandbox_kind(self.sandbox)

    def notes(self) -> list[str]:
        note = fallback_note(self.sandbox)
        return [note] if note else []

    def answer_job(self, answer: object) -> Job | str | None:
        try:
            as_tests(answer, self.entry_point)
        except ValueError as error:
            return missing_answer(answer) or str(error)
        return None

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        tests = as_tests(required_answer(prompt, self.kind), self.entry_point)
        entry_point = None if self.entry_point is None else _column(prompt, self.entry_point)
        setup = "" if self.setup is None else _column(prompt, self.setup)
        code = code_of(completion.text)
        if not code.strip():
            return self.parse_result(prompt, {"passed": 0.0, "runs": 0.0, "timed_out": 0.0})
        arguments: dict[str, Any] = {
            "code": code,
            "tests": tests,
            "setup": setup,
            "entry_point": entry_point,
            "seconds": self.seconds,
            "memory_mb": self.memory_mb,
            "sandbox": sandbox_kind(self.sandbox),
        }
        return Job(grader=self.kind, arguments=arguments, seconds=self.seconds + 30)  # the grader has its own limit

    def parse_result(self, prompt: Prompt, result: Mapping[str, Any]) -> Score:
        parts = {name: float(result[name]) for name in ("passed", "runs", "timed_out")}
        correct = parts["passed"] == 1
        value = parts["passed"] if self.partial else float(correct)
        return Score(value=value, correct=correct, parts=parts)


def code_of(text: str) -> str:
    """The last block fenced as Python, else the last fenced block, else the whole text. An unclosed block extends to
    the end of the text."""
    blocks = [(match[1].lower(), match[2]) for match in _FENCE.finditer(text)]
    python = [code for language, code in blocks if language in ("python", "python3", "py")]
    return (python or [code for _, code in blocks] or [text])[-1]


def _column(prompt: Prompt, name: str) -> str:
    value = prompt.metadata.get(name, "")
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if name not in prompt.metadata or not isinstance(value, str | None):
        columns = ", ".join(prompt.metadata)
        raise ValueError(f"{prompt_name(prompt.uid)} has no text in the column {name!r}; columns: {columns}")
    return value or ""


NAMED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.alias  # nodes that bind a name


def as_tests(answer: object, entry_point: str | None) -> dict[str, Any]:
    """The row's tests in the form that `run_unit_tests` takes; ValueError, with the reason, if they are not tests."""
    tests = answer
    if isinstance(answer, str) and answer.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):  # else it is a program
            tests = load_json(answer)
    if isinstance(tests, Mapping):
        return _pairs(tests)
    sources = [tests] if isinstance(tests, str) else tests
    if not isinstance(sources, list) or not sources or not all(isinstance(source, str) for source in sources):
        raise ValueError("is not a list of assertions, a program, or an object with inputs and outputs")
    try:
        nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    except (MemoryError, RecursionError, SyntaxError, ValueError) as error:
        raise ValueError(f"is not Python: {error}") from None
    if not any(map(asserts, nodes)):
        raise ValueError("asserts nothing")
    if entry_point is not None and not any(isinstance(node, NAMED) and node.name == "check" for node in nodes):
        raise ValueError("defines no function check(candidate), which entry_point asks for")
    if entry_point is None and all(map(only_defines, sources)):
        raise ValueError("asserts nothing: it only defines functions; entry_point names the one to pass to check")
    return {"assertions": sources}


def _pairs(tests: Mapping[str, Any]) -> dict[str, Any]:
    inputs = tests.get("inputs")
    outputs = tests.get("outputs")
    name = tests.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise ValueError("has no lists of inputs and outputs, one of each for every test")
    if name is not None:
        if not all(isinstance(arguments, list) for arguments in inputs):
            raise ValueError("has inputs that are not lists of arguments")
        return {"calls": {"name": str(name), "inputs": inputs, "outputs": outputs}}
    programs = [[_lines(text) for text in pair] for pair in zip(inputs, outputs, strict=True)]
    if not all(isinstance(text, str) for pair in programs for text in pair):
        raise ValueError("has inputs or outputs that are not texts")
    return {"programs": programs}


def _lines(value: Any) -> Any:
    """Join a list of lines into one text; return anything else unchanged."""
    lines = isinstance(value, list) and all(isinstance(line, str) for line in value)
    if lines:
        return "\n".join(line.removesuffix("\n") for line in value)
    return value
