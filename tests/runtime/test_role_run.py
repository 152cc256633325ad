"""A run whose agent has several roles: what it measures, stores and shows."""

import pytest

from proxima.data.episode import Episode
from proxima.data.players import contributions_of, role_metrics
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import read_rows
from proxima.runtime.state.stored_completions import stored_groups
from proxima.view.episode_lines import shown_messages
from tests.runtime.tiny_run import steps_of
from tests.view.microscope.test_completion_page import pages

pytestmark = pytest.mark.slow


def test_each_role_is_measured_and_credited(runs):
    run = RunFolder(runs.finished("episodes of roles"))
    trained = set()
    for record in steps_of(run.path):
        used, dropped = stored_groups(run.rollout_file(record["step"]))
        measured = {"reward/picker", "reward/sayer"} <= record.keys()
        assert measured == (record["prompts_generated"] > 0)  # a step may live on what the one before left
        if record["prompts_generated"] == len(used) + len(dropped):
            assert role_metrics(used).items() <= record.items()
        rows = {
            (row["prompt_uid"], row["sample"], row["turn"]): row for row in read_rows(run.rollout_file(record["step"]))
        }
        players = contributions_of(used)
        for group in {each.group for each in players}:
            own = [each for each in players if each.group == group]
            rewards = [each.score.value for each in own]
            for each, reward in zip(own, rewards, strict=True):
                others = (sum(rewards) - reward) / max(1, len(own) - 1)
                expected = 0.0 if len(own) == 1 else reward - others
                (path,) = each.paths
                row = rows[path.key]
                assert row["advantage"] == pytest.approx(expected, abs=1e-6)
                assert Episode.from_json(row["episode"]).player.partition("/")[0] == each.role
                shown = shown_messages(row["episode"])[-1]
                assert shown["reward"].startswith(each.role)
                trained |= {each.role} if row["outcome"] == "trained" else set()
    assert trained == {"picker", "sayer"}


def test_the_page_of_a_path_names_its_player(runs):
    read = pages(runs.finished("episodes of roles"), 1)
    episodes = {key: page.answer()["episode"] for key, page in read.items()}
    players = {key: episode["player"].partition("/")[0] for key, episode in episodes.items()}
    assert set(players.values()) == {"picker", "sayer"}
    for key, episode in episodes.items():
        others = {path["turn"]: path["player"] for path in episode["paths"]}
        assert others == {k[2]: episodes[k]["player"] for k in episodes if k[:2] == key[:2] and k != key}
    assert any(
        {"picker", "sayer/0", "sayer/1"} == (episode.get("rewards") or {}).keys() for episode in episodes.values()
    )
