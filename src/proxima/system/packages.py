"""Packages that only some recipes need."""

import importlib.util

from proxima.data.errors import UserError


def require_package(module: str, what: str, requirement: str) -> None:
    """Raise `UserError` unless a package is installed.

    Args:
        module: the name by which it is imported.
        what: what needs it, as in "images need".
        requirement: what installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{what} the package {module.replace('_', '-')}: pip install '{requirement}'")
