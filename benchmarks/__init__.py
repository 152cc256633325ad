"""Benchmarks: one folder per claim about speed or learning, each with a command that measures it against a peer.

    python -m benchmarks                              all of them, one after the other
    python -m benchmarks.decode_vs_hf --repeats 5     one

A folder contains README.md (the claim, what is equal and what is not), run.py, peer.lock if a peer needs its own
environment (created automatically below .cache/), and results/ (the JSON of runs, with machine and versions). Each side
runs in its own process; sides alternate and idle until their turn. Figures are medians [min-max]. Nothing else should
run meanwhile: the load at the start is part of the result.
To add a claim, create a folder with these files, a line in CLAIMS of __main__.py, and a tiny run of it in
tests/benchmarks/test_tiny.py.
"""
