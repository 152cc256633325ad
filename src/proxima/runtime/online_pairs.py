"""Online DPO: the update of a step whose completions are compared in pairs. Called in the compute thread."""

from collections.abc import Sequence

from proxima.data import PreferencePair, Trajectory
from proxima.model.compute_thread import Progress
from proxima.train import PreferenceObjective, TokenStatistics, TrainStack, UpdateResult


def update_on_pairs(
    stack: TrainStack,
    objective: PreferenceObjective,
    trajectories: Sequence[Trajectory],
    updates: Sequence[Sequence[int]],
    progress: Progress,
    planned: int,
) -> UpdateResult:
    """As `TrainStack.update`, over the pairs of `best_against_worst`; each side gets its part of the statistics."""
    pairs = best_against_worst(trajectories)
    places = list(pairs)
    number = {i: place for place, sides in enumerate(places) for i in sides}
    plan = [list(dict.fromkeys(number[i] for i in update)) for update in updates]
    result = stack.update(objective, plan, list(pairs.values()), progress, planned=planned)
    statistics: dict[int, TokenStatistics] = {}
    for place, both in result.token_statistics.items():
        first, second = places[place]
        cut = len(trajectories[first].tokens)
        statistics[first] = TokenStatistics(log_prob=both.log_prob[:cut], keep=both.keep[:cut])
        statistics[second] = TokenStatistics(log_prob=both.log_prob[cut:], keep=both.keep[cut:])
    result.token_statistics = statistics
    return result


def best_against_worst(trajectories: Sequence[Trajectory]) -> dict[tuple[int, int], PreferencePair]:
    """The two trajectories of each group, the one with the larger advantage chosen; by their positions in the list.

    Raises:
        ValueError: a group has not exactly two, or both have the same advantage.
    """
    members: dict[int, list[int]] = {}
    for i, item in enumerate(trajectories):
        members.setdefault(item.group, []).append(i)
    pairs: dict[tuple[int, int], PreferencePair] = {}
    for group, both in members.items():
        order = sorted(both, key=lambda i: -float(trajectories[i].advantage.mean()))
        values = {float(trajectories[i].advantage.mean()) for i in both}
        if len(order) != 2 or len(values) != 2:
            found = f"{len(order)} completions with advantages {sorted(values)}"
            raise ValueError(f"group {group} has {found}; a pair is two that differ: select with best_and_worst")
        chosen, rejected = order
        pairs[chosen, rejected] = PreferencePair(
            row=group, chosen=trajectories[chosen], rejected=trajectories[rejected]
        )
    return pairs
