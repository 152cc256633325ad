"""`python -m benchmarks.view`."""

from benchmarks.harness import command
from benchmarks.view.run import main

if __name__ == "__main__":
    command(main)
