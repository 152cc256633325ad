"""Plan and run sweeps, read runs back, and compare them.

    sweep_file.py        a sweep file → cells
    sweep_plan.py        cells × seeds → validated runs
    sweep_runner.py      each run in its own process
    run_progress.py      metrics.jsonl while it grows, and the progress of a run
    run_reader.py        finds run folders; a run folder → config, records, curves over any axis
    metric_names.py      metric names of other frameworks
    run_comparison.py    runs → cells, the fields in which they differ, warnings
    cell_statistics.py   means over seeds, Student's interval, paired differences, cost of a target (pure)
    stored_tokens.py     why the tokens of a stored completion were kept or dropped
    divergences.py       the divergence of each token, and the trust region that follows

In a notebook:

    from proxima.experiments.run_comparison import compare_runs
    from proxima.experiments.run_reader import find_runs, read_run
    comparison = compare_runs([read_run(folder) for folder in find_runs(["runs/trust_regions"])], target=0.9)

Imports: `runtime` (folder, environment) and every room below it. Imported by
`view`, `api`, `cli`.
To add a field of a sweep file: its name in `FIELDS` of `sweep_file.py`, and a method that validates it. To add an axis:
an entry in `AXES` of `run_reader.py`. To add a number to the final table: an entry in `MEASURES` of
`cell_statistics.py`, and a field of `CellSummary`.
"""
