"""Builds a run from a config. The call stack from the command to `Controller.train` is five frames deep; no object is
changed after it is built.

    run                  every training: folder, journal, loop, summary
    resumed_run          what a resume does before the loop
    rl_workload, offline_workload        the work of a run and its loop: RL, or a method of `train.offline`;
                         `offline_data`: its rows
    run_on_ranks         what only a run of several ranks needs
    learning, critic_weights, forward_passes, teacher, next_policy_cache, models    the learner and its parts
    generation           the engine, the rewards, the collector, the held-out sets
    run_data             the data of a run before weights are loaded; its parts: engine_needs, inputs

Imports: every room below `runtime`, and `loop`, `state`, `watch`. Imported by `experiments`, `view`, `api` and `cli`.
To add a part to the loop: write a function here that builds it from the config, and call it in `rl_workload` or
`learning`.
"""
