"""`python -m benchmarks.busy_machine`."""

from benchmarks.busy_machine.run import main
from benchmarks.harness import command

if __name__ == "__main__":
    command(main)
