"""`proxima generate --chat`: turns, pieces of an answer, stop strings, an interrupted answer, and what is refused."""

import io
from pathlib import Path

import pytest

from proxima.api import local_answers
from proxima.api.local_answers import ChatSession, generate, local_engine
from proxima.data import UserError
from proxima.engine.protocol import Sampling
from proxima.model.chat.written_text import prompt_and_beginning
from proxima.task import prompts
from tests.recipes.talker import talker

LONG = 14  # the seed of a first answer of more than 24 tokens


@pytest.fixture
def model(tmp_path):
    """It speaks in words, so that no token ends within a character."""
    return str(talker("smollm2", tmp_path))


@pytest.fixture
def conversation(model):
    def make(**sampling):
        place = local_engine(model, "float32", "cpu", print)
        return ChatSession(*place, Sampling(**{"max_tokens": 24} | sampling), system="Be brief.", seed=LONG)

    return make


@pytest.mark.slow
def test_the_pieces_of_an_answer_are_the_completion(conversation, model, monkeypatch):
    monkeypatch.setattr(local_answers, "PIECE_SECONDS", 0.0)
    pieces, chat = [], conversation()
    assert not chat.answer("hello", pieces.append)  # cut off
    place = local_engine(model, "float32", "cpu", print)
    (whole,) = generate(*place, ["hello"], sampling=chat.sampling, system="Be brief.", seed=LONG)
    assert "".join(pieces) == whole.text and len(pieces) > 1
    assert chat.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": whole.text}]


def test_a_turn_end_at_which_the_model_does_not_stop_is_named(model):
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n### End\n' }}{% endfor %}"
    (Path(model) / "chat_template.jinja").write_text(template)
    notes = []
    local_engine(model, "float32", "cpu", notes.append)
    assert len(notes) == 1 and notes[0].endswith("or --max-tokens; set --stop='### End'"), notes
    local_engine(model, "float32", "cpu", notes.append, stop=("### End",))
    assert len(notes) == 1


def test_a_turn_has_the_chat_before_it(conversation, monkeypatch):
    seen, chat = [], conversation(max_tokens=4)
    monkeypatch.setattr(
        prompts,
        "prompt_and_beginning",
        lambda messages, *more: seen.append(messages) or prompt_and_beginning(messages, *more),
    )
    for text in ("one", "two"):
        chat.answer(text, print)
    assert [message["role"] for message in seen[1]] == ["system", "user", "assistant", "user"]
    assert seen[1][2] == chat.messages[1] and seen[1][3]["content"] == "two"


@pytest.mark.slow
def test_a_stop_string_is_never_shown(conversation, monkeypatch):
    monkeypatch.setattr(local_answers, "PIECE_SECONDS", 0.0)
    plain, stopped = [], []
    conversation(max_tokens=40).answer("hello", plain.append)
    text = "".join(plain)
    stop = text[10:13]
    chat = conversation(max_tokens=40, stop=(stop,))
    assert chat.answer("hello", stopped.append) and "".join(stopped) == text[: text.index(stop)]


def test_an_interrupted_answer_is_the_models_turn(conversation):
    def stop(piece):
        raise KeyboardInterrupt

    chat = conversation()
    with pytest.raises(KeyboardInterrupt):
        chat.answer("hello", stop)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert chat.answer("again", lambda piece: None) is not None and len(chat.messages) == 4


def test_a_chat_that_is_too_long_keeps_its_turns(conversation):
    chat = conversation(max_tokens=4)
    chat.answer("hello", print)
    with pytest.raises(UserError, match="tokens"):
        chat.answer("x" * 600, print)
    assert len(chat.messages) == 2


def test_the_command(proxima, tiny_model, monkeypatch):
    model = tiny_model("llama")
    turns = []
    monkeypatch.setattr(
        ChatSession,
        "answer",
        lambda self, text, show: (
            turns.append((text, len(self.messages))) or show("hm\x1b[2J") or self.messages.append(0) or text != "long"
        ),
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n  two \n/new\nlong\n"))
    code, out, err = proxima("generate", model, "--chat", "--max-tokens", "3")
    assert (code, out) == (0, "hm␛[2J\n" * 3) and turns == [("one", 0), ("two", 1), ("long", 0)]
    assert err == "(cut off at --max-tokens 3)\n"
