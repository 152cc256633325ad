"""Tables of kinds, and packages whose names are imported at their first use: a run loads the specs that its recipe
names, and none of the others."""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
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

    def name_of(self, cls: type) -> str | None:
        """The kind of a class; None for a class that is not in the table."""
        reference = f"{cls.__module__}:{cls.__qualname__}"
        return next((kind for kind, listed in self.references.items() if listed == reference), None)

    def holds(self, value: object, *kinds: str) -> bool:
        """Whether a value is of one of the kinds. Imports none: a class that nobody has imported has no instances."""
        references = (self.references[kind].partition(":") for kind in kinds)
        classes = [getattr(sys.modules[module], name) for module, _, name in references if module in sys.modules]
        return isinstance(value, tuple(classes))

    def __repr__(self) -> str:
        return f"Kinds({self.references})"


def lazy_imports(room: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package: what its `if TYPE_CHECKING:` imports, it has from the first use on.

    Type checkers read the same block, so a name can't be in one place and not in the other. A name that a submodule has
    too must be imported outside the block: importing the submodule would put it in the name's place.
    """
    origins: dict[str, tuple[str, str]] = {}

    def read_block() -> dict[str, tuple[str, str]]:
        if not origins:
            loader = importlib.util.find_spec(room).loader  # type: ignore[union-attr]
            tree = ast.parse(loader.get_source(room))  # type: ignore[union-attr]
            for block in tree.body:
                if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
                    for node in block.body:
                        assert isinstance(node, ast.ImportFrom) and node.module
                        origins.update({alias.asname or alias.name: (node.module, alias.name) for alias in node.names})
        return origins

    def find(name: str) -> Any:
        if name.startswith("__") or name not in read_block():
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        module, original = origins[name]
        value = getattr(importlib.import_module(module), original)
        setattr(sys.modules[room], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[room]), *read_block()})

    return find, names
