"""`python -m benchmarks.layouts`."""

from benchmarks.harness import command
from benchmarks.layouts.run import main

if __name__ == "__main__":
    command(main)
