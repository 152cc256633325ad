"""The physical limit as a side of its own, so that it is measured between the others and not on another day."""

from benchmarks.harness import gemm_rate
from benchmarks.side import Channel, argument, serve

if __name__ == "__main__":
    channel, settings = Channel(), argument()
    serve(lambda: {"flops": gemm_rate(settings["threads"], settings["dtype"])}, channel, ready=True)
