"""The declarations that a spec makes besides its fields."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from proxima.data.errors import require


def names_in(declared: str, value: Any) -> frozenset[str]:
    """The names in a declaration: any collection of them, or the keys of a mapping from names to reasons.

    Raises:
        FieldError: it is a single text, or contains anything but texts.
    """
    is_names = isinstance(value, Collection) and not isinstance(value, str | bytes)
    is_names = is_names and all(isinstance(name, str) for name in value)
    require(is_names, declared, value, "must be a set of names", remedy="such as frozenset({'scale'})")
    return frozenset(value)


class Spec(Protocol):
    """Base of the slots' protocols. A spec is a frozen dataclass: its fields are its config, calling it is the
    mathematics.

    needs: the optional fields of its input that it reads.
    exempt_laws: the laws of `proxima.laws` that this method breaks on purpose, by name.
    test_fields: name → fields that switch on a branch that is off by default; the laws are checked on these too.
    examples: numbers worked out by hand, `{"inputs": …, "expected": …}`, and `"fields"` unless all are the defaults: a
        golden record without a name, see `tests/golden/README.md`.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    examples: ClassVar[Sequence[Mapping[str, Any]]] = ()

    @property
    def exempt_laws(self) -> frozenset[str]:
        return frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        """Convert `needs` and `exempt_laws`, given as any collection of names, to frozensets."""
        super().__init_subclass__(**options)
        for name in ("needs", "exempt_laws"):
            value = cls.__dict__.get(name)
            if value is not None and not isinstance(value, property):
                setattr(cls, name, names_in(f"{cls.__name__}.{name}", value))
