"""Imports modules that a recipe or a command line names, which runs what is in them."""

import importlib
import os
import sys
from types import ModuleType


def import_user_module(name: str) -> ModuleType:
    """The module `name`, which may be in the current folder. That folder is searched last, and only from the first such
    import on: what proxima itself imports must never be a file that lies beside a recipe."""
    folder = os.getcwd()
    if name.partition(".")[0] != "proxima" and folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
