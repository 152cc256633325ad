"""Other processes: how they start, what they may use, what they say, and that none of them outlives the run.

    children       starts a module in another process, a `Child` with a socket to it, that ends when this process does;
                   kills a group or a tree
    exit_status    how a process ended, in words
    entry          the first thing in such a process, and in those below it
    limits         memory, files, and what code may not do
    sandbox        which sandbox a program runs in, and the command line that puts it there; the interface of kinds of
                   sandboxes that other distributions bring
    worker         killable workers for code that may hang or crash; `fork_server` forks them, and is kept running; one
                   that died is replaced, and calls queue for them
    code_runner    runs a program that a model wrote, in `code_process`
    program        a program that exchanges lines of JSON with us, or answers requests of JSON-RPC
    guardian       runs a command, such as a server, and leaves nothing of it behind
    plain_data     values as JSON between the code of a model and its tests: a list of types, rebuilt on the other side
    json_lines     lines of JSON over a socket, each read until a deadline; values as JSON that restores their types

Imports: the standard library alone, so that a process starts in milliseconds. Imported by `engine`, `reward`,
`environment` and the rooms above.
To add a process of a new kind: `start_module`, if it is a module of ours; a `Program` if it is not, or `guardian` if it
must be stopped gracefully; a worker for a short job that may hang. Its tests kill each side at any moment.
"""
