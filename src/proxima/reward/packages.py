"""The packages that rewards need."""

import importlib.util

from proxima.data import UserError


def require_package(module: str, kind: str, extra: str) -> None:
    """Raise `UserError` unless the package that the reward imports as `module` is installed."""
    if importlib.util.find_spec(module) is None:
        package = module.replace("_", "-")
        raise UserError(f"reward '{kind}' needs the package {package}: pip install 'proxima-rl[{extra}]'")
