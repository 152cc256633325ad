"""`python -m benchmarks.seeds`."""

from benchmarks.seeds.run import main
from benchmarks.harness import command

if __name__ == "__main__":
    command(main)
