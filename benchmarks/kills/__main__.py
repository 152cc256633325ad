"""`python -m benchmarks.kills`."""

from benchmarks.harness import command
from benchmarks.kills.run import main

if __name__ == "__main__":
    command(main)
