"""Environments: worlds and tools that a model acts in over several turns.

    protocol     what a user writes: `Environment`, `Reply`
    interface    what a class and functions offer: schemas of tools, answers, a reward; complaints before the run
    hosts        worker processes in which environments live; `host_process` is their side
    agents       agents from outside, which play against the run's endpoint; `agent_process` runs functions
    tool_calls   tool calls in what a model wrote, and how a model without a template for tools learns of them
    adapters     environments of other libraries, and tools of MCP servers
    calculator, guess, python_code, search, sqlite     those that come with proxima

Imports: stdlib, `proxima.data`; in a worker process also transformers, for the schemas of tools. Imported by `rollout`
and the rooms above.
To add one: a class with `reset` and tools or `respond`, a line in `ENVIRONMENTS`, episodes of it, right and broken, in
`tests/environment/test_<name>.py`. Out of tree: `environment: my_pkg.worlds:Maze`.
"""

from typing import TYPE_CHECKING

from proxima.data.kinds import Kinds, lazy_imports

if TYPE_CHECKING:
    from proxima.environment.protocol import Environment, Reply

__getattr__, __dir__ = lazy_imports(__name__)

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

__all__ = ["ENVIRONMENTS", "Environment", "Reply"]
