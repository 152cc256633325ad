"""`python -m benchmarks.sync`."""

from benchmarks.harness import command
from benchmarks.sync.run import main

if __name__ == "__main__":
    command(main)
