"""`python -m benchmarks.where`."""

from benchmarks.harness import command
from benchmarks.where.run import main

if __name__ == "__main__":
    command(main)
