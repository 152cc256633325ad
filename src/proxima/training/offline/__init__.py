"""Methods of training on a fixed data set: SFT, reward models and DPO are an `OfflineMethod` each.

    method            the interface to the loop             reference_cache   reference log-probs, computed once
    sft_method        preference_method        reward_method

Imports: as `train`, and `task` and `evaluate`. Imported by `config`, whose table names the methods, and `runtime`.
To add one, three files by hand: (1) a subclass of `OfflineMethod` here; (2) in `config`, its section and its config,
the `settings` of the method; (3) a line in `config.families` with the command, the config and the method. Its command,
schema, checks, report and tests follow from the table. A new objective goes to `train.objectives`.
"""
