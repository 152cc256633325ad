"""Environments: worlds and tools in which a model acts over several turns.

    protocol     the classes for users: `Environment`, `Reply`
    interface    the interface of a class and functions: tool schemas, answers, a reward; validated before the run
                 (external tools' schemas too)
    hosts        the worker processes that run the environments; `host_process` is the code in the worker
    agents       external agents, which play against the run's endpoint; `agent_process` runs functions
    boxed_agents runs the programs of agents in containers and sandboxes; `harbor_agents` plays Harbor's tasks
    tool_calls   the call format of a chat template; descriptions of tools for models whose template has none
    call_readers  parse the tool calls in a model's text, one format each
    adapters     environments from other libraries, and tools of MCP servers
    builtin      the built-in environments: calculator, guess, python, search, sqlite

Imports: stdlib, `proxima.data`, `proxima.process`; in a worker process also transformers, for the schemas of tools.
Imported by `rollout` and the rooms above.
To add one: a class with `reset` and tools or `respond`, a line in `ENVIRONMENTS`, valid and broken episodes in
`tests/environment/test_<name>.py`. Out of tree: `environment: my_pkg.worlds:Maze`.
"""

from proxima.data.kinds import Kinds

ENVIRONMENTS = Kinds(
    {
        "agent": "proxima.environment.agents:AgentSpec",
        "calculator": "proxima.environment.builtin:Calculator",
        "guess": "proxima.environment.builtin:Guess",
        "mcp": "proxima.environment.adapters.mcp:Mcp",
        "nemo_gym": "proxima.environment.adapters.foreign:NemoGym",
        "openenv": "proxima.environment.adapters.openenv:OpenEnv",
        "python": "proxima.environment.builtin:PythonCode",
        "reasoning_gym": "proxima.environment.adapters.games:ReasoningGym",
        "search": "proxima.environment.builtin:Search",
        "skyrl_gym": "proxima.environment.adapters.games:SkyRLGym",
        "sqlite": "proxima.environment.builtin:Sqlite",
        "textarena": "proxima.environment.adapters.games:TextArena",
        "verifiers": "proxima.environment.adapters.foreign:Verifiers",
    }
)

__all__ = ["ENVIRONMENTS"]
