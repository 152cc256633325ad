"""Environments: worlds and tools in which a model acts over several turns.

    protocol     the classes for users: `Environment`, `Reply`
    interface    the interface of a class and functions: tool schemas, answers, a reward; validated before the run
                 (external tools' schemas too)
    hosts        the worker processes that run the environments; `host_process` is the code in the worker
    concurrent_hosts  environments that wait for other programs, many at once in the run's own process
    job_processes  processes that do many jobs at once: episodes of agents, or calls of an environment
    agents       agents, which play against the run's endpoint; `agent_process` runs functions
    episode_clock  where the time of an episode goes, and the limit of its own
    agent_kinds  the bases of kinds that play by themselves, and of the sandboxes in which their programs run; `agent`
    tool_calls   the call format of a chat template; descriptions of tools for models whose template has none
    call_readers  parse the tool calls in a model's text, one format each
    builtin      the built-in environments: calculator, guess, python, search, sqlite

Imports: stdlib, `proxima.data`, `proxima.process`; in a worker process also transformers, for the schemas of tools.
Imported by `rollout` and the rooms above.
To add one: a class with `reset` and tools or `respond`, a line in `ENVIRONMENTS`, valid and broken episodes in
`tests/environment/test_<name>.py`. Out of tree: `environment: my_pkg.worlds:Maze`, or a name by an entry point of the
group `proxima.environments`, as `proxima-worlds` does for the environments of other libraries.
"""

from proxima.data.kinds import Kinds

ENVIRONMENTS = Kinds(
    {
        "agent": "proxima.environment.agent_kinds:AgentSpec",
        "calculator": "proxima.environment.builtin:Calculator",
        "guess": "proxima.environment.builtin:Guess",
        "python": "proxima.environment.builtin:PythonCode",
        "search": "proxima.environment.builtin:Search",
        "sessions": "proxima.rollout.episodes.session_kind:Sessions",
        "sqlite": "proxima.environment.builtin:Sqlite",
    },
    "proxima.environments",
)

__all__ = ["ENVIRONMENTS"]
