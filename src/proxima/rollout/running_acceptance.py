"""The share of generated groups that could be used lately, which sizes the next generation batch."""

from collections.abc import Iterable, Mapping
from typing import Any

# Finished steps that count in the running acceptance; few, because it changes from step to step early in a run.
REMEMBERED_STEPS = 3
MAX_OVERSAMPLE = 4  # in batches: the largest generation batch that the running acceptance may request


def running_acceptance(history: Iterable[Mapping[str, Any]], judged: int = 0, accepted: int = 0) -> float:
    """The share of generated groups that could be used: (accepted + 1) / (judged + 1).

    It is 1 without any data, and never 0. Groups without a score don't count as judged.

    Args:
        history: metrics of the finished steps, newest first; counting stops at a step without these counts.
        judged, accepted: number of groups of the unfinished step.
    """
    steps = 0
    for record in history:
        if "prompts_accepted" not in record or steps == REMEMBERED_STEPS:
            break
        steps += record["prompts_generated"] > 0
        judged += int(record["prompts_generated"]) - int(record["prompts_unscored"])
        accepted += int(record["prompts_accepted"])
    return (accepted + 1) / (judged + 1)
