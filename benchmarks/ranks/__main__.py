"""`python -m benchmarks.ranks`."""

from benchmarks.harness import command
from benchmarks.ranks.run import main

if __name__ == "__main__":
    command(main)
