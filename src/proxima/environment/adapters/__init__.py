"""Environments from other libraries, each with the library's own rules and rewards.

    games                                   reasoning_gym, SkyRL-Gym, TextArena, installed in proxima's environment
    mcp                                     a tool server: a separate program that speaks MCP over stdin and stdout
    openenv, openenv_process                a server; its client runs in the interpreter that has the package

None of these libraries is imported before an environment is created.
"""
