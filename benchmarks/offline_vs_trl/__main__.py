"""`python -m benchmarks.offline_vs_trl`."""

from benchmarks.harness import command
from benchmarks.offline_vs_trl.run import main

if __name__ == "__main__":
    command(main)
