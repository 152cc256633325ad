"""`python -m benchmarks.simulate_vs_run`."""

from benchmarks.harness import command
from benchmarks.simulate_vs_run.run import main

if __name__ == "__main__":
    command(main)
