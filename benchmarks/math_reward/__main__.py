"""`python -m benchmarks.math_reward`."""

from benchmarks.harness import command
from benchmarks.math_reward.run import main

if __name__ == "__main__":
    command(main)
