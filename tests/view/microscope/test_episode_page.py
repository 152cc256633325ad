"""An episode on the page: its messages, and no policy for what the model did not write."""

import base64

import numpy as np
import pytest

from proxima.runtime.state.folder import RunFolder
from proxima.view.microscope.completion_page import CompletionPage
from proxima.view.microscope.token_text import TokenText
from proxima.view.microscope.viewed_run import ViewedRun
from tests.runtime.episode_world import episode_recipe, go

SMALL = "tests/view/microscope/test_completion_page.py"
SMALL += "::test_an_episode_shows_its_messages_and_explains_what_the_model_wrote_alone"


@pytest.mark.campaign(SMALL)
def test_tokens_of_the_environment_have_no_behavior_policy(tiny_model, tmp_path):
    go(tmp_path / "run", episode_recipe(tiny_model("llama")))
    run = ViewedRun(0, RunFolder(tmp_path / "run"))
    observed = trained = 0
    for key in run.step(1).rows:
        page = CompletionPage(run, run.step(1), key, TokenText(None))
        answer = page.answer()
        spans = answer["episode"]["spans"]
        sampled = np.repeat([span["sampled"] for span in spans], [span["tokens"] for span in spans])
        behavior = np.frombuffer(base64.b64decode(answer["columns"]["behavior_log_prob"]["f32"]), np.float32)
        assert len(sampled) == len(answer["tokens"]["ids"]) and (np.isnan(behavior) == ~sampled).all()
        for token in range(0, len(sampled), 5):
            said = page.token(token)
            if sampled[token]:
                trained += said["reason"].startswith(("kept: ", "masked: "))
                assert said["log_probs"]["behavior"] is not None
            else:
                observed += 1
                assert said["reason"].startswith(("not trained here", "not sampled here"))
                assert said["log_probs"]["behavior"] is said["ratio"] is said["advantage"] is None
    assert observed > 0 and trained > 0
