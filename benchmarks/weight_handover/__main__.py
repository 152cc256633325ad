"""`python -m benchmarks.weight_handover`."""

from benchmarks.harness import command
from benchmarks.weight_handover.run import main

if __name__ == "__main__":
    command(main)
