"""`python -m benchmarks.speculation`."""

from benchmarks.harness import command
from benchmarks.speculation.run import main

if __name__ == "__main__":
    command(main)
