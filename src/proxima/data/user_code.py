"""Imports modules that a recipe or a command line names, which runs what is in them."""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


def import_user_module(name: str) -> ModuleType:
    """The module `name`, which may be in the current folder. That folder is searched last, and only from the first such
    import on: proxima's own imports must never find a file next to a recipe."""
    folder = os.getcwd()
    if name.partition(".")[0] != "proxima" and folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def user_module_file(name: str) -> Path | None:
    """The file of a module, which is not imported, and neither are its packages; None: there is none."""
    places: Sequence[str] | None = [*sys.path, os.getcwd()]
    spec: ModuleSpec | None = None
    for part in name.split("."):
        spec = None if places is None else PathFinder.find_spec(part, places)
        places = None if spec is None else spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.origin is not None else None
