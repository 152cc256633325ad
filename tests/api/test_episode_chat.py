"""Chats and episodes with tools: real environments, and an engine that says what it is told to."""

import json
from dataclasses import replace

import numpy as np
import pytest

from proxima.api.episode_chat import EpisodeChat, episodes_of, make_table, play_episodes
from proxima.cli import chat_session
from proxima.config.resolution import resolve
from proxima.config.schema import PlayedConfig
from proxima.config.sections.model import ModelConfig
from proxima.data import UserError
from proxima.data.flow import Completion, Prompt
from proxima.engine.protocol import Request, Sampling
from tests.cli.conftest import proxima  # noqa: F401
from tests.rollout.episodes.test_player import Engine
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("lent_servers")
TOOL = ["task.kind=arithmetic", "task.tools=[proxima.environment.builtin:calculate]"]
GAME = ["task={kind: seeds, count: 3, environment: {kind: guess, low: 1, high: 2, guesses: 2}}"]
XML = "<function=calculate><parameter=expression>6*7</parameter></function>"
CALL = "```calculate\n6*7\n```"


class Says(Engine):
    """Says one text after the other, or raises it; `contexts` are what it was shown."""

    def __init__(self, *texts):
        super().__init__(*texts)
        self.contexts = []

    def text_of(self, request):
        text = self.texts[len(self.contexts)]
        self.contexts.append(tiny_tokenizer().decode(request.prompt.tokens))
        if isinstance(text, BaseException):
            raise text
        return text

    async def in_flight(self):
        return []


class Heard(list):
    def opening(self, text):
        self.append(("opening", text))

    def piece(self, text):
        self.append(("piece", text))

    def turn(self, turn):
        self.append(([call.name for call in turn.calls], [answer.message["content"] for answer in turn.answers]))

    def over(self, reward):
        self.append(("over", reward))


@pytest.fixture
def table(tiny_model):
    made = []

    def make(*words):
        path = f"model.path={tiny_model('llama')}"
        # the template of the tiny model knows no tools: what it is told of them fills its context
        config = resolve({}, [path, "episode={turns: 2, tool_format: code, workers: 1}", *words], root=PlayedConfig)
        made.append(make_table(config.config))
        object.__setattr__(made[-1].world.rules, "context", 2000)
        return made[-1]

    yield make
    for table in made:
        table.world.close()


@pytest.fixture
def roomy(monkeypatch):
    read = ModelConfig.unloaded
    monkeypatch.setattr(ModelConfig, "unloaded", lambda model: replace(read(model), context=2000))


@pytest.mark.slow
def test_calls_and_results_as_they_happen_and_limits_from_each_message(table, roomy):
    heard, engine = Heard(), Says(CALL, "42", CALL, CALL, "Yes.", "Hm…", KeyboardInterrupt(), "ok", "new")
    chat = EpisodeChat(table(*TOOL), engine, Sampling(max_tokens=40), 0, heard)
    assert chat.ask("6*7?") == ""
    assert heard == [("piece", CALL), (["calculate"], ["42"]), ("piece", "42"), ([], [])]
    assert chat.ask("Again?") == "turns"
    assert chat.ask("Sure?") == ""
    assert engine.contexts[-1].endswith("user\n42\nSure?<|im_end|>\n<|im_start|>assistant\n")
    assert engine.contexts[-1].startswith(engine.contexts[0]) and engine.contexts[-1].count(CALL) == 3
    assert chat.ask("Long?") == "tokens"
    with pytest.raises(KeyboardInterrupt):
        chat.ask("lost")
    chat.ask("and?")
    assert "lost" not in engine.contexts[-1] and "Hm<|im_end|>\n<|im_start|>user\nand?" in engine.contexts[-1]
    with pytest.raises(UserError, match="no room"):
        chat.ask("x" * 2000)
    chat.new()
    chat.ask("6*7?")
    assert engine.contexts[-1] == engine.contexts[0]


@pytest.mark.slow
def test_an_episode_that_the_environment_ends_is_judged(table, roomy):
    heard = Heard()
    made = table("task={kind: seeds, count: 3, environment: 'tests.api.exam:Exam'}")
    chat = EpisodeChat(made, Says("```submit\n42\n```"), Sampling(max_tokens=40), 0, heard)
    assert chat.ask("6*7?") == "" and heard[-2:] == [(["submit"], ["thanks"]), ("over", 0.5)] and chat.played is None


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "shown"), [("Hinted", [("opening", "6*7? Think first.")]), ("Exam", [])])
def test_a_question_that_the_environment_rewrote_is_shown(table, roomy, environment, shown):
    """Of the first message of a chat only, and if it is another."""
    heard = Heard()
    made = table(f"task={{kind: seeds, count: 3, environment: 'tests.api.exam:{environment}'}}")
    chat = EpisodeChat(made, Says("Hm…", "42"), Sampling(max_tokens=40), 0, heard)
    for text in ("6*7?", "Well?"):
        chat.ask(text)
    assert [event for event in heard if event[0] == "opening"] == shown
    assert heard[: len(shown)] == shown


def test_an_environment_that_asks_needs_no_person(table):
    with pytest.raises(UserError, match="writes the question itself; proxima eval plays"):
        table(*GAME).require_question()


def test_an_episode_whose_last_path_begins_at_a_later_turn_is_not_lost():
    class Forking:
        async def generate(self, requests):
            for request in reversed(requests):
                made = Completion.of_text(request.prompt.uid, request.sample, "yes", [1])
                yield replace(made, turn=request.sample)

    prompt = Prompt(uid=3, messages=(), tokens=np.zeros(1, np.int32))
    asked = [Request(prompt=prompt, sample=sample, sampling=Sampling()) for sample in range(2)]
    assert [completion.key for completion in episodes_of(Forking(), asked)] == [(3, 0, 0), (3, 1, 1)]


@pytest.mark.slow
def test_a_whole_episode(table, roomy, proxima, tiny_model, monkeypatch):  # noqa: F811
    engine = Says(CALL, "42")
    (made,) = play_episodes(table(*TOOL), engine, ["6*7?"], sampling=Sampling(max_tokens=40), samples=1, seed=0)
    assert made.text == "42" and made.episode.reward is None and [s.role for s in made.episode.spans][1] == "user"
    monkeypatch.setattr(chat_session, "local_engine", lambda *_, **__: (tiny_tokenizer(), Says(XML, "42")))
    words = ("generate", tiny_model("llama"), "6*7?", "--tools", "proxima.environment.builtin:calculate")
    code, out, err = proxima(*words)
    assert code == 0, err
    assert out.startswith("user    6*7?\nmodel   ") and "\nmodel   42\n(time: queued " in out, out
    (row,) = json.loads(proxima(*words, "--json")[1])["completions"]
    assert sum(row["sampled"]) == len(row["sampled"]) - row["episode"]["spans"][1]["tokens"]
