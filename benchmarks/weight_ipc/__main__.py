"""`python -m benchmarks.weight_ipc`."""

from benchmarks.harness import command
from benchmarks.weight_ipc.run import main

if __name__ == "__main__":
    command(main)
