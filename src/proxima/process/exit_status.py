"""How a process ended, by its exit code. Standard library only."""

import signal


def describe_exit(code: int, said: str = "") -> str:
    """Describe how a process ended, given its exit code, where -N is signal N, and what it said last."""
    if code >= 0:
        how = f"exit code {code}"
    else:
        how = signal_name(-code)
    if code == -signal.SIGKILL:
        how += ", which the kernel sends when memory runs out"
    return f"{how}: {said}" if said else how


def of_program(code: int) -> int:
    """The exit code of a program, -N after signal N, given that of the command which ran it, 128 + N. A program that
    itself ends with a code above 128, as 255, is not taken for a killed one where that is no signal."""
    if code - 128 in signal.valid_signals():
        return 128 - code
    return code


def signal_name(number: int) -> str:
    """The name of a signal; most of the real-time ones have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
