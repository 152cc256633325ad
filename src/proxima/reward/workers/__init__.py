"""Worker processes that can be killed, and threads that can be abandoned.

    pool      queues jobs and gives each a deadline; `worker_calls` makes a reward's calls of them
    threads   daemon threads for trusted Python, and a reward's calls in them
    graders   the functions that the workers run

Imports: stdlib, `proxima.data`, `proxima.process`; `graders` only the stdlib, so that a worker starts
without torch. Imported by `proxima.reward`. To add a grader: a function in `graders.py` and its line in `JOBS`.
"""
