"""The command `proxima peers`, which proxima finds through this package's entry point: its actions, one module each.

Imports: `convert`, `verify`, `proxima.config`, `proxima.cli.parameters`, `proxima.cli.parameters`. Imported by nothing.
To add an action: a module with a function whose parameters are its arguments, and a line in `peers_command`.
"""
