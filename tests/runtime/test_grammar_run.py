"""A run whose agent asks for the form of an answer, over an engine that says that it has grammars."""

from dataclasses import replace

import numpy as np
import pytest

from proxima.data.episode import Episode
from proxima.engine.local.local_engine import Local
from proxima.rollout.episodes.agent_player import AgentEpisodes
from proxima.runtime.state.folder import RunFolder
from proxima.view.microscope.step_file import StepFile
from tests.runtime.episode_world import episode_recipe, go
from tests.runtime.tiny_run import NO_EVAL, Watcher, steps_of

AGENT = {"kind": "agent", "run": "tests.runtime.echo_agent:play_forms"}


@pytest.mark.slow
def test_answers_under_a_grammar_are_scored_and_not_trained(tiny_model, tmp_path, monkeypatch):
    """The engine samples freely; that it was asked for a grammar alone decides."""
    asked, of_device, original = {}, Local.capabilities_on, AgentEpisodes._next_turns

    async def recorded(self, *arguments):
        turns = await original(self, *arguments)
        asked.update({turn.request.key: turn.request.grammar for turn in turns})
        return [replace(turn, request=replace(turn.request, grammar=None)) for turn in turns]

    monkeypatch.setattr(Local, "capabilities_on", lambda self, device: replace(of_device(self, device), grammars=True))
    monkeypatch.setattr(AgentEpisodes, "_next_turns", recorded)
    environment, watcher = {"task__environment": AGENT, "eval__task__environment": AGENT}, Watcher()
    recipe = episode_recipe(tiny_model("llama"), train__steps=2, **environment, **NO_EVAL)
    go(tmp_path / "run", recipe, observer=watcher)
    run = RunFolder(tmp_path / "run")
    for record in steps_of(run.path):
        assert record["episode/failed"] == 0 and record["reward/invalid"] == 0
        under = free = 0
        for row in StepFile(run.rollout_file(record["step"])).read(range(16)):
            first, between, second = Episode.from_json(row["episode"]).spans
            assert (first.grammar, second.grammar) == (True, False) and first.sampled and second.sampled
            counts = [first.tokens, between.tokens, second.tokens]
            assert row["sampled"].tolist() == np.repeat([False, False, True], counts).tolist()
            assert asked[row["prompt_uid"], row["sample"], 0] == '{"type": "object"}'
            assert asked[row["prompt_uid"], row["sample"], 1] is None
            assert np.abs(row["log_prob"] - row["sampled_log_prob"])[row["sampled"]].max() < 1e-4
            under += first.tokens
            free += second.tokens
        assert record["tokens/generated"] == free
        assert record["episode/grammar_fraction"] == pytest.approx(under / (under + free))
    assert len([line for line in watcher.warnings if "16 of 32 messages of the model were sampled" in line]) == 1
