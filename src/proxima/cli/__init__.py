"""The command line: `proxima COMMAND …`. One file a command, each with `add_arguments(parser)` and `run(arguments) ->
int`.

`main.py` has the list of commands and the ends: 0 done, 1 the run or the program failed, 2 the user can mend it (one
line `error: …` a problem), 130 Ctrl-C. A command's module is imported when the command is given, and torch only inside
`run`, so `--help` is fast.
Imports: every room. Imported by nothing. To add a command: (1) a file; (2) a line in `COMMANDS`; (3)
`tests/cli/test_<name>.py`.
"""
