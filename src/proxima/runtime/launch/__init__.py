"""From a config to a run: `run` is every training command, `eval_run` is `proxima eval`.

run         folder, journal, resume, loop, summary       rl_workload, offline_workload   what a run trains
build       everything that the loop of RL touches       generation, learning, critic_weights, teacher, models
run_data    what is known before weights are loaded      engine_needs, inputs, preflight, reward_trial   its checks
eval_run, eval_suites, inference   evaluation and generation without training
"""
