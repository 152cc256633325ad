"""Python as a tool: code runs in a process with resource limits."""

from proxima.data import require
from proxima.environment.protocol import Environment
from proxima.process.code_runner import run_program


class PythonCode(Environment):
    """A tool `python`, which runs a program. Each call runs in a new process without state from earlier calls; it
    may not use the network or files outside its folder. Not a sandbox against hostile code (`process.limits`).

    Args:
        seconds: limit of a call's wall-clock time and of its CPU time.
        memory_mb: MiB of address space.
        characters: maximum length of the output shown to the model; the middle of a longer one is left out.
    """

    def __init__(self, seconds: int = 5, memory_mb: int = 512, characters: int = 2000) -> None:
        require(seconds >= 1, "seconds", seconds, "must be >= 1")
        require(memory_mb >= 64, "memory_mb", memory_mb, "must be >= 64: Python itself needs that")
        require(characters >= 40, "characters", characters, "must be >= 40")
        self.seconds, self.memory_mb, self.characters = seconds, memory_mb, characters

    def python(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: the program; it prints what you want to know
        """
        ended, printed = run_program(code, (self.seconds, self.memory_mb), self.seconds, errors=True)
        printed = printed.strip()
        if len(printed) > self.characters:
            printed = f"{printed[: self.characters // 2]}\n...\n{printed[-self.characters // 2 :]}"
        if ended is None:
            printed += f"\nerror: timed out after {self.seconds} s"
        elif ended < 0:
            printed += f"\nerror: a signal ended it ({-ended})"
        return printed.strip() or "(it printed nothing)"
