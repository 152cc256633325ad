"""Simulated runs: the real `Controller` and collectors on virtual time, with parts that only take time.

    distributions.py   lengths and latencies, drawn by counters
    times.py           what takes how long: a file, the command line, a fit
    fit.py             the same from a finished run
    timed_replica.py   continuous batching, pauses and new weights
    timed_engine.py    one or many of them, and which gets which prompt
    timed_parts.py     prompts, rewards, selection, trainer
    simulated_run.py   one run; its speed, idle shares and lag, as those of a real run
    grid.py            runs for many lags and concurrent prompts
    planned_times.py   what takes how long on devices, by `lab.plan`
    scale.py           runs on more and more devices, and what binds them

Admission, order and lag are those of `rollout` and `runtime`: nothing here decides any of them.
To add a distribution: a frozen dataclass with `draw`, and a line in `DISTRIBUTIONS`. To add a duration: a field of
`Times`, where it is spent, and how `fit` finds it.
"""
