"""Methods of training on a fixed data set: SFT, reward models and DPO are an `OfflineMethod` each.

    method            what the loop asks of a method        reference_cache   reference log-probs, computed once
    sft_method        preference_method        reward_method
To add one: its objective in `train.objectives`, a subclass of `OfflineMethod` here, its section and its line in
`config`.
"""
