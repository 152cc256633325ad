"""`python -m benchmarks.shared_paths`."""

from benchmarks.harness import command
from benchmarks.shared_paths.run import main

if __name__ == "__main__":
    command(main)
