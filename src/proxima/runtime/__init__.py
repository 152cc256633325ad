"""Runtime: a run, from its command to its folder. `training` trains without it.

    launch/     from a config to the objects of a run, and the run itself: `proxima train`, its siblings and `eval`
    resume/     how a run continues after a kill: compares, rewinds, restores, refuses
    loop/       the loops: read `loop/controller.py` top to bottom and you have read the method
    state/      what survives a kill: journal, run folder, rollouts, and what a checkpoint keeps of later steps
    watch/      observes and logs: observers, timeline, activity, stalls, the disk, Ctrl-C, the clock
    placement/  the processes of a run on many devices
    diagnosis/  which setting of an engine makes its mismatch: `proxima engine diagnose`

Imports: every room below (`rollout`, `training`, `evaluation`, `config` …). Imported by `experiments`, `view`, `api`
and `cli`.
To add a stage: a method of `Controller` between its neighbours; a state in `state/journal.py` if it can be interrupted;
a test that kills it. A forward pass before the advantages or the update is a `ForwardStage` of `training`.
"""
