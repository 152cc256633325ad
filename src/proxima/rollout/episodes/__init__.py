"""Episodes: what a model and an environment say to each other over several turns, as the tokens of one sample.

    settings       the `episode` section of a recipe
    turn_template  renders and encodes a chat that grows; template_check tries one before a run
    conversation   the tokens of an episode, turn by turn: it never encodes what was sampled
    player         plays episodes: to a generator of groups, an engine whose completions have several turns
    played         an episode while it is played, and the completion that it becomes
    figures        what the episodes of a step were like, for metrics.jsonl

Imports: `data`, `model`, `engine`, `environment`, `task`. Imported by `runtime`, where a task has an environment or
tools; the settings by `config`.
"""
