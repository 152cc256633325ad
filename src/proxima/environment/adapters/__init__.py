"""Environments from other libraries, each with the library's own rules and rewards.

    reasoning_gym, skyrl_gym, textarena     in the worker process: the package is installed in proxima's environment
    mcp                                     a tool server: a separate program that speaks MCP over stdin and stdout
    openenv, openenv_process                a server; its client runs in the interpreter that has the package

None of these libraries is imported before an environment is created.
"""
