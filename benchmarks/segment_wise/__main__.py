"""`python -m benchmarks.segment_wise`."""

from benchmarks.harness import command
from benchmarks.segment_wise.run import main

if __name__ == "__main__":
    command(main)
