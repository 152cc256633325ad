"""The sandbox of rewards that run code, by their field `sandbox`."""

from pathlib import Path

from proxima.data import as_field_errors
from proxima.process.sandbox import (
    WORKERS_MEMORY_MB,
    Sandbox,
    SandboxMissing,
    python_sources,
    require_known,
    usable_kind,
)

PROCESSES = 1024  # and threads, of all workers of a pool


def function_sandbox(choice: str, file: Path | None) -> Sandbox | None:
    """The sandbox of workers that load a function from this file; None: no sandbox. FieldError if it can't be used."""
    if choice == "none":
        return None
    kind = sandbox_kind(choice)
    readable = python_sources(file) if file is not None else ()
    if kind == "none":
        return None
    return Sandbox(kind=kind, readable=tuple(readable), processes=PROCESSES, memory_mb=WORKERS_MEMORY_MB)


def require_choice(choice: str) -> None:
    """Raise FieldError unless a choice is known here."""
    with as_field_errors(SandboxMissing):
        require_known(choice)


def sandbox_kind(choice: str) -> str:
    """The kind of sandbox for a choice such as `auto`; FieldError if it can't be used."""
    with as_field_errors(SandboxMissing):
        return usable_kind(choice)
