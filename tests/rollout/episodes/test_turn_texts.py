"""The text of each turn of an episode, and what an agent gets of it."""

from dataclasses import replace

import numpy as np

from proxima.data.flow import Completion
from proxima.engine.protocol import Request, Sampling
from proxima.model.chat.written_text import written_text
from proxima.rollout.episodes.agent_player import AgentEpisode, AgentEpisodes, AskedTurn, Talk
from proxima.rollout.episodes.conversation import Conversation, TurnTemplate
from proxima.rollout.episodes.formats.chat import ChatMessage, ChatRequest
from proxima.rollout.episodes.played import Played
from proxima.rollout.episodes.settings import EpisodeSettings
from proxima.task.prompts import to_prompt
from proxima.task.protocol import Row
from tests.tiny import CHAT_TEMPLATE, END, tiny_tokenizer

USER = {"role": "user", "content": "Guess."}
OPENS = CHAT_TEMPLATE.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
CALL = '<invoke name="add"><parameter name="a">1</parameter></invoke>'


def played(template, *messages, stop=()):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    prompt = to_prompt(Row(messages=messages, chat=True), 0, tokenizer)
    request = Request(prompt=prompt, sample=0, sampling=Sampling(stop=stop))
    return Played(request, prompt, None, Conversation(TurnTemplate(tokenizer, {}), messages))


def answered(request, text):
    """The completion of an engine that samples this text."""
    tokenizer = tiny_tokenizer()
    tokens = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    text, by = written_text(tokenizer, tokens, begun=request.prompt.begun, ends=(0,), stop=request.sampling.stop)
    return replace(Completion.of_text(0, 0, text, tokens), turn=request.turn, stopped_by=by)


def texts_of(episode, *turns):
    begun = []
    for text in turns:
        request = episode.next_request(100)
        begun.append(request.prompt.begun)
        episode.add(answered(request, text + END))
        episode.conversation.observe([{"role": "user", "content": "lower"}])
    completion = episode.completion(cut="", reward=None, attempts=1)
    spans = [span.text for path in completion.paths for span in path.episode.turns if span.sampled]
    return begun, spans, completion.text


def test_each_turn_begins_with_what_the_template_opens():
    opened = ["<think>\n"] * 3
    texts = ["<think>\n5?</think>7", "<think>\n6", "<think>\n"]
    assert texts_of(played(OPENS, USER), "5?</think>7", "6", "") == (opened, texts, texts[-1])


def test_only_the_first_turn_continues_the_text_of_the_data():
    begun = {"role": "assistant", "content": "It is <|im_end|> "}
    texts = ["It is <|im_end|> 7", "8"]
    assert texts_of(played(CHAT_TEMPLATE, USER, begun), "7", "8") == (["It is <|im_end|> ", ""], texts, "8")


def test_an_agent_gets_neither_the_stop_string_nor_what_the_template_opened():
    """As an API for chats returns it. The call is read from all that the policy wrote."""
    stop = ("</invoke>",)
    talk = Talk(played(OPENS, USER, stop=stop), (TOOL,))
    episodes = AgentEpisodes(None, None, None, EpisodeSettings(), 2000, "minimax")
    episode = AgentEpisode(talk.played.request, lambda error: None)
    asked = ChatRequest(
        model="policy", messages=(ChatMessage(role="user", content="Guess."),), tools=(TOOL,), stop=stop
    )
    request = talk.played.next_request(200)
    completion = answered(request, f"One.</think>So:{CALL}")
    assert completion.text == f"<think>\nOne.</think>So:{CALL}"

    answer = episodes._answer(episode, AskedTurn(talk, request, ""), asked, completion)
    assert answer.content == "One.</think>So:"
    assert [dict(call.arguments) for call in answer.calls.values()] == [
        {"a": 1}
    ] and answer.finish_reason == "tool_calls"

    plain = replace(asked, tools=())
    answer = episodes._answer(episode, AskedTurn(talk, request, ""), plain, answered(request, "7</invoke>"))
    assert answer.content == "7" and talk.played.turns[-1].completion.text == "<think>\n7</invoke>"
