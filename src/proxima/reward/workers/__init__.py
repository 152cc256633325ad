"""Worker processes that can be killed.

    pool             queues jobs and gives each a deadline
    graders          the functions that the workers run, by name: formulas, patterns, reasoning_gym
    user_function    those that call a user's function          run_unit_tests   the tests of a row against code
    names_of_tests   which names tests use are the code's, and which their own

Imports: stdlib, numpy, `proxima.data`, `proxima.process`; `graders` no more, so that a worker starts without torch.
Imported by `proxima.reward`. To add a grader: a function in `graders.py` and its line in `JOBS`.
"""
