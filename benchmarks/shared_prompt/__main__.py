"""`python -m benchmarks.shared_prompt`."""

from benchmarks.shared_prompt.run import main
from benchmarks.harness import command

if __name__ == "__main__":
    command(main)
