"""`proxima engine`: `engine_command` has its actions, one module each. To add one: a module and a line in its
`COMMAND`."""
