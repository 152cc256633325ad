"""Other processes: how they start, what they may use, what they say, and that none of them outlives the run.

    children       starts a module in another process, a `Child` with a socket to it, that ends when this process does;
                   kills a group or a tree; says what an exit code means
    entry          the first thing in such a process, and in those below it
    limits         memory, files, and what code may not do
    sandbox        which sandbox a program runs in, and the command line that puts it there
    worker         killable workers for code that may hang or crash; `fork_server` forks them, and is kept running; one
                   that died is replaced, and calls queue for them
    code_runner    runs a program that a model wrote, in `code_process`
    program        a program that exchanges lines of JSON with us, or answers requests of JSON-RPC
    foreign_environment  an environment of another library, in an interpreter that has it; `foreign_runner` is the
                   program there
    guardian       runs a command, such as a server, and leaves nothing of it behind
    containers     containers of podman or docker; `relay.c` is their first process, `container_guardian` removes them;
                   `harbor_tasks` reads tasks in Harbor's format and builds their images
    contained      modules of ours in containers: fork servers with their workers, and `code_server`, which forks a
                   `code_process` for each code
    json_lines     lines of JSON over a socket, each read until a deadline; values as JSON that restores their types

Imports: the standard library alone, so that a process starts in milliseconds. Imported by `engine`, `reward`,
`environment` and the rooms above.
To add a process of a new kind: `start_module`, if it is a module of ours; a `Program` if it is not, or `guardian` if it
must be stopped gracefully; a worker for a short job that may hang. Its tests kill each side at any moment.
"""
