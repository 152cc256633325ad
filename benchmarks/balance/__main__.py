"""`python -m benchmarks.balance`."""

from benchmarks.balance.run import main
from benchmarks.harness import command

if __name__ == "__main__":
    command(main)
