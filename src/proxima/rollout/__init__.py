"""Rollouts: prompts go in, scored groups come out, one by one. Training and evaluation both use this room.

`generator.py` runs the engine and the rewards over a list of prompts; `collector.py` fills a training batch from it
(dynamic sampling, groups carried over to the next step), `async_collector.py` during training, where `admission.py`
says how many prompts may be on their way; `dynamic_sampling.py` holds the settings of the refill.
What happens is reported to a `RolloutListener`; the room knows no config, journal or view.
Imports: `data`, `engine`, `task`. Imported by `evaluate`, `train`, `config` (the settings) and the rooms above.
To add a way of filling a batch: a `Collector`, and a test in `tests/rollout`.
"""
