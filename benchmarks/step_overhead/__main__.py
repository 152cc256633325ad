"""`python -m benchmarks.step_overhead`."""

from benchmarks.harness import command
from benchmarks.step_overhead.run import main

if __name__ == "__main__":
    command(main)
