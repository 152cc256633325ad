"""State that survives a kill, and how it is read back; `resume` continues a run from it.

    journal.py             each prompt's state and each step, in SQLite, with checksums of all that was written
    folder.py              the run folder: paths, metrics.jsonl, its lock
    completion_columns.py  every column of a stored completion, and rows into Parquet
    rollouts.py            the completions of steps and evaluations
    stored_completions.py  reads them back as completions and groups
    pending_files.py       what a checkpoint keeps of later steps: carried groups, next-policy log-probs
    store.py               `RunStore`, through which the loops write to journal and folder
    replay.py              the stored groups of another run in place of generated ones
    folder_check.py        `proxima check RUN`: every file against its checksum
    run_checkpoints.py     which is the last, the best, and which are kept; exports a model
    summary.py             what is known of a run at its start, and summary.json

Imports: `watch`, `training`, `rollout`, `evaluation`, `config` and below, never `loop` or `launch`.
To store another column: a line in `completion_columns`, its name in the schema of the file, and its value where rows
are made. To add a file to the folder: a path in `RunFolder`, and a line in its `_clear`. A write that a kill may
interrupt needs a test that kills it there.
"""
