"""`proxima data inspect`, as a user types it."""

import json
import shutil
from types import SimpleNamespace

import pytest

from proxima.api.episode_chat import ScriptedEngine
from proxima.data.episode import ToolCall
from proxima.environment.call_readers import read_calls
from tests.tiny import CHAT_TEMPLATE

pytestmark = pytest.mark.usefixtures("lent_servers")
THOUGHTLESS = CHAT_TEMPLATE.replace(
    "message['content']", "(message['content'] if loop.last else message['content'].split('</think>')[-1])"
)
WORLD = ("task={kind: seeds, count: 5, environment: guess}", "eval={task: null}", "reward=[{kind: environment}]")


@pytest.mark.slow
def test_an_episode_token_by_token(proxima, recipe):
    code, out, err = proxima("data", "inspect", recipe(), *WORLD, "sampling.max_tokens=9", "--say", "7")
    assert (code, err) == (0, "") and "\x1b" not in out
    assert out.splitlines()[0] == "p  the prompt: conditioned on" and "S  sampled and trained" in out
    assert "S  turn 0: 2 tokens\nS    7|<|im_end|>\n" in out
    assert "o    |<|im_start|>|a|s|s|i|s|t|a|n|t|⏎" in out
    spans = json.loads(proxima("data", "inspect", recipe(), *WORLD, "--say", "7", "--json")[1])["paths"][0]
    assert [part["kind"] for part in spans[:3]] == ["prompt", "sampled", "observed"]
    trained = sum(len(part["tokens"]) for part in spans if part["kind"] == "sampled")
    assert f"{trained} of {sum(len(part['tokens']) for part in spans)} tokens are trained" in out


@pytest.mark.slow
def test_what_an_earlier_path_trains(proxima, recipe, tiny_model, here):
    shutil.copytree(tiny_model("llama"), here / "thinker")
    (here / "thinker" / "chat_template.jinja").write_text(THOUGHTLESS)
    asked = (recipe(), *WORLD, "model.path=thinker", "sampling.max_tokens=20", "episode.turns=2")
    code, out, err = proxima("data", "inspect", *asked, "--say", "<think></think>7")
    assert code == 0 and "e  turn 0: 2 tokens\ne    7|<|im_end|>\n" in out and "path 0 of 2" in out
    assert "the chat template rewrites what the model saw" in err


def test_a_call_of_the_first_tool_is_made():
    tools = {"add": {"properties": {"a": {}, "b": {}}}}
    use = SimpleNamespace(template=SimpleNamespace(tokenizer=None), tool_format="hermes", tools=tools)
    world = SimpleNamespace(use=use)
    call, sentence = ScriptedEngine(world).turns
    assert read_calls(call, "hermes", {}).calls == (ToolCall(name="add", arguments={"a": "7", "b": "7"}),)
    assert sentence == "It is 7."


@pytest.mark.slow
def test_a_turn_that_a_limit_cuts(proxima, recipe):
    words = ("sampling.max_tokens=3", "--say", "It is certainly not 7.")
    code, out, err = proxima("data", "inspect", recipe(), *WORLD, *words)
    assert (code, err) == (0, "") and "S  turn 0: 3 tokens\n" in out


@pytest.mark.slow
def test_a_row_that_is_not_there(proxima, recipe):
    code, _, err = proxima("data", "inspect", recipe(), *WORLD, "--row", "5")
    assert code == 2 and err == "error: --row=5 must be in [0, 4]\n"
