"""`python -m benchmarks.async_vs_sync`."""

from benchmarks.async_vs_sync.run import main
from benchmarks.harness import command

if __name__ == "__main__":
    command(main)
