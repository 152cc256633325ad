"""Other people's worlds: environments, agents, tasks and sandboxes, each with the rules of its library.

    games                                   reasoning_gym, SkyRL-Gym, TextArena, installed in proxima's environment
    mcp                                     a tool server: a separate program that speaks MCP over stdin and stdout
    openenv, openenv_process                a server; its client runs in the interpreter that has the package
    foreign_environment, foreign_runner     verifiers and NeMo Gym, in an interpreter that has them: what they are, and
                                            the program there
    foreign_agents, nemo_gym                environments of verifiers play by themselves; servers of NeMo Gym have tools
    harbor_rows, harbor_tasks               tasks in Harbor's format: their rows, their files and images
    harbor_agents, harbor_shell             an agent in a task's container; a tool `bash` there for the model
    containers, container_guardian          containers of podman or docker; `relay.c` is their first process, the
                                            guardian removes them
    awaited_commands                        commands of their engine that a run waits for, as pulls: one line that moves
    boxed_agents                            programs of agents in containers, or in bubblewrap behind the same relay
    contained, code_server                  modules of ours in containers: fork servers with their workers, and servers
                                            that fork a process for each code

proxima imports none of it: `pyproject.toml` names each kind by an entry point, which is read when a recipe names it.
Imports: `proxima.data`, `system`, `process`, `environment`, `task`; no library before a world of it is made.
To add a world: a class in a file of its own (`Environment`, or `AgentKind` for one that plays by itself), its entry
point, a row in docs/environments.md, and valid and broken episodes in `tests/test_<name>.py`.
"""

__version__ = "0.1.0"
