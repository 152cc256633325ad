"""The declarations that a spec makes besides its fields."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol


class Spec(Protocol):
    """Base of the slots' protocols. A spec is a frozen dataclass: its fields are its config, calling it is the
    mathematics.

    needs: the optional fields of its input that it reads.
    exempt_laws: the laws of `proxima.laws` that this method breaks on purpose, by name.
    test_fields: name → fields that switch on a branch that is off by default; the laws are checked on these too.
    examples: numbers worked out by hand, `{"inputs": …, "expected": …}` and, unless all have defaults, `"fields"`: a
        golden record without a name, see `tests/golden/README.md`.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    test_fields: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    examples: ClassVar[Sequence[Mapping[str, Any]]] = ()

    @property
    def exempt_laws(self) -> frozenset[str]:
        return frozenset()
