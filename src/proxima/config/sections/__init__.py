"""The sections of a recipe, one module each: its dataclass, with the bounds of each field, and its checks against other
sections and this machine.

    model      data (also the checks of `task`, `reward` and `episode`)     sampling (checks)
    algorithm  train  eval (also `checkpoint`)  critic  runtime (also `monitor`)
    placement  rollouts
    offline    what every run on a fixed data set has; its methods: sft,
    preference

A check is a function whose parameters are the sections that it reads, by their names in a recipe, and `r`, the
`Resolved` itself, if it reads more. It yields pairs: the path of a field, and what is wrong with its value. It runs if
the config of the command has all of these sections, and yields nothing where a recipe leaves its part out.

Imported by `schema`, `families` and `validate`. To add a field: a line in its dataclass with a meaning in `Annotated`
and a bound in `__post_init__`. To add a check: the function in its section's module; a line in `validate.CHECKS` or
`validate.WARNINGS`; and the case as a user types it in `tests/config/test_validate.py`.
"""

from proxima.data.kinds import Kinds

CRITICS = Kinds(
    {"head": "proxima.config.sections.critic:HeadCritic", "model": "proxima.config.sections.critic:ModelCritic"}
)
PLACEMENTS = Kinds(
    {
        "local": "proxima.config.sections.placement:LocalPlacement",
        "ray": "proxima.config.sections.placement:RayPlacement",
        "torchrun": "proxima.config.sections.placement:TorchrunPlacement",
    }
)
SHARDINGS = Kinds(
    {
        "full": "proxima.config.sections.placement:FullSharding",
        "hybrid": "proxima.config.sections.placement:HybridSharding",
        "replicate": "proxima.config.sections.placement:ReplicatedModel",
    }
)
