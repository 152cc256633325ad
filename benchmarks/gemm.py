"""Measure the physical limit as a separate side, so that it alternates with the others."""

from benchmarks.harness import gemm_rate
from benchmarks.side import Channel, argument, serve

if __name__ == "__main__":
    channel, settings = Channel(), argument()
    serve(lambda: {"flops": gemm_rate(settings["threads"], settings["dtype"])}, channel, ready=True)
