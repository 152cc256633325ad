"""`python -m benchmarks.served_clients`."""

from benchmarks.harness import command
from benchmarks.served_clients.run import main

if __name__ == "__main__":
    command(main)
