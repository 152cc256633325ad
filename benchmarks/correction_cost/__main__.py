"""`python -m benchmarks.correction_cost`."""

from benchmarks.correction_cost.run import main
from benchmarks.harness import command

if __name__ == "__main__":
    command(main)
