"""`python -m benchmarks.plan`."""

from benchmarks.harness import command
from benchmarks.plan.run import main

if __name__ == "__main__":
    command(main)
