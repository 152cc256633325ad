"""`python -m benchmarks.host_memory`."""

from benchmarks.harness import command
from benchmarks.host_memory.run import main

if __name__ == "__main__":
    command(main)
