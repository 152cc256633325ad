"""The sandbox in which the workers run a user's own environments and tools, and built-in ones."""

from pathlib import Path

from proxima.data import UserError, require
from proxima.environment.interface import EnvironmentSpec
from proxima.process.sandbox import (
    WORKERS_MEMORY_MB,
    Sandbox,
    SandboxMissing,
    fallback_note,
    python_sources,
    usable_kind,
)
from proxima.system.user_modules import user_module_file

SANDBOXED = ("calculator", "guess", "search", "sqlite")  # built-in kinds that run in a sandbox as they are
FILES = ("corpus", "file", "script")  # their arguments that name a file, which the sandbox shows
PROCESSES = 1024  # and threads, of all workers


class HostSandbox:
    """The sandbox in which workers load an environment and tools, and lines for the user at the start of a run.

    Args:
        memory_mb: MiB that all workers may need; 0: any.
    Raises: UserError: it can't be used, or the environment is one that needs more than a sandbox shows.
    """

    def __init__(self, choice: str, spec: EnvironmentSpec, memory_mb: int) -> None:
        own = [name for name in (spec.kind, *spec.tools) if name is not None and ":" in name]
        other = spec.kind is not None and ":" not in spec.kind and spec.kind not in SANDBOXED
        reason = "can't run in episode.sandbox, which is for classes of your own and built-in tools"
        remedy = "python has a field `sandbox` of its own; set episode.sandbox=none"
        require(not other, "environment", spec.kind, reason, remedy=remedy)
        try:
            kind = usable_kind(choice)
        except SandboxMissing as error:  # no field error: the task's path would be put before it
            raise UserError(f"episode.sandbox={choice!r} {error}", remedy=error.remedy) from None
        readable: dict[str, None] = {}  # each once, in order
        for name in own:
            file = user_module_file(name.partition(":")[0])
            if file is not None:
                readable |= dict.fromkeys(python_sources(file))
        if spec.kind in SANDBOXED:
            for argument in FILES:
                given = spec.arguments.get(argument)
                if isinstance(given, str) and Path(given).is_file():
                    readable[str(Path(given).resolve())] = None
        if memory_mb:
            memory_mb += WORKERS_MEMORY_MB
        self.sandbox: Sandbox | None = None
        if kind != "none":
            self.sandbox = Sandbox(kind=kind, readable=tuple(readable), processes=PROCESSES, memory_mb=memory_mb)
        note = fallback_note(choice)
        self.notes = (note,) if note else ()
