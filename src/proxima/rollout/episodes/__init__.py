"""Episodes: the model acts in an environment, turn by turn.

    settings       the `episode` section of a recipe
    conversation   the tokens of an episode: what each turn is conditioned on, and the paths that are trained
    player         plays episodes: to a generator of groups, an engine whose completions have several turns
    figures        what the episodes of a step were like, for metrics.jsonl

Imports: `data`, `engine`, `environment`, `model.chat`. Imported by `runtime.launch`, where a task has an environment or
tools, and its settings by `config`.
"""
