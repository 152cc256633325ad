"""`python -m benchmarks.startup`."""

from benchmarks.harness import command
from benchmarks.startup.run import main

if __name__ == "__main__":
    command(main)
