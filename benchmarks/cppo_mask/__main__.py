"""`python -m benchmarks.cppo_mask`."""

from benchmarks.cppo_mask.run import main
from benchmarks.harness import command

if __name__ == "__main__":
    command(main)
