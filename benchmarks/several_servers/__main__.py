"""`python -m benchmarks.several_servers`."""

from benchmarks.harness import command
from benchmarks.several_servers.run import main

if __name__ == "__main__":
    command(main)
