"""A run whose agent begins each episode in its own words, as with the time or a folder's name in its system prompt."""

import re

import numpy as np
import pytest

from proxima.rollout.episodes.agent_player import AgentEpisodes
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.stored_completions import stored_groups
from proxima.view.microscope.step_file import StepFile
from tests.campaigns import campaign
from tests.runtime.episode_world import episode_recipe, go
from tests.runtime.tiny_run import NO_EVAL, steps_of
from tests.tiny import tiny_tokenizer

SYNC = "tests/runtime/test_agent_openings.py::test_members_of_a_group_may_begin_otherwise"
OVERLAP = {"runtime__max_lag": 1, "runtime__max_concurrent_rollouts": 3}
AGENT = {"kind": "agent", "run": "tests.runtime.echo_agent:play_at"}


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [{}, *campaign(SYNC, [OVERLAP])])
def test_members_of_a_group_may_begin_otherwise(tiny_model, tmp_path, monkeypatch, sharing):
    """Each is scored, and trained on what it saw: the trainer's log-probs of its tokens are the engine's."""
    asked = {}
    original = AgentEpisodes._next_turns

    async def recorded(self, *arguments):
        turns = await original(self, *arguments)
        asked.update({turn.request.key: turn.request.prompt.tokens.tolist() for turn in turns})
        return turns

    monkeypatch.setattr(AgentEpisodes, "_next_turns", recorded)
    environment = {"task__environment": AGENT, "eval__task__environment": AGENT}
    advantage = {"algorithm__advantage": {"kind": "gigpo"}}
    go(
        tmp_path / "run",
        episode_recipe(tiny_model("llama"), train__steps=2, **environment, **advantage, **sharing, **NO_EVAL),
    )
    run, words = RunFolder(tmp_path / "run"), set()
    for record in steps_of(run.path):
        assert record["episode/failed"] == 0 and record["reward/invalid"] == 0
        file = run.rollout_file(record["step"])
        rows = StepFile(file).read(range(16))
        for row in rows:
            seen = np.concatenate([row["prompt_tokens"], row["tokens"]]).tolist()
            context = asked[row["prompt_uid"], row["sample"], row["turn"]]
            assert seen[: len(context)] == context and row["outcome"] in ("trained", "skipped_zero_advantage")
            current = row["sampled"] & (row["policy_version"] == record["step"] - 1)
            assert np.abs(row["log_prob"] - row["sampled_log_prob"])[current].max(initial=0.0) < 1e-4
            words |= {*re.findall(r"It is \d+.*?[.]", tiny_tokenizer().decode(row["prompt_tokens"]))}
        used, _ = stored_groups(file)
        assert all(sum(c.initial_prompt is None for c in group.completions) == 1 for group in used)
    assert len(words) == 32
