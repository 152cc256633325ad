"""`proxima engine`: `engine_command` has its actions, one module each; to add one, a module and a line in `ACTIONS`."""
