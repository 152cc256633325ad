"""Environments: worlds and tools that a model acts in over several turns.

    protocol     the classes for users: `Environment`, `Reply`
    interface    the interface of a class and functions: tool schemas, answers, a reward; validated before the run
    hosts        the worker processes that run the environments; `host_process` is the code in the worker
    agents       external agents, which play against the run's endpoint; `agent_process` runs functions
    tool_schemas  checks schemas of tools that come from outside
    tool_calls   parses the tool calls in a model's text; describes tools to a model whose template has none
    adapters     environments from other libraries, and tools of MCP servers
    calculator, guess, python_code, search, sqlite     the built-in environments

Imports: stdlib, `proxima.data`, `proxima.process`; in a worker process also transformers, for the schemas of tools.
Imported by `rollout` and the rooms above.
To add one: a class with `reset` and tools or `respond`, a line in `ENVIRONMENTS`, valid and broken episodes in
`tests/environment/test_<name>.py`. Out of tree: `environment: my_pkg.worlds:Maze`.
"""

from proxima.data.kinds import Kinds

ENVIRONMENTS = Kinds(
    {
        "agent": "proxima.environment.agents:AgentSpec",
        "calculator": "proxima.environment.calculator:Calculator",
        "guess": "proxima.environment.guess:Guess",
        "mcp": "proxima.environment.adapters.mcp:Mcp",
        "openenv": "proxima.environment.adapters.openenv:OpenEnv",
        "python": "proxima.environment.python_code:PythonCode",
        "reasoning_gym": "proxima.environment.adapters.reasoning_gym:ReasoningGym",
        "search": "proxima.environment.search:Search",
        "skyrl_gym": "proxima.environment.adapters.skyrl_gym:SkyRLGym",
        "sqlite": "proxima.environment.sqlite:Sqlite",
        "textarena": "proxima.environment.adapters.textarena:TextArena",
    }
)

__all__ = ["ENVIRONMENTS"]
