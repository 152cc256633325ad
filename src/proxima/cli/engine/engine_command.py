"""Engines that are servers: install one, start one for a recipe, ask one what it can do, check it.

proxima engine install vllm                               # into .venv-vllm, an environment of its own
proxima engine serve quickstart engine=vllm               # start a server for a recipe; Ctrl-C ends it
proxima engine probe http://127.0.0.1:8000                # what a server can do
proxima engine check http://127.0.0.1:8000 --model MODEL  # whether it does it right"""

import argparse
import importlib

ACTIONS = {  # name: its module, which has `add_arguments` and `run`, and what it does
    "install": ("install_action", "install a server into an environment of its own"),
    "serve": ("serve_action", "start the server of a recipe, and keep it running"),
    "probe": ("probe_action", "ask a server what it can do"),
    "check": ("check_action", "check the laws of engines against a live server; 1 if one fails"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    for name, (module, line) in ACTIONS.items():
        text = f"{line.capitalize()}."
        below = actions.add_parser(name, help=line, description=text, formatter_class=parser.formatter_class)
        importlib.import_module(f"{__package__}.{module}").add_arguments(below)


def run(arguments: argparse.Namespace) -> int:
    return int(importlib.import_module(f"{__package__}.{ACTIONS[arguments.action][0]}").run(arguments))
