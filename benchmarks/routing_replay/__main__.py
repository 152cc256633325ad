"""`python -m benchmarks.routing_replay`."""

from benchmarks.harness import command
from benchmarks.routing_replay.run import main

if __name__ == "__main__":
    command(main)
