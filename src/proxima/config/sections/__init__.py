"""The sections of a recipe, one module each: its dataclass, with the bounds of each field, and its checks against other
sections and this machine.

    model_section      data_section (also the checks of `task`, `reward` and `episode`)     sampling_section (checks)
    algorithm_section  train_section  eval_section (also `checkpoint`)  critic_section  runtime_section (also `monitor`)
    placement_section  rollouts_section
    offline_section    what every run on a fixed data set has; its methods: sft_section, reward_model_section,
    preference_section

A check is a function whose parameters are the sections that it reads, by their names in a recipe, and `r`, the
`Resolved` itself, if it reads more. It yields pairs: the path of a field, and what is wrong with its value. It runs if
the config of the command has all of these sections, and yields nothing where a recipe leaves its part out.

Imported by `schema`, `families` and `validate`. To add a field: a line in its dataclass with a meaning in `Annotated`
and a bound in `__post_init__`. To add a check: the function in its section's module; a line in `validate.CHECKS` or
`validate.WARNINGS`; and the case as a user types it in `tests/config/test_validate.py`.
"""

from proxima.data.kinds import Kinds

CRITICS = Kinds(
    {
        "head": "proxima.config.sections.critic_section:HeadCritic",
        "model": "proxima.config.sections.critic_section:ModelCritic",
    }
)
PLACEMENTS = Kinds(
    {
        "local": "proxima.config.sections.placement_section:LocalPlacement",
        "ray": "proxima.config.sections.placement_section:RayPlacement",
        "torchrun": "proxima.config.sections.placement_section:TorchrunPlacement",
    }
)
SHARDINGS = Kinds(
    {
        "full": "proxima.config.sections.placement_section:FullSharding",
        "hybrid": "proxima.config.sections.placement_section:HybridSharding",
        "replicate": "proxima.config.sections.placement_section:ReplicatedModel",
    }
)
