"""`python -m benchmarks.decode_vs_hf`."""

from benchmarks.decode_vs_hf.run import main
from benchmarks.harness import command

if __name__ == "__main__":
    command(main)
