"""The endpoint by raw HTTP: what is answered, in which form, and what is refused."""

import asyncio
import json

import httpx
import pytest

from proxima.data.episode import ToolCall
from proxima.rollout.episodes import endpoint as module
from proxima.rollout.episodes.endpoint import ChatAnswer, ChatEndpoint
from tests.uvicorn_ticks import quick_ticks

pytestmark = pytest.mark.slow

KEY = "an-episode"
HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
DEEP = {"function": {"name": "add", "arguments": "[" * 100_000}}
ADD = {"call_0": ToolCall(name="add", arguments={"a": 1})}
CALLS = ChatAnswer(content="so", calls=ADD, finish_reason="tool_calls", prompt_tokens=5, completion_tokens=2)


@quick_ticks()
def ask(*bodies, answer=None, key=KEY, path="/chat/completions", method="POST", **more):
    """The response to each body, and what the policy was asked."""
    asked = []

    async def answered(key, request):
        assert key == KEY
        asked.append(request)
        return answer or ChatAnswer(content="hi", prompt_tokens=3, completion_tokens=1)

    async def run():
        endpoint = ChatEndpoint(("policy",), KEY.__eq__, answered)
        await endpoint.start()
        headers = more | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            async with httpx.AsyncClient(headers=headers, timeout=600) as client:
                made = [{"content": b} if isinstance(b, bytes | str) else {"json": b} for b in bodies]
                return [await client.request(method, endpoint.address + path, **each) for each in made]
        finally:
            await endpoint.close()

    return asyncio.run(run()), asked


def test_an_answer_has_openais_form():
    (response,), (request,) = ask(HELLO)
    body = response.json()
    assert response.status_code == 200 and body["object"] == "chat.completion" and body["model"] == "policy"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hi"}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    assert request.messages[0].content == "hello" and request.max_tokens is None and request.tools == ()
    (uncounted,), _ = ask(HELLO, answer=ChatAnswer(content=""))
    assert set(uncounted.json()["usage"].values()) == {0}


def test_what_openai_agents_and_smolagents_send_is_taken():
    sdk = HELLO | {
        "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False, "metadata": {"trace": "1"},
        "store": False,
        "temperature": 0.3, "top_p": 1.0, "stream": False, "stream_options": None, "response_format": None, "user": "u",
        "extra_body": {}, "reasoning_effort": None, "verbosity": None,
    }  # fmt: skip
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    smol = {
        "messages": [{"role": "system", "content": parts}, {"role": "user", "content": parts}],
        "tools": [TOOL], "tool_choice": "required", "stop": ["Observation:"], "max_completion_tokens": 7,
    }  # fmt: skip
    responses, (first, second) = ask(sdk, smol)
    assert [response.status_code for response in responses] == [200, 200]
    assert first.tools == (TOOL,) and first.stop == ()
    assert [message.content for message in second.messages] == ["ab", "ab"]
    assert second.stop == ("Observation:",) and second.max_tokens == 7
    _, (silent,) = ask(HELLO | {"tools": [TOOL], "tool_choice": "none"})
    assert silent.tools == ()


def test_a_chat_with_calls_comes_back():
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "developer", "content": "be good"},
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "call_0"},
    ]
    (response,), (request,) = ask({"messages": chat, "tools": [TOOL]}, answer=CALLS)
    assert [message.role for message in request.messages] == ["system", "user", "assistant", "tool"]
    assert request.messages[2].calls == (ToolCall(name="add", arguments={"a": 1}),)
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["tool_calls"] == [call]


def test_a_stream():
    (response,), _ = ask(HELLO | {"stream": True, "stream_options": {"include_usage": True}}, answer=CALLS)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    events = [json.loads(event) for event in events]
    assert done == "[DONE]" and len({event["id"] for event in events}) == 1
    delta = events[0]["choices"][0]["delta"]
    assert delta["content"] == "so" and delta["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert delta["tool_calls"][0]["index"] == 0 and events[1]["choices"][0]["finish_reason"] == "tool_calls"
    assert events[2]["choices"] == [] and events[2]["usage"]["total_tokens"] == 7
    (plain,), _ = ask(HELLO | {"stream": True})
    assert "usage" not in plain.text


def test_a_wrong_key():
    for key in ("", "another"):
        (response,), asked = ask(HELLO, key=key)
        assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key" and not asked


def tool(**changed):
    return {"type": "function", "function": TOOL["function"] | changed}


def of_parameters(parameters):
    return tool(parameters={"type": "object"} | parameters if isinstance(parameters, dict) else parameters)


def call_of(name, arguments):
    return {"function": {"name": name, "arguments": arguments}}


WRONG_TOOLS = [
    ({"name": 3}, "name: must be a text"),
    ({"name": ""}, "name: must be a text"),
    ({"description": ["adds"]}, "description: must be a text"),
    *(
        ({"parameters": wrong}, "parameters: must be an object")
        for wrong in (3, "object", [], [["properties", {}]], True)
    ),
]
WRONG_PARAMETERS = [
    ({"type": "array"}, ".type: must be 'object'"),
    ({"type": ["object"]}, ".type: must be 'object'"),
    *(({"properties": wrong}, ".properties: must be an object") for wrong in (None, 3, "a", ["a"], [["a", {}]], False)),
    *(({"properties": {"a": wrong}}, ".properties.a: must be an object") for wrong in (None, 3, "integer", [], True)),
    ({"properties": {"a": {"type": 3}}}, ".properties.a.type: must be a text"),
    ({"properties": {"a": {"type": [3]}}}, ".properties.a.type: must be a text"),
    ({"properties": {"a": {"type": None}}}, ".properties.a.type: must be a text"),
    ({"properties": {"a": {"enum": "abc"}}}, ".properties.a.enum: must be a list"),
    ({"properties": {"a": {"description": {}}}}, ".properties.a.description: must be a text"),
    ({"properties": {"a": {"anyOf": [3]}}}, ".properties.a.anyOf.0: must be an object"),
    ({"properties": {"a": {"anyOf": {}}}}, ".properties.a.anyOf: must be a list"),
    ({"properties": {"a": {"items": "integer"}}}, ".properties.a.items: must be an object"),
    ({"properties": {"a": {"properties": {"b": 3}}}}, ".properties.a.properties.b: must be an object"),
    ({"required": "a"}, ".required: must be a list of texts"),
    ({"required": [1]}, ".required: must be a list of texts"),
]
REFUSED = [
    ("{", "can't be read"),
    ("[]", "messages: must be a list"),
    ({"messages": []}, "messages: must be a list"),
    ({"messages": "hello"}, "messages: must be a list"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages.0: must have a role"),
    ({"messages": [{"role": ["user"], "content": ""}]}, "messages.0: must have a role"),
    ({"messages": ["hello"]}, "messages.0: must have a role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "parts of type text"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant", "tool_calls": "add"}]}, "tool_calls: must be a list"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}, "read"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "5"}}]}]},
        "JSON of an object",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [DEEP]}]}, "tool_calls: can't be read"),
    ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate"),
    (HELLO | {"n": 2}, "n=2: not supported"),
    (HELLO | {"logprobs": True}, "logprobs=true: not supported"),
    (HELLO | {"response_format": {"type": "json_object"}}, "response_format="),
    (HELLO | {"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice="),
    (HELLO | {"max_tokens": 0}, "max_tokens=0: must be"),
    (HELLO | {"max_tokens": "many"}, "max_tokens='many': must be"),
    (HELLO | {"max_completion_tokens": True}, "max_tokens=True: must be"),
    (HELLO | {"stop": [""]}, "stop: must be"),
    (HELLO | {"tools": {"add": {}}}, "tools: must be"),
    (HELLO | {"tools": [{"type": "code_interpreter"}]}, "tools.0: must be"),
    (HELLO | {"tools": [TOOL, "add"], "tool_choice": "none"}, "tools.1: must be"),
    *((HELLO | {"tools": [tool(**changed)]}, f"tools.0.function.{says}") for changed, says in WRONG_TOOLS),
    *((HELLO | {"tools": [of_parameters(p)]}, f"tools.0.function.parameters{says}") for p, says in WRONG_PARAMETERS),
    (HELLO | {"stop": ["x"] * 65}, "stop: has 65 texts; send at most 64"),
    (HELLO | {"max_tokens": -(10**300)}, "max_tokens=-1000"),
    (json.dumps(HELLO | {"tools": [tool(description="\ud800")]}), "lone surrogate"),
    (b'\xff\xfe{"messages": []}', "can't be read"),
    ('{"messages": ' + "[" * 100_000, "can't be read: more than 64 levels"),
    (HELLO | {"messages": [{"role": "assistant", "tool_calls": [call_of({"x": 1}, "{}")]}]}, "must have a name"),
    (HELLO | {"messages": [{"role": "assistant", "tool_calls": [call_of("a", "[]")]}]}, "must have a name"),
    (HELLO | {"messages": [{"role": "assistant", "tool_calls": [call_of("a", '[["b", 1]]')]}]}, "must have a name"),
    (HELLO | {"messages": [{"role": "assistant", "tool_calls": [call_of("a", {"b": 1})]}]}, "can't be read"),
    (HELLO | {"messages": [{"role": "assistant", "tool_calls": [call_of("a", '{"b": "\\ud800"}')]}]}, "can't be read"),
    (HELLO | {"stream_options": "all", "stream": True}, "stream_options: must be"),
]


def test_what_is_refused_in_openais_form():
    responses, asked = ask(*(body for body, _ in REFUSED))
    for (body, says), response in zip(REFUSED, responses, strict=True):
        error = response.json()["error"]
        assert response.status_code == 400 and says in error["message"] and len(error["message"]) < 300, body
        assert error["type"] == "invalid_request_error" and "\n" not in error["message"]
    assert not asked


def test_a_request_that_never_ends_is_refused_without_being_kept(monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 1 << 20)
    (response,), asked = ask({"messages": [{"role": "user", "content": "x" * (1 << 20)}]})
    assert response.status_code == 413 and not asked
    assert response.json()["error"]["message"] == "the body has more than 1 MiB"


def test_models_and_no_other_address():
    (models,), _ = ask(b"", path="/models", method="GET")
    assert [model["id"] for model in models.json()["data"]] == ["policy"]
    for path, method, status in (("/responses", "POST", 404), ("/chat/completions", "GET", 405)):
        (response,), _ = ask(HELLO, path=path, method=method)
        assert response.status_code == status


@quick_ticks()
def test_an_agent_that_goes_away_ends_its_turn():
    async def run():
        begun, ended = asyncio.Event(), asyncio.Event()

        async def answered(key, request):
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.set()
                raise

        endpoint = ChatEndpoint(("policy",), KEY.__eq__, answered)
        await endpoint.start()
        try:
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=600) as client:
                asked = asyncio.create_task(client.post(endpoint.address + "/chat/completions", json=HELLO))
                await begun.wait()
                asked.cancel()
                await asyncio.wait_for(ended.wait(), 600)
        finally:
            await endpoint.close()

    asyncio.run(run())


@quick_ticks()
def test_nothing_is_read_of_a_request_without_a_known_key():
    """A body that never comes: it would be awaited, and it and many others would be held."""

    async def run():
        endpoint = ChatEndpoint(("policy",), KEY.__eq__, None)
        await endpoint.start()
        port = int(endpoint.address.rpartition(":")[2].partition("/")[0])
        try:
            answers = []
            for key in ("Bearer another", "Bearer ", "Basic an-episode"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                lines = ("POST /v1/chat/completions HTTP/1.1", "Host: a", f"Authorization: {key}", "Content-Length: 99")
                writer.write("\r\n".join([*lines, "", "{"]).encode())
                answers.append(await asyncio.wait_for(reader.readline(), 600))
                writer.close()
            return answers, endpoint._reader.held
        finally:
            await endpoint.close()

    answers, held = asyncio.run(run())
    assert answers == [b"HTTP/1.1 401 Unauthorized\r\n"] * 3 and held == 0


def test_tools_without_parameters_and_nested_ones_are_taken():
    nested = {"a": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": ["null", "integer"]}]}}}
    pair = {"from": {"type": "array", "items": [{"type": "number"}, {"type": "number"}]}, "any": {"items": True}}
    given = [
        {"type": "function", "function": {"name": "now"}},
        of_parameters({"properties": pair}),
        tool(parameters=None, description=None, strict=None),
        of_parameters({"properties": nested, "required": ["a"], "additionalProperties": False, "$defs": {}}),
        tool(parameters={}),
    ]
    responses, (request,) = ask(HELLO | {"tools": given})
    assert responses[0].status_code == 200 and request.tools == tuple(given)
