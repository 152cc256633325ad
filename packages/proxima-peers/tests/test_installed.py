"""proxima finds what this distribution brings."""

from importlib.metadata import entry_points

from proxima.cli.commands import COMMANDS, PEERS


def test_every_command_has_its_entry_point():
    brought = {name for name, (place, _) in COMMANDS.items() if place == PEERS}
    modules = {entry.name: entry.load() for entry in entry_points(group="proxima.commands")}
    assert modules.keys() >= brought, "proxima-peers is not installed: make, or pip install -e packages/proxima-peers"
    assert all(isinstance(modules[name].COMMAND, dict) for name in brought)
