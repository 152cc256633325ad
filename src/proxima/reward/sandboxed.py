"""The sandbox of rewards that run code, as their field `sandbox` asks for it."""

from proxima.data import FieldError
from proxima.process.sandbox import CHOICES, REMEDY, SandboxMissing, usable_kind


def sandbox_kind(choice: str) -> str:
    """The kind of sandbox that runs code, for a choice; FieldError if it can't be used."""
    if choice not in CHOICES:
        raise FieldError("sandbox", choice, f"must be one of {', '.join(CHOICES)}")
    try:
        return usable_kind(choice)
    except SandboxMissing as error:
        raise FieldError("sandbox", choice, f"can't be used: {error}", remedy=REMEDY) from None
