"""`python -m benchmarks.shared_prompt`."""

from benchmarks.harness import command
from benchmarks.shared_prompt.run import main

if __name__ == "__main__":
    command(main)
