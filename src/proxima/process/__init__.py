"""Other processes: how they start, what they may use, what they say, and that none of them outlives the run.

    start          a module in another process, with a socket to it, that ends when this process does
    entry          the first thing in such a process, and in those below it
    channel        messages over such a socket
    kill           a group, a tree; what an exit code means
    limits         memory, files, and what code may not do
    worker         killable workers for code that may hang or crash; `fork_server` forks them
    keeper         keeps workers running: one that died is replaced, and so is their server
    code_runner    runs a program that a model wrote, in `code_process`
    program        a program that exchanges lines of JSON with us
    guardian       runs a command, such as a server, and leaves nothing of it behind
    user_code      imports what a recipe names

Imports: the standard library, `proxima.data.errors`. Imported by every room from `engine`, `reward` and `environment`
on. `entry`, `fork_server`, `guardian`, `code_process`, `kill` and `limits` need the standard library alone: they run
where starting must be fast.
To start a process of a new kind: `start_module`, if it is a module of ours; a `Program`, or `guardian` if it must be
stopped gracefully, if it is not; a worker for a short job that may hang.
"""
