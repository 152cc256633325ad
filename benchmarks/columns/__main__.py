"""`python -m benchmarks.columns`."""

from benchmarks.columns.run import main
from benchmarks.harness import command

if __name__ == "__main__":
    command(main)
