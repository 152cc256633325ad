"""`python -m benchmarks.step_vs_trl`."""

from benchmarks.step_vs_trl.run import main
from benchmarks.harness import command

if __name__ == "__main__":
    command(main)
