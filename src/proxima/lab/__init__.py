"""The laboratory: many runs begun as one (`sweep`), read back (`read_run`), and held against each other (`aggregate`).

    sweep_file.py  a sweep file → cells                           run.py
    a run folder → config, records, curves by any axis
    plan.py        cells × seeds → checked runs
    aggregate.py   runs → cells, means over seeds, paired differences
    sweep.py       runs them in processes of their own            statistics.py  Student's interval
    tail.py        metrics.jsonl as it grows
In a notebook:

    from proxima.lab import aggregate, find_runs, read_run
    comparison = aggregate([read_run(folder) for folder in find_runs(["runs/trust_regions"])], target=0.9)

Imports: `config`, `runtime` (folder, records, environment, files). Imported by `view` and `cli`; `runtime` never
imports this room.
To add a field of a sweep file: a name in `FIELDS` of `sweep_file.py`, and a method of `_Reader` that says what is wrong
with it.
To add an axis: a line in `AXES` of `run.py`. To add a number to the final table: a line in `MEASURES` of
`aggregate.py`, a field of `Row`.
"""

from proxima.lab.aggregate import Band, Cell, Comparison, Reach, Row, aggregate
from proxima.lab.run_reader import AXES, Run, find_runs, read_run
from proxima.lab.seed_statistics import Estimate, estimate
from proxima.lab.sweep_file import read_sweep
from proxima.lab.sweep_plan import PlannedRun, Sweep, plan_runs
from proxima.lab.sweep_runner import run_sweep

__all__ = [
    "AXES",
    "Band",
    "Cell",
    "Comparison",
    "Estimate",
    "PlannedRun",
    "Reach",
    "Row",
    "Run",
    "Sweep",
    "aggregate",
    "estimate",
    "find_runs",
    "plan_runs",
    "read_run",
    "read_sweep",
    "run_sweep",
]
