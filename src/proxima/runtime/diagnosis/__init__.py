"""Which setting of an engine makes the mismatch between its log-probs and the trainer's: `proxima engine diagnose`.

    trainer_view  what the trainer says of tokens that an engine has sampled
    mismatch      the figures: nats a token with intervals, and paired differences
    probed        the engine of a recipe, started with one setting or another, and read
    promises      what an engine must do whatever its settings: the stated distribution, all new weights, no stale cache
    examination   the settings one at a time, then pairs of those that mattered

Imports: `config`, `training`, `evaluation` and every room below. Imported by `cli`.
To add a setting: `EngineSpec.variations` of the kind. To add a promise: a function in `promises`, and its line in
`PROMISES`.
"""
