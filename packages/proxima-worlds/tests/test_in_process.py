"""Environments of other libraries, in the worker processes."""

import asyncio
import json
import re
from contextlib import closing
from importlib.util import find_spec

import pytest

from proxima.data import FieldError
from proxima.environment.hosts import EnvironmentFailure, Hosts
from proxima.environment.interface import EnvironmentSpec
from tests.lent_servers import lent_servers


@pytest.fixture(autouse=True)
def servers():
    with lent_servers(imports=[name for name in ("reasoning_gym", "textarena", "skyrl_gym") if find_spec(name)]):
        yield


def play(world, row, seed, *players):
    """The opening, the answers and the reward of an episode of each player, who says what follows the dialogue."""

    async def run(hosts, says):
        instance = await hosts.open(row, seed)
        opening = instance.opening or row["messages"]
        seen, answers = [opening[-1]["content"]], []
        for _ in range(30):
            answers.append(await instance.respond(says(seen)))
            if answers[-1].done:
                break
            seen.append(answers[-1].messages[0]["content"])
        return opening, answers, await instance.end()

    with closing(hosts_of(**world)) as hosts:
        return [asyncio.run(run(hosts, says)) for says in players]


def hosts_of(kind, **arguments):
    return Hosts(EnvironmentSpec(kind=kind, arguments=arguments), workers=1)


EMPTY = {"messages": [{"role": "user", "content": ""}], "answer": None, "number": 0}


def halves(seen):
    low, high = 1, 20
    for text in seen[1:]:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if "higher" in text else (low, middle - 1)
    return f"I try [{(low + high) // 2}]."


@pytest.mark.slow
def test_textarena_is_won_and_lost():
    pytest.importorskip("textarena")
    world = {"kind": "textarena", "game": "GuessTheNumber-v0"}
    first, again, (_, lost, _) = play(world, EMPTY, 5, halves, halves, lambda seen: "no move")
    opening, answers, _ = first
    assert "between 1 and 20" in opening[0]["content"] and answers[-1].done and len(answers) <= 5
    assert [a.reward for a in answers] == [0.0] * (len(answers) - 1) + [1.0]
    assert all("The target number is" in a.messages[0]["content"] for a in answers[:-1])
    assert again == first == (opening, answers, None)
    assert len(lost) == 2 and "invalid move" in lost[0].messages[0]["content"] and lost[1].reward < 1


@pytest.mark.slow
def test_textarena_games_in_one_process_do_not_share_their_chance():
    pytest.importorskip("textarena")

    async def boards(hosts, *seeds):
        games = [await hosts.open(EMPTY, seed) for seed in seeds]
        seen = [[game.opening[-1]["content"]] for game in games]
        for move in ("[left]", "[down]") * 3:
            for said, game in zip(seen, games, strict=True):
                said.append((await game.respond(move)).messages[0]["content"])
        return seen

    with closing(hosts_of("textarena", game="2048-v0")) as hosts:
        together = asyncio.run(boards(hosts, 0, 1))
        assert asyncio.run(boards(hosts, 0))[0] == together[0] != together[1]


@pytest.mark.slow
def test_reasoning_gym_scores_by_the_puzzles_verifier():
    pytest.importorskip("reasoning_gym")
    world = {"kind": "reasoning_gym", "task": "chain_sum", "config": {"min_terms": 2, "max_terms": 2}, "attempts": 2}

    def right_at(attempt):
        def says(seen):
            a, sign, b = re.search(r"(\d+) ([+-]) (\d+) =", seen[0]).groups()
            value = int(a) + int(b) if sign == "+" else int(a) - int(b)
            return f"so <answer>{value if len(seen) == attempt else 'what'}</answer>"

        return says

    *won, (_, lost, _) = play(world, EMPTY, 7, *map(right_at, (1, 2, 3)))
    for (opening, answers, _), rewards in zip(won, ([1.0], [0.0, 1.0]), strict=True):
        assert opening[0]["content"].endswith("</answer>.") and [a.reward for a in answers] == rewards
    assert len(lost) == 2 and lost[-1].reward < 0.1


@pytest.mark.slow
def test_skyrl_gym_gives_rewards_of_turns():
    pytest.importorskip("skyrl_gym")
    world = {"kind": "skyrl_gym", "env": "gsm8k_multi_turn", "extras": {"max_turns": 3}}
    row = {"messages": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}
    ((opening, answers, _),) = play(world, row, 0, lambda seen: "#### 5" if len(seen) == 1 else "#### 4")
    assert [m["content"] for m in opening] == ["2 + 2?"]
    assert [a.done for a in answers] == [False, True] and answers[1].reward == 1.0
    assert answers[0].reward == pytest.approx(0.2 / 3) and "####" in answers[0].messages[0]["content"]


@pytest.mark.parametrize(
    ("package", "world", "says"),
    [
        ("reasoning_gym", {"kind": "reasoning_gym", "task": "chain_sun"}, "did you mean 'chain_sum'"),
        ("reasoning_gym", {"kind": "reasoning_gym", "task": "chain_sum", "config": {"min_terms": -1}}, "refused"),
        ("textarena", {"kind": "textarena", "game": "GuessTheNumbr-v0"}, "can't be made"),
        ("textarena", {"kind": "textarena", "game": "GuessTheNumber-v0", "config": {"colour": 1}}, "can't be made"),
        ("skyrl_gym", {"kind": "skyrl_gym", "env": "gsm9k"}, "known are"),
    ],
)
def test_what_is_wrong_in_a_recipe_is_one_line(package, world, says):
    pytest.importorskip(package)
    with pytest.raises(FieldError) as error:
        hosts_of(**world)
    assert says in str(error.value) and "\n" not in str(error.value)
    json.dumps(error.value.value)


@pytest.mark.slow
def test_a_game_for_two_can_not_begin():
    pytest.importorskip("textarena")
    with pytest.raises(EnvironmentFailure, match="players"):
        play({"kind": "textarena", "game": "TicTacToe-v0"}, EMPTY, 0, lambda seen: "")
