"""Tables of kinds, and packages whose names are imported at first use: a run loads only the specs that its recipe
names."""

import dis
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any


class Kinds(Mapping[str, type]):
    """The kinds of a slot: `table["cppo"]` imports the class and returns it; names, `in` and `len` import nothing.

    Args:
        references: kind → "package.module:Class".
    """

    def __init__(self, references: Mapping[str, str]) -> None:
        self.references = dict(references)

    def __getitem__(self, kind: str) -> type:
        module, _, name = self.references[kind].partition(":")
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]

    def __contains__(self, kind: object) -> bool:
        return kind in self.references

    def __iter__(self) -> Iterator[str]:
        return iter(self.references)

    def __len__(self) -> int:
        return len(self.references)

    def kind_of(self, spec: object) -> str:
        """The kind by which a recipe names a spec: a key of the table, else `package.module:Class`."""
        reference = f"{type(spec).__module__}:{type(spec).__qualname__}"
        return next((kind for kind, listed in self.references.items() if listed == reference), reference)

    def holds(self, value: object, *kinds: str) -> bool:
        """Return True if the value is of one of the kinds. Imports nothing: a class not yet imported has no
        instances."""
        return self.covers(type(value), *kinds)

    def covers(self, cls: type, *kinds: str) -> bool:
        """Return True if the class is that of one of the kinds, or derives from it."""
        references = (self.references[kind].partition(":") for kind in kinds)
        classes = (getattr(sys.modules.get(module), name, None) for module, _, name in references)
        return issubclass(cls, tuple(cls for cls in classes if cls is not None))


def lazy_imports(room: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package: the names that its `if TYPE_CHECKING:` block imports, and its modules,
    are imported at first use.

    Type checkers read the same block, so a name can't be in one place and not in the other. The block is read from the
    compiled module, which also exists in an installation without sources. A name that is also the name of a module of
    the package must be imported outside the block: importing the module would overwrite it.
    """

    @cache
    def origins() -> dict[str, tuple[str, str]]:
        """Name → its module, and its name there."""
        code = importlib.util.find_spec(room).loader.get_code(room)  # type: ignore[union-attr]
        names, module, original = {}, "", ""
        for instruction in dis.get_instructions(code):
            match instruction.opname:
                case "IMPORT_NAME":
                    module, original = instruction.argval, ""
                case "IMPORT_FROM":
                    original = instruction.argval
                case "STORE_NAME" if original:
                    names[instruction.argval], original = (module, original), ""
        return names

    def find(name: str) -> Any:
        if name in origins():
            module, original = origins()[name]
            value = getattr(importlib.import_module(module), original)
            setattr(sys.modules[room], name, value)
            return value
        if not name.startswith("_") and importlib.util.find_spec(f"{room}.{name}") is not None:
            return importlib.import_module(f"{room}.{name}")
        raise AttributeError(f"module {room!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[room]), *origins()})

    return find, names
