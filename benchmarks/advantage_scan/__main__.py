"""`python -m benchmarks.advantage_scan`."""

from benchmarks.advantage_scan.run import main
from benchmarks.harness import command

if __name__ == "__main__":
    command(main)
