"""Modules that a recipe or a command line names (to import one runs its code), and packages that only some recipes
need."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from proxima.data.errors import UserError


def import_user_module(name: str) -> ModuleType:
    """Import the module `name`, which may be in the current folder. That folder is searched last, and only from the
    first such import on: proxima's own imports must never pick up a file in the folder of a recipe."""
    folder = os.getcwd()
    if name.partition(".")[0] != "proxima" and folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def user_class(reference: str) -> Any:
    """The class, or another callable, that `module:Class` names; raises whatever its import raises."""
    module, _, name = reference.partition(":")
    return getattr(import_user_module(module), name)


def user_module_file(name: str) -> Path | None:
    """The file of a module, found without importing the module or its packages; None if there is none."""
    places: Sequence[str] | None = [*sys.path, os.getcwd()]
    spec: ModuleSpec | None = None
    for part in name.split("."):
        if places is None:
            spec = None
        else:
            spec = PathFinder.find_spec(part, places)
        places = None if spec is None else spec.submodule_search_locations
    if spec is not None and spec.origin is not None:
        return Path(spec.origin)
    return None


def require_package(module: str, what: str, requirement: str) -> None:
    """Raise `UserError` unless a package is installed.

    Args:
        module: the name by which it is imported.
        what: what needs it, as in "images need".
        requirement: what installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{what} the package {module.replace('_', '-')}: pip install '{requirement}'")
