"""The laboratory: many runs begun as one (`sweep`), read back (`run`), and held against each other (`aggregate`).

    plan.py       a sweep file → cells → checked runs             tail.py         metrics.jsonl as it grows
    sweep.py      runs them in processes of their own, resumably
Imports: `config`, `runtime` (folder, records, environment, files). Imported by `view` and `cli`; `runtime` never imports this room.
To add a field of a sweep file: a name in `FIELDS` of `plan.py` and a method of `_Reader` that reads it and says what is wrong with it.
"""

from proxima.lab.plan import Cell, PlannedRun, Sweep, plan_runs, read_sweep

__all__ = ["Cell", "PlannedRun", "Sweep", "plan_runs", "read_sweep"]
