"""`proxima engine`: `engine_command` lists its actions, one module each. To add one: a module and a line in
`COMMAND`."""
