"""`python -m benchmarks.rank_memory`."""

from benchmarks.harness import command
from benchmarks.rank_memory.run import main

if __name__ == "__main__":
    command(main)
