"""`python -m benchmarks.seeds`."""

from benchmarks.harness import command
from benchmarks.seeds.run import main

if __name__ == "__main__":
    command(main)
