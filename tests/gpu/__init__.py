"""What a GPU computes, against the same on a CPU. `python -m benchmarks.gpu` runs it."""
