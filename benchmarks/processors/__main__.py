"""`python -m benchmarks.processors`."""

from benchmarks.harness import command
from benchmarks.processors.run import main

if __name__ == "__main__":
    command(main)
