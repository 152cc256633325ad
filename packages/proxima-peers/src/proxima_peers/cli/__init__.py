"""The commands `proxima convert` and `proxima verify`, which proxima finds through the entry points of this package.

Imports: `convert`, `verify`, `proxima.config`, `proxima.cli.output`. Imported by nothing. To add a command: a file with
`add_arguments(parser)` and `run(arguments) -> int`, an entry point in `pyproject.toml`, a line in `proxima.cli.main`.
"""
