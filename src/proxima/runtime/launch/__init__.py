"""From a config to a run. Five frames from the command to `Controller.train`; no object is changed after it is built.

    run                  every training command: folder, journal, resume, loop, summary
    rl_workload, offline_workload        what a run trains, RL or a method of `train.offline`; `offline_data`: its rows
    build                everything that the loop of RL touches, around a learner; `services`: what all of it uses
    learning, critic_weights, teacher, next_policy_cache, models         the learner and its parts
    generation           the engine, the rewards, the collector, the held-out sets
    run_data             what is known before weights are loaded; its checks: engine_needs, inputs, preflight,
                         reward_trial
    eval_run, eval_suites, inference     evaluation and generation without training

Imports: every room below `runtime`, and `loop`, `state`, `watch`. Imported by `lab`, `view`, `api` and `cli`.
To add a part to the loop: a function here that makes it of the config, called in `build` or `learning`.
"""
