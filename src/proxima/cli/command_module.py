"""Imports the module of a command: one of this room, or one that another distribution brings."""

import importlib
from pathlib import Path
from types import ModuleType

from proxima.data.errors import UserError

GROUP = "proxima.commands"  # entry points: the name of a command → its module, with `COMMAND`
CHECKOUT = Path(__file__).resolve().parents[3]


def command_module(name: str, place: str) -> ModuleType:
    """The module of a command.

    Args:
        place: a module of proxima, `proxima.cli.train`, or the distribution that brings the command, `proxima-peers`.

    Raises:
        UserError: the distribution is not installed.
    """
    if place.startswith("proxima."):
        return importlib.import_module(place)
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP, name=name):
        return importlib.import_module(entry.module)
    folder = CHECKOUT / "packages" / place
    source = f"--editable {folder}" if folder.is_dir() else place
    raise UserError(f"proxima {name} needs the package {place}; pip install {source}")
