"""`python -m benchmarks.early_stop`."""

from benchmarks.early_stop.run import main
from benchmarks.harness import command

if __name__ == "__main__":
    command(main)
