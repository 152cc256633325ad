"""Imports the module of a command, from proxima or from another distribution that provides it."""

import importlib
import textwrap
from pathlib import Path

from proxima.cli.parameters import Command
from proxima.data.errors import UserError

GROUP = "proxima.commands"  # entry points: the name of a command → its module, with `COMMAND`
CHECKOUT = Path(__file__).resolve().parents[3]


def load_command(name: str, place: str) -> tuple[Command, str]:
    """Load a command and its description for `--help`: `COMMAND` and the docstring of its module.

    Args:
        place: a module of proxima, `proxima.cli.explain`, or the distribution that provides the command,
            `proxima-peers`.

    Raises:
        UserError: the distribution is not installed.
    """
    if not place.startswith("proxima."):
        from importlib.metadata import entry_points

        found = next(iter(entry_points(group=GROUP, name=name)), None)
        if found is None:
            folder = CHECKOUT / "packages" / place
            source = f"--editable {folder}" if folder.is_dir() else place
            raise UserError(f"proxima {name} needs the package {place}; pip install {source}")
        place = found.module
    module = importlib.import_module(place)
    text = module.__doc__ or ""
    return module.COMMAND, text if "\n" in text else textwrap.fill(text, 120)
