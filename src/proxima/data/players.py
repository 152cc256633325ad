"""Roles of an episode that one policy plays, and what each of its players wrote: the unit of credit.

A player is a role, `solver`, or a numbered attempt of one, `solver/2`. A role is compared with the same role in the
group's other episodes; attempts are compared with each other, within their episode.
"""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from proxima.data.flow import Completion, Group, Score, sampled_tokens

ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
NO_ROLES = ("mean", "std", "invalid", "max", "part")  # what a metric `reward/…` is without roles
NAMES_OF_ROLES = f"must be a list of different names of letters, digits, _, . and -, and not {', '.join(NO_ROLES)}"
PLAYER = re.compile(rf"({ROLE.pattern})(/[0-9]{{1,6}})?")


def are_roles(names: object) -> bool:
    """Return True if these can be names of roles, see `NAMES_OF_ROLES`."""
    if not isinstance(names, list | tuple):
        return False
    if len(set(map(str, names))) != len(names):
        return False
    return all(isinstance(name, str) and ROLE.fullmatch(name) and name not in NO_ROLES for name in names)


@dataclass(frozen=True, kw_only=True, eq=False)
class Contribution:
    """What one player wrote in an episode; without roles, the episode or the single answer.

    Args:
        completion: the whole episode.
        paths: those that the player wrote, in the order of their last turns; none if it has a reward but wrote nothing.
        score: the player's score.
        role: its role; empty without roles.
        group: equal for contributions that are compared with each other.
    """

    completion: Completion
    paths: tuple[Completion, ...]
    score: Score
    role: str
    group: Hashable

    @property
    def generated(self) -> int:
        """The number of tokens that the player wrote."""
        return sum(map(sampled_tokens, self.paths))

    @property
    def truncated(self) -> bool:
        """True when the length limit ended the player's last path, or the completion if the player wrote nothing."""
        if self.paths:
            return self.paths[-1].truncated
        return self.completion.truncated


def contributions_of(groups: Iterable[Group]) -> list[Contribution]:
    """The contributions to the groups' completions, in order; the players of an episode in the order of their first
    paths."""
    out: list[Contribution] = []
    for group in groups:
        for completion, score in zip(group.completions, group.scores, strict=True):
            out += _contributions(completion, score)
    return out


def _contributions(completion: Completion, score: Score) -> list[Contribution]:
    uid = completion.prompt_uid
    written: dict[str, list[Completion]] = {}
    for path in completion.paths:
        player = ""
        if path.episode is not None:
            player = path.episode.player
        written.setdefault(player, []).append(path)
    if written.keys() == {""}:
        return [Contribution(completion=completion, paths=completion.paths, score=score, role="", group=(uid,))]

    out: list[Contribution] = []
    for player in {**written, **score.players}:
        role = role_of(player)
        group: Hashable = (uid, player)
        if "/" in player:  # an attempt is compared with those of its own episode
            group = (uid, completion.sample, role)
        paths = tuple(written.get(player, ()))
        own = score.players.get(player, score)
        out.append(Contribution(completion=completion, paths=paths, score=own, role=role, group=group))
    return out


def role_of(player: str) -> str:
    """The role of a player: without the number of its attempt."""
    return player.partition("/")[0]


def mean_of_roles(rewards: Mapping[str, float]) -> float:
    """The mean over the roles of each role's mean over its players."""
    return fmean(fmean(values) for values in _by_role(rewards.items()).values())


def rewards_of_players(given: Mapping[str, float], players: Sequence[str]) -> dict[str, float]:
    """The reward of each player; an attempt without its own reward gets that of its role. A player that wrote nothing
    keeps its reward, which counts in the baseline of its role.

    Args:
        given: rewards by player or role. players: those that wrote something.

    Raises:
        KeyError: names a player without a reward.
    """
    missing = [player for player in players if not {player, role_of(player)} & given.keys()]
    if missing:
        raise KeyError(missing[0])
    rewards: dict[str, float] = {}
    for player in players:
        name = player if player in given else role_of(player)
        rewards[player] = given[name]
    attempted = {role_of(player) for player in players if "/" in player}
    return rewards | {player: reward for player, reward in given.items() if player not in attempted}


def role_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """The mean reward of each role, `reward/<role>`, and its share of correct answers, `accuracy/<role>`, over the
    valid scores of its players; empty without roles."""
    scored = [(each.role, each.score) for each in contributions_of(groups) if each.role and each.score.valid]
    rewards = _by_role((role, score.value) for role, score in scored)
    correct = _by_role((role, float(score.correct)) for role, score in scored if score.correct is not None)
    metrics = {f"reward/{role}": fmean(values) for role, values in rewards.items()}
    return metrics | {f"accuracy/{role}": fmean(values) for role, values in correct.items()}


def _by_role(values: Iterable[tuple[str, float]]) -> dict[str, list[float]]:
    by_role: dict[str, list[float]] = {}
    for player, value in values:
        by_role.setdefault(role_of(player), []).append(value)
    return by_role
