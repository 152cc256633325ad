"""Worker processes that can be killed: a pool, the script its workers run, the graders they know, and daemon threads.

Imports: stdlib, `proxima.data`; `process.py` and `graders.py` the standard library alone, so that a worker
starts without torch. Imported by `proxima.reward`.
To add a grader: a function in `graders.py` and its line in `GRADERS`.
"""
