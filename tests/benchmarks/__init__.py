"""Tiny repeats of the benchmarks."""
