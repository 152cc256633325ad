"""Resume: how a run continues after a kill, bit-identical to one that was never interrupted.

    restore     the order of a resume: compares, rewinds, and restores the data
    changes     the settings, inputs and numerics of the run against those it was started with
    refuse      the errors that refuse other settings
    rewind      journal, records and files as they were at the last intact checkpoint

The state itself is written by `state` (journal, run folder, groups that no step has consumed) and by
`training.checkpoint`; `config.comparable` says in which fields two configs may differ; `launch.run` calls all this.
docs/reading.md lists the files in order.

Imports: `loop`, `state`, `watch` and the rooms below `runtime`. Imported by `launch` and `api`.
To keep something else over a kill: a fact or a file of the checkpoint (`checkpoint_contents` of the loop), read back
where that part of the run is built (`restore` for the data, `launch` for the loop); a test that kills the run and
compares it with an unbroken one.
"""
