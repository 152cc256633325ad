"""The commands `proxima convert` and `proxima verify`, which proxima finds through this package's entry points.

Imports: `convert`, `verify`, `proxima.config`, `proxima.cli.output`, `proxima.cli.parameters`. Imported by nothing.
To add a command: a file with `COMMAND`, a function whose parameters are its arguments, an entry point in
`pyproject.toml`, a line in `proxima.cli.main`.
"""
