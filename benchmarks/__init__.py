"""Claims about speed and learning, each a folder with the command that measures it, side by side with the peer it
names.

    python -m benchmarks                              all of them, one after the other
    python -m benchmarks.decode_vs_hf --repeats 5     one

A folder holds README.md (the claim, what is equal and what is not), run.py, peer.lock where a peer needs an environment
(made by itself, below .cache/), and results/ (the JSON of runs, with machine and versions). Sides run in processes of
their own, alternate, and wait idle for their turn; figures are medians [min-max]. Nothing else should run meanwhile:
the load at the start is part of the result.
To add one: a folder with these files, a line in CLAIMS of __main__.py, and its tiny repeat in
tests/benchmarks/test_tiny.py.
"""
