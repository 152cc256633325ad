"""`python -m benchmarks.kernels`."""

from benchmarks.harness import command
from benchmarks.kernels.run import main

if __name__ == "__main__":
    command(main)
