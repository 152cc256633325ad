"""The API for Python and notebooks: `proxima.train`, `proxima.evaluate`, `proxima.load_run`. They do what the commands
do, with exceptions in place of exit codes.

    training       a run, and its checked config      evaluation      figures of a model on held-out questions
    saved          a folder read back, as DataFrames          python_values   classes, specs and functions in recipes
    local_answers  answers and a chat on the local engine     episode_chat    the same with an environment or tools
    metrics_frame  the table of metrics                       run_start       resolves and checks a run's config
The functions block. They may be called inside a running event loop, as in Jupyter, because a run's event loop has its
own thread. `cli` is built on this room.
Imports: every room but `cli`; pandas when a table is requested. Imported by `cli`, and by name in `proxima`.
To add a function: in a module here, its name in `__all__` here and in `proxima/__init__.py`, and docs/python.md.
"""

import os

from proxima.system.openmp import limit_spinning
from proxima.system.proxies import exempt_this_machine

limit_spinning()  # now: libgomp reads it when a function below loads torch
os.environ |= exempt_this_machine()  # and the programs that a run starts, when they do
