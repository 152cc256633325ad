"""`python -m benchmarks.sandbox`."""

from benchmarks.harness import command
from benchmarks.sandbox.run import main

if __name__ == "__main__":
    command(main)
