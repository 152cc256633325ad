"""The command line: `proxima COMMAND …`. One file per command, each with `COMMAND`: a function whose typed parameters
are its arguments, or a table of such functions, one for each action (`parameters.py`).

`commands.py` lists the commands, and `help_page.py` answers where none is given. `main.py` sets the exit code: 0
success, 1 a failed run or a full disk, 2 a problem that the user can fix (one line `error: …` each), 70 a bug
(`exit_codes.py`), 130 Ctrl-C. A command's module has its options, which `--help` and a mistyped option read in a tenth
of a second; its function imports what does the work, and torch with it: `proxima.api`, a module of the room, or one
here: `chat_session`, `explanation`, `scoring`, `serving`.
Imports: every room. Imported by nothing. To add a command: (1) a file; (2) a line in `COMMANDS`; (3)
`tests/cli/test_<name>.py`.
"""
