"""`python -m benchmarks.replica_faults`."""

from benchmarks.harness import command
from benchmarks.replica_faults.run import main

if __name__ == "__main__":
    command(main)
