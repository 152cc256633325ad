"""Objectives: the losses that the training stack minimises.

    protocol           `Objective`, `BatchStatistics` and `TokenStatistics`
    policy_objective   `PolicyObjective`: surrogate, corrections, penalties and aggregation of RL
    reward_objective   `RewardObjective`: pairs of completions, scored by a scalar head
    sft_objective      `SftObjective`: the likelihood of given tokens
    preference_objective   `PreferenceObjective`: DPO's family over pairs
    value_objective    `ValueObjective`: the critic's clipped loss
    router_balance     `RouterBalance`: an even load of the experts of a mixture, added to the policy's loss
    kto_objective      `KtoObjective`: KTO over completions with a label

To add one: subclass `Objective`; `ValueObjective` is a small one. In RL its `items`
builds the items of an update from the trajectories of a batch.
"""
