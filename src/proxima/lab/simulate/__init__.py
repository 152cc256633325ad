"""Simulated runs: the real `Controller` and collectors on virtual time, with parts that only take time.

    distributions.py   lengths and latencies, drawn by counters
    times.py           durations from a file, the command line or a fit
    fit.py             durations fitted to a finished run
    timed_replica.py   continuous batching, pauses and new weights
    timed_engine.py    one or many replicas, and the routing of prompts to them
    timed_parts.py     prompts, rewards, selection, trainer
    simulated_run.py   one run, with speed, idle shares and lag as in a real run
    grid.py            runs for many lags and concurrent prompts
    planned_times.py   durations on given devices, by `lab.plan`
    scale.py           runs on more and more devices, and their bottlenecks

Admission, order and lag are decided by `rollout` and `runtime`, never here.
To add a distribution: a frozen dataclass with `draw`, and a line in `DISTRIBUTIONS`. To add a duration: a field of
`Times`, the code that spends it, and its fit in `fit`.
"""
