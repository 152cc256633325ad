"""Engines that are servers: install one, start one for a recipe, query its capabilities.

proxima engine install vllm                               # into .venv-vllm, a dedicated environment
proxima engine serve quickstart engine=vllm               # start a server for a recipe; Ctrl-C stops it
proxima engine probe http://127.0.0.1:8000                # the capabilities of a server"""

from proxima.cli.engine.install_action import install_server
from proxima.cli.engine.probe_action import probe_server
from proxima.cli.engine.serve_action import serve_recipe

COMMAND = {"install": install_server, "serve": serve_recipe, "probe": probe_server}
