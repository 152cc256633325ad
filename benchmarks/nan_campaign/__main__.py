"""`python -m benchmarks.nan_campaign`."""

from benchmarks.harness import command
from benchmarks.nan_campaign.run import main

if __name__ == "__main__":
    command(main)
