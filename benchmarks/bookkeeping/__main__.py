"""`python -m benchmarks.bookkeeping`."""

from benchmarks.bookkeeping.run import main
from benchmarks.harness import command

if __name__ == "__main__":
    command(main)
