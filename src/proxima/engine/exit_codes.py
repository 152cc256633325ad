"""Descriptions of exit codes."""

import signal


def describe_exit(code: int | None) -> str:
    """Describe how a process ended, given its exit code; -N is signal N."""
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"{name}, which the kernel sends when memory runs out" if -code == signal.SIGKILL else name
