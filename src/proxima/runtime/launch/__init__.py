"""Builds a run from a config. The call stack from the command to `Controller.train` is five frames deep; no object is
changed after it is built.

    run                  every training: folder, journal, resume, loop, summary; what only several ranks need
    rl_workload          the work of an RL run: engine, rewards, collector, held-out sets, loop
    offline_workload     the same for a method of `training.offline`
    learning             the learner and its parts: optimizer, loss, batches, critic, forward passes
    run_data             the data of a run before weights are loaded, and what its models and engines must meet

Imports: every room below `runtime`, and `loop`, `resume`, `state`, `watch`, `placement`.
Imported by `experiments`, `view`, `api` and `cli`.
To add a part to the loop: write a function here that builds it from the config, and call it in `rl_workload` or
`learning`.
"""
