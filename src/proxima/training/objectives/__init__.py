"""Objectives: the losses that the training stack minimises.

    protocol           `Objective`, `BatchStatistics` and `TokenStatistics`
    policy_objective   `PolicyObjective`: surrogate, corrections, penalties and aggregation of RL
    preference_objective   `PreferenceObjective`: DPO's family over pairs; `KtoObjective`: completions with a label
    router_balance     `RouterBalance`: an even load of the experts, added to the policy's loss

Those with a single user are beside it: `ValueObjective` in `training.critic`, `SftObjective` and `RewardObjective` with
their methods in `training.offline`.
To add one: subclass `Objective`; `SftObjective` is a small one. In RL its `items` builds the items of an update from
the trajectories of a batch.
"""
