"""What `proxima train` trains, one entry each: its recipes, and the code that runs them.

To add a way to train on a fixed data set, three files:

    config/sections/NAME_section.py    its section, and the config of its recipes: a subclass of `OfflineConfig`, whose
                                       `sequences_of` returns the trained sequences of a row, for `explain`
    training/offline/NAME_method.py       its `OfflineMethod`
    here                               its entry, which `resolve`, `explain`, the JSON schema and the reference read

Configs and methods are imported at first use, so that `proxima --help` can read the table without them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxima.config.describe import class_at, fields_of
from proxima.config.tree import Node


@dataclass(frozen=True, kw_only=True)
class Family:
    """A way to train, and its properties.

    Args:
        name: in messages, and of its recipes in the JSON schema.
        config: the dataclass of its recipes, "package.module:Class".
        own: the section that only its recipes have, by which they are recognised; empty for `TRAIN`, which takes all
            others.
        method: its `OfflineMethod`, "package.module:Class"; empty where groups are generated.
        learning_rate: of its optimizer if a recipe sets none; None: the optimizer's own default.
        samples: its model generates, so that held-out evaluations have answers to inspect.
    """

    name: str
    config: str
    own: str = ""
    method: str = ""
    learning_rate: float | None = None
    samples: bool = True

    @property
    def root(self) -> type:
        """The dataclass of its recipes."""
        return class_at(self.config)


TRAIN = Family(name="train", config="proxima.config.schema:RunConfig")
OFFLINE = (
    Family(
        name="sft",
        config="proxima.config.sections.sft:SftConfig",
        own="sft",
        method="proxima.training.offline.sft_method:SftMethod",
        learning_rate=2e-5,  # as TRL
    ),
    Family(
        name="reward",
        config="proxima.config.sections.preference:RewardModelConfig",
        own="reward_model",
        method="proxima.training.offline.reward_method:RewardMethod",
        learning_rate=1e-5,  # TRL's 1e-4 suits an adapter; InstructGPT trains whole models with 9e-6
        samples=False,
    ),
    Family(
        name="dpo",
        config="proxima.config.sections.preference:PreferenceConfig",
        own="preference",
        method="proxima.training.offline.preference_method:PreferenceMethod",
        learning_rate=1e-6,  # as TRL
        samples=False,
    ),
)
FAMILIES = {family.name: family for family in (TRAIN, *OFFLINE)}


def family_of(layers: Sequence[Node]) -> Family:
    """The family of a recipe; `TRAIN` if it has no other family's section."""
    written = set[str]()
    for layer in layers:
        written |= (layer.mapping or {}).keys()
    return next((family for family in OFFLINE if family.own in written), TRAIN)


def family_of_config(config: Any) -> Family | None:
    """The family of a config, or of a config class; None for another root, such as that of `proxima eval`."""
    cls = config if isinstance(config, type) else type(config)
    reference = f"{cls.__module__}:{cls.__qualname__}"
    return next((family for family in FAMILIES.values() if family.config == reference), None)


def family_name(config: Any) -> str:
    """The name of the family that trains this config, or a config of this class."""
    return (family_of_config(config) or TRAIN).name


def is_recipe_field(path: str) -> bool:
    """True if the first part of a dotted path is a field of some family's recipes."""
    known = set[str]()
    for family in FAMILIES.values():
        known |= {info.name for info in fields_of(family.root)}
    return path.partition(".")[0] in known
