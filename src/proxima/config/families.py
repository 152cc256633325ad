"""Which training command a recipe is for: the section that only its recipes have says so."""

from collections.abc import Sequence
from typing import Any

from proxima.config.offline_schema import OfflineConfig, RewardModelConfig, SftConfig
from proxima.config.preference_schema import PreferenceConfig
from proxima.config.schema import RunConfig
from proxima.config.tree import Node

OFFLINE: tuple[type[OfflineConfig], ...] = (SftConfig, RewardModelConfig, PreferenceConfig)
FAMILIES: dict[str, type] = {"train": RunConfig} | {family.command: family for family in OFFLINE}  # by command


def family_of(layers: Sequence[Node]) -> type:
    """The config of a recipe's command; `RunConfig` where it has the section of no other."""
    written = {key for layer in layers for key in layer.mapping or ()}
    return next((family for family in OFFLINE if family.own in written), RunConfig)


def command_of(config: Any) -> str:
    """The command of `proxima` that trains this config, or a config of this class."""
    return getattr(config, "command", "train")
