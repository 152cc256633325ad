"""Episodes: conversations of a model and an environment over several turns, as the tokens of one sample.

    settings       the `episode` section of a recipe
    conversation   the tokens of an episode, turn by turn, and the chat template that renders and encodes them; sampled
                   tokens are never re-encoded
    worlds         builds and checks what plays the episodes of a task, before weights are loaded
    tool_use       how the model sees the tools of an episode, and calls them
    player         plays episodes; to a generator of groups it is an engine whose completions have several turns
    played         an episode in progress, and the completion that it becomes
    sessions       episodes that an application from outside opens and closes; `session_kind` is the environment,
                   `session_routes` its HTTP API
    figures        statistics of a step's episodes, for metrics.jsonl

Imports: `data`, `model`, `engine`, `environment`, `task`. Imported by `evaluation` and `runtime`, for tasks with an
environment or tools; the settings by `config`.
"""
