"""The sandbox of rewards that run code, as their field `sandbox` asks for it."""

from pathlib import Path

from proxima.data import FieldError
from proxima.process.sandbox import CHOICES, Sandbox, SandboxMissing, python_sources, usable_kind

PROCESSES = 1024  # and threads, of all workers of a pool


def function_sandbox(choice: str, file: Path | None) -> Sandbox | None:
    """The sandbox of workers that load a function from this file, for a choice; None: they run in none."""
    if choice == "none":
        return None
    kind, readable = sandbox_kind(choice), python_sources(file) if file is not None else ()
    return None if kind == "none" else Sandbox(kind=kind, readable=tuple(readable), processes=PROCESSES)


def sandbox_kind(choice: str) -> str:
    """The kind of sandbox that runs code, for a choice; FieldError if it can't be used."""
    if choice not in CHOICES:
        raise FieldError("sandbox", choice, f"must be one of {', '.join(CHOICES)}")
    try:
        return usable_kind(choice)
    except SandboxMissing as error:
        raise FieldError("sandbox", choice, f"can't be used: {error}", remedy=error.remedy) from None
