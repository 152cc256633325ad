"""An environment of another library, in an interpreter that has the library: what it is, and its own rows."""

import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

from proxima.data import FieldError
from proxima.data.json_reader import json_type
from proxima.process.program import LONGEST_REASON, Program, ProgramFailed
from proxima.system import foreign_folder

FILES = str(foreign_folder.__file__)  # `foreign_runner` loads it, too
LOAD_SECONDS = 1800.0  # to load an environment and its data, which may have to be downloaded


@dataclass(frozen=True)
class ForeignEnvironment:
    """An environment, and the interpreter that has it.

    Args:
        kind: `verifiers` or `nemo_gym`.
        name: of the environment.
        args: its arguments, as JSON.
        python: the interpreter; empty: this one.
    """

    kind: str
    name: str
    args: str = "{}"
    python: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "ForeignEnvironment":
        """Build it from the fields of a recipe."""
        python = given.get("python") or ""
        if python:
            python = str(Path(python).expanduser())
        args = json.dumps(dict(given.get("args") or {}))
        return cls(given["kind"], given.get("name") or "", args, python)

    def command(self, command: str, **more: Any) -> tuple[str, ...]:
        """The program that runs a command for it."""
        script = Path(__file__).with_name("foreign_runner.py")
        given = {"kind": self.kind, "name": self.name, "args": json.loads(self.args), "files": FILES, **more}
        return self.python or sys.executable, str(script), json.dumps(given), command

    def facts(self) -> Mapping[str, Any]:
        """Load it in its interpreter, and describe it: `python`, `version` of the library, `sources`, the SHA-256 of
        each of its files, `rewards`, the names of its reward functions as far as they are known, and `seats`, those
        of the agents that the policy plays, where they have names.

        Raises: FieldError.
        """
        return _answered(self)[0]

    def inputs(self) -> Mapping[str, str]:
        """What a resume compares: the Python files of the environment's package, and the version of the library."""
        facts = self.facts()
        files = {f"{self.name}: {file}": value for file, value in facts["sources"].items()}
        return {**files, self.kind: facts["version"]}

    def rows(self, split: str, skip: int, size: int | None) -> tuple[Mapping[str, Any], ...]:
        """Read its own rows, each with `messages`, `answer` and `environment_row`.

        Raises: FieldError.
        """
        return _answered(self, split, skip, size)[1]


@lru_cache(maxsize=32)
def _answered(
    environment: ForeignEnvironment, split: str | None = None, skip: int = 0, size: int | None = None
) -> tuple[Mapping[str, Any], tuple[Mapping[str, Any], ...]]:
    """The facts and the rows; loading takes seconds, and a run asks several times."""
    if split is None:
        command = environment.command("describe")
    else:
        command = environment.command("rows", split=split, skip=skip, size=size)
    try:
        program = Program(command, name="its process", guarded=True)
    except ProgramFailed:
        raise FieldError("python", environment.python, "can't be started as a Python interpreter") from None
    facts: dict[str, Any] = {}
    rows: list[Mapping[str, Any]] = []
    started = monotonic()
    limit = threading.Timer(LOAD_SECONDS, program.kill)
    limit.daemon = True
    limit.start()
    try:
        while True:
            message = program.read()
            if "problem" in message:
                raise _problem(message["problem"])
            if "end" in message:
                return _described(facts), tuple(rows)
            facts |= _object(message.get("facts", {}))
            if "row" in message:
                rows.append(_row(message["row"]))
            if size is not None and len(rows) > size:
                raise ProgramFailed(f"it wrote more than the {size} rows that were asked for")
    except ProgramFailed as error:
        if not facts:
            raise FieldError("python", environment.python, f"is not a Python interpreter: {error}") from None
        reason = str(error)
        if monotonic() - started >= LOAD_SECONDS:
            reason = f"its process took longer than {LOAD_SECONDS:g} s"
        raise FieldError("name", environment.name, f"can't be loaded: {reason}") from None
    finally:
        limit.cancel()
        program.kill()


# ---- what the process writes: it runs code of others -----------------------------------------------------------------


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProgramFailed(f"it wrote {json_type(value)} where an object was asked for")
    return value


def _problem(given: Any) -> FieldError:
    """The error that it reports: a field, its value, and what is wrong."""
    match given:
        case [str(field), value, str(text)]:
            return FieldError(field, value, " ".join(text.split())[:LONGEST_REASON])
    raise ProgramFailed("it wrote a problem without a field, a value and a text")


def _described(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts, with all that `ForeignEnvironment.facts` promises."""
    texts = ("python", "version")
    lists = ("rewards", "seats")
    described = {"version": "", "sources": {}, "rewards": [], "seats": []} | facts
    of_lists = all(isinstance(described[name], list) and all(map(_is_text, described[name])) for name in lists)
    sources = _object(described["sources"])
    if not of_lists or not all(map(_is_text, [*(described.get(name) for name in texts), *sources.values()])):
        raise ProgramFailed("it wrote facts of other types than those of an environment")
    return described


def _row(given: Any) -> dict[str, Any]:
    row = _object(given)
    messages = row.get("messages")
    if "answer" not in row or not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ProgramFailed("it wrote a row without a list of messages and an answer")
    return row


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
