"""The annotation of config and spec fields that hold specs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Slot:
    """Marks a field that holds a spec, or, with `many`, a list of specs. A table is named "package.module:DICT".

    Args:
        table: the dict of kinds; imported when a recipe is resolved, never before.
        many: the field holds a tuple of specs.
        default: the kind if a recipe names none, and for a list the kind of each entry that names none; None keeps the
            field's own default.
        aliases: table of other names for the kinds, as used by the peers.
        presets: table of names that each expand to several specs; needs `many`.
    """

    table: str
    many: bool = False
    default: str | None = None
    aliases: str | None = None
    presets: str | None = None
