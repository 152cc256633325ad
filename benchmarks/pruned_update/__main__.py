"""`python -m benchmarks.pruned_update`."""

from benchmarks.harness import command
from benchmarks.pruned_update.run import main

if __name__ == "__main__":
    command(main)
