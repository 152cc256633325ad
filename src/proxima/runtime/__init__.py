"""Runtime: a run, from its command to its folder. `train` trains without it.

    launch/     from a config to the objects of a run, and the run itself: `proxima train`, its siblings and `eval`
    loop/       the loops: read `loop/controller.py` top to bottom and you have read the method
    state/      what survives a kill: journal, run folder, rollouts, checkpoints, resume
    watch/      who looks on: observers, timeline, activity, stalls, the disk, Ctrl-C, the clock

Imports: every room below (`rollout`, `train`, `evaluate`, `config` …). Imported by `experiments`, `view`, `api` and
`cli`.
To add a stage: a method of `Controller` between its neighbours; a state in `state/journal.py` if it can be interrupted;
a test that kills it. A forward pass before the advantages or the update is a `proxima.train.ForwardStage`.
"""
