"""Methods of training on a fixed data set: SFT, reward models and DPO are an `OfflineMethod` each.

    method              the interface to the loop
    sft_method          supervised fine-tuning, with its objective
    preference_method   DPO, its relatives and KTO; the log-probs of the reference are computed once
    reward_method       reward models, with their objective

Imports: as `training`, and `task` and `evaluation`. Imported by `config`, whose table names the methods, and `runtime`.
To add one, edit three files: (1) a subclass of `OfflineMethod` here; (2) in `config`, its section and its config, the
`settings` of the method; (3) a line in `config.families` with the command, the config and the method. Its command,
schema, checks, report and tests follow from the table. Put a new objective beside its method, or in
`training.objectives` if other methods use it.
"""
