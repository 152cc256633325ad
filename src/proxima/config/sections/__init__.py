"""The sections of a recipe, one module each: its dataclass, with the bounds of each field, and its checks against other
sections and this machine.

    model_section      data_section       train_section      eval_section (also `checkpoint`)    runtime_section
    algorithm_section  critic_section     reward_section     rollouts_section  episode_section
    placement_section  ranks_section: its kinds with several processes
    optional_parts     checks of parts that most recipes leave out
    offline_section    what every run on a fixed data set has; its methods: sft_section, reward_model_section,
    preference_section

A check is a function whose parameters are the sections that it reads, by their names in a recipe, and `r`, the
`Resolved` itself, if it reads more. It yields pairs: the path of a field, and what is wrong with its value. It runs if
the config of the command has all of these sections.

Imported by `schema`, `families` and `validate`. To add a field: a line in its dataclass with a meaning in `Annotated`
and a bound in `__post_init__`. To add a check: the function in its section's module, or in `optional_parts` if most
recipes leave its part out; a line in `validate.CHECKS` or `validate.WARNINGS`, then as an `IfSet`; and the case as a
user types it in `tests/config/test_validate.py`.
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
        "ray": "proxima.config.sections.ranks_section:RayPlacement",
        "torchrun": "proxima.config.sections.ranks_section:TorchrunPlacement",
    }
)
SHARDINGS = Kinds(
    {
        "full": "proxima.config.sections.ranks_section:FullSharding",
        "hybrid": "proxima.config.sections.ranks_section:HybridSharding",
        "replicate": "proxima.config.sections.ranks_section:ReplicatedModel",
    }
)
