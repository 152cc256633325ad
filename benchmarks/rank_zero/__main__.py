"""`python -m benchmarks.rank_zero`."""

from benchmarks.harness import command
from benchmarks.rank_zero.run import main

if __name__ == "__main__":
    command(main)
