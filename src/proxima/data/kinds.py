"""Tables of kinds, and `Slot`, the annotation of fields that hold one: a run imports only the specs that its recipe
names."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

WORLDS = "proxima-worlds"  # the distribution that brings kinds of several tables
CHECKOUT = Path(__file__).resolve().parents[3]


class Kinds(Mapping[str, type]):
    """The kinds of a slot: `table["cppo"]` imports the class and returns it; iteration, `in` and `len` import nothing.

    Args:
        references: kind → "package.module:Class".
        group: of the entry points by which other distributions bring kinds, which have the same rights; empty: none.

    Raises: KeyError for an unknown kind.
    """

    def __init__(self, references: Mapping[str, str], group: str = "") -> None:
        self._own = dict(references)
        self._group = group

    @property
    def references(self) -> dict[str, str]:
        """Kind → "package.module:Class", those of other distributions too."""
        return {**self._own, **{kind: place for kind, place in self.brought.items() if kind not in self._own}}

    @cached_property
    def brought(self) -> dict[str, str]:
        """The references of the kinds that other distributions bring."""
        if not self._group:
            return {}
        from importlib.metadata import entry_points  # takes longer than the rest of this module

        return {point.name: point.value for point in sorted(entry_points(group=self._group))}

    @property
    def elsewhere(self) -> str:
        """What may be installed to have more kinds; empty if no distribution of ours brings more."""
        if self._group and not self.brought:
            return f"{install_command(WORLDS)} for more"
        return ""

    def __getitem__(self, kind: str) -> type:
        if kind in self._own:
            return class_of(self._own[kind])
        return class_of(self.brought[kind])

    def __contains__(self, kind: object) -> bool:
        return kind in self._own or kind in self.brought

    def __iter__(self) -> Iterator[str]:
        return iter(self.references)

    def __len__(self) -> int:
        return len(self.references)

    def kind_of(self, spec: object) -> str:
        """The kind by which a recipe names a spec: a key of the table, else `package.module:Class`."""
        reference = f"{type(spec).__module__}:{type(spec).__qualname__}"
        return next((kind for kind, listed in self.references.items() if listed == reference), reference)

    def holds(self, value: object, *kinds: str) -> bool:
        """Return True if the value is an instance of one of the kinds. Imports nothing: a class that was never imported
        has no instances."""
        return self.covers(type(value), *kinds)

    def covers(self, cls: type, *kinds: str) -> bool:
        """Return True if the class is that of one of the kinds, or derives from it."""
        references = (self._own[kind].partition(":") for kind in kinds)
        classes = (getattr(sys.modules.get(module), name, None) for module, _, name in references)
        return issubclass(cls, tuple(cls for cls in classes if cls is not None))


def class_of(reference: str) -> type:
    """The class of "package.module:Class", which is imported."""
    module, _, name = reference.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


def install_command(distribution: str) -> str:
    """The command that installs a distribution of ours: from this checkout, if it has it."""
    folder = CHECKOUT / "packages" / distribution
    if folder.is_dir():
        return f"pip install --editable {folder}"
    return f"pip install {distribution}"


@dataclass(frozen=True)
class Slot:
    """Marks a field that holds a spec, or with `many` a tuple of specs. Tables are named "package.module:DICT".

    Args:
        table: the dict of kinds; imported only when a recipe is resolved.
        many: the field holds a tuple of specs.
        default: the kind if a recipe names none, or that of each entry without one; None keeps the field's own default.
        aliases: table of other names for the kinds, as used by the peers.
        presets: table of names that each expand to several specs; needs `many`.
    """

    table: str
    many: bool = False
    default: str | None = None
    aliases: str | None = None
    presets: str | None = None
