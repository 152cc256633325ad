"""Environments of other libraries, each with the library's own rules and rewards.

    reasoning_gym, skyrl_gym, textarena     in the worker process: the package is installed beside proxima
    mcp                                     a tool server: a program of its own, by MCP over its stdin and stdout
    openenv                                 a server; its client runs in the interpreter that has the package
    bridge, bridge_process                  JSON lines to a program of another interpreter, and what it runs

Nothing here imports a library of these before an environment is made.
"""
