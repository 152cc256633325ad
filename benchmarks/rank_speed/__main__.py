"""`python -m benchmarks.rank_speed`."""

from benchmarks.harness import command
from benchmarks.rank_speed.run import main

if __name__ == "__main__":
    command(main)
