"""`python -m benchmarks.vllm_throughput`."""

from benchmarks.harness import command
from benchmarks.vllm_throughput.run import main

if __name__ == "__main__":
    command(main)
