"""Rollouts: prompts go in, scored groups come out one by one. Used by training and evaluation.

`generator.py` runs the engine and the rewards over a list of prompts; `collector.py` fills a training batch from it
(dynamic sampling, groups carried over to the next step), `async_collector.py` does so during training;
`prompt_limits.py` decides how many prompts are drawn. Before weights are loaded, `reward_checks.py` checks that the
rewards can score. `episodes/` plays conversations with an environment.
Events are reported to a `RolloutListener`; this package knows no config, journal or view.
Imports: `data`, `engine`, `reward`, `environment`, `task`.
Imported by `evaluation`, `training`, `config` (the settings) and the rooms above.
To add a way of filling a batch: a `Collector`, and a test in `tests/rollout`.
"""
