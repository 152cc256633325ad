"""The endpoint by raw HTTP: what is answered, in which form, and what is refused."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest

from proxima.data.episode import ToolCall
from proxima.rollout.episodes import endpoint as module
from proxima.rollout.episodes.endpoint import ChatEndpoint
from proxima.rollout.episodes.formats.chat import ChatAnswer
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
        return [answer or ChatAnswer(content="hi", prompt_tokens=3, completion_tokens=1)]

    async def run():
        endpoint = ChatEndpoint(("policy",), KEY.__eq__, answered, None, None)
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
        "extra_body": {}, "reasoning_effort": None, "verbosity": None, "max_completion_tokens": None, "max_tokens": 9,
        "logprobs": False, "n": 1, "seed": 3, "top_k": 20, "min_tokens": 0, "prompt_cache_key": "k",
    }  # fmt: skip
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    smol = {
        "messages": [{"role": "system", "content": parts}, {"role": "user", "content": parts}],
        "tools": [TOOL], "tool_choice": "required", "stop": ["Observation:"], "max_completion_tokens": 7,
    }  # fmt: skip
    responses, (first, second) = ask(sdk, smol)
    assert [response.status_code for response in responses] == [200, 200]
    assert first.tools == (TOOL,) and first.stop == () and first.max_tokens == 9
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


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aGVsbG8="}
USED = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
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
    *(({"properties": {"a": wrong}}, ".properties.a: must be an object") for wrong in (None, 3, "integer", [])),
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
    ("[]", "the request must be an object"),
    ({"messages": []}, "messages: must be a list"),
    ({"messages": "hello"}, "messages: must be a list"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages.0: must have a role"),
    ({"messages": [{"role": ["user"], "content": ""}]}, "messages.0: must have a role"),
    ({"messages": ["hello"]}, "messages.0: must have a role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "an image must be in the request",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, "parts of type text, image_url"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "assistant", "tool_calls": "add"}]}, "tool_calls: must be a list"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}, "read"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "5"}}]}]},
        "JSON of an object",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [DEEP]}]}, "tool_calls: can't be read"),
    ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate"),
    (HELLO | {"n": 0}, "n=0: must be"),
    (HELLO | {"n": True}, "n=True: must be"),
    (HELLO | {"logprobs": True, "top_logprobs": 2}, "top_logprobs=2: not supported"),
    (HELLO | {"response_format": {"type": "grammar"}}, "response_format="),
    (HELLO | {"response_format": "json_object"}, "response_format="),
    (HELLO | {"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema: must be"),
    (HELLO | {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, "schema: must be"),
    (HELLO | {"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice: names 'add'"),
    (HELLO | {"tool_choice": {"type": "allowed_tools"}}, "tool_choice="),
    (HELLO | {"continue_final_message": True, "add_generation_prompt": False}, "the last message must be"),
    (HELLO | {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt: must be"),
    *(
        (HELLO | {name: value}, f"{name}=")
        for name, value in {
            "guided_json": {"type": "object"},
            "structured_outputs": {"regex": "a"},
            "min_tokens": 3,
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "high",
            "verbosity": "low",
            "ignore_eos": True,
            "a field of next year": 1,
        }.items()
    ),
    (HELLO | {"max_tokens": 0}, "max_tokens=0: must be"),
    (HELLO | {"max_tokens": "many"}, "max_tokens='many': must be"),
    (HELLO | {"max_completion_tokens": True}, "max_completion_tokens=True: must be"),
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


ASKED = {"model": "policy", "input": "hello"}
OF_RESPONSES = [
    ({"model": "policy", "input": []}, "input: must be a list of at least one"),
    (ASKED | {"input": 3}, "input: must be a text or a list"),
    (ASKED | {"input": [{"type": "reasoning", "summary": []}]}, "input.0.type="),
    (ASKED | {"input": [{"role": "robot", "content": "x"}]}, "input.0: must have a role"),
    (ASKED | {"input": [{"type": "function_call", "name": "a", "arguments": "{"}]}, "input.0.arguments: can't be read"),
    (ASKED | {"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "parts of type input_text"),
    (ASKED | {"input": [{"role": "assistant", "content": [IMAGE]}]}, "only messages of users and tools show images"),
    (ASKED | {"previous_response_id": "resp_1"}, "no response of this episode that was stored has this id"),
    (ASKED | {"text": {"format": {"type": "regex"}}}, "text.format="),
    (ASKED | {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema: must be"),
    (ASKED | {"text": "json"}, "text: must be an object"),
    (ASKED | {"text": {"verbosity": "low"}}, "text.verbosity="),
    (ASKED | {"reasoning": {"effort": "high"}}, "reasoning.effort="),
    (ASKED | {"tools": [{"type": "web_search"}]}, "tools.0.type="),
    (ASKED | {"tools": [{"type": "function", "name": ""}]}, "tools.0.function.name: must be a text"),
    (ASKED | {"tool_choice": {"type": "function", "name": "add"}}, "tool_choice: names 'add'"),
    (ASKED | {"include": ["file_search_call.results"]}, "include="),
    *(
        (ASKED | {name: value}, f"{name}=")
        for name, value in {"background": True, "truncation": "auto", "stop": "x"}.items()
    ),
]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
FORM = {"type": "json_schema", "schema": SCHEMA}
TOLD = {"model": "policy", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
OF_MESSAGES = [
    (TOLD | {"messages": []}, "messages: must be a list of at least one"),
    (TOLD | {"messages": [{"role": "tool", "content": "x"}]}, "messages.0: must have a role"),
    (TOLD | {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "parts of type text, image"),
    (TOLD | {"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "parts of type text"),
    (TOLD | {"messages": [{"role": "assistant", "content": [USED]}]}, "calls without their results"),
    (TOLD | {"messages": [{"role": "assistant", "content": [USED | {"input": 3}]}]}, "content.0.input: must be"),
    (TOLD | {"system": [{"type": "image"}]}, "system: must be a text, or parts of type text"),
    (TOLD | {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking="),
    (TOLD | {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type="),
    (TOLD | {"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "type: must be 'object'"),
    (TOLD | {"tool_choice": {"type": "tool", "name": "add"}}, "tool_choice: names 'add'"),
    (TOLD | {"tool_choice": "auto"}, "tool_choice="),
    (TOLD | {"output_config": {"effort": "low"}}, "output_config.effort="),
    (TOLD | {"output_config": "json"}, "output_config: must be an object"),
    (TOLD | {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: must be"),
    (TOLD | {"output_format": {"type": "xml"}}, "output_format="),
    (TOLD | {"output_config": {"format": FORM}, "output_format": FORM}, "leave one of the two out"),
    (TOLD | {"max_tokens": 0}, "max_tokens=0: must be"),
    (TOLD | {"logprobs": True}, "logprobs="),
]


@pytest.mark.parametrize(("path", "refused"), [("/responses", OF_RESPONSES), ("/messages", OF_MESSAGES)])
def test_what_the_other_apis_refuse(path, refused):
    responses, asked = ask(*(body for body, _ in refused), path=path)
    for (body, says), response in zip(refused, responses, strict=True):
        error = response.json()["error"]
        assert response.status_code == 400 and says in error["message"], body
        assert error["type"] == "invalid_request_error" and len(error["message"]) < 300
    assert not asked


def test_the_form_of_an_answer_is_asked_for_in_each_api():
    named = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
    plain = {"type": "text"}
    of_apis = {
        "/chat/completions": [
            (HELLO | {"response_format": named}, "response_format"),
            (HELLO | {"response_format": {"type": "json_object"}}, "response_format"),
            (HELLO | {"response_format": plain}, None),
        ],
        "/responses": [
            (ASKED | {"text": {"format": FORM | {"name": "a", "strict": True}, "verbosity": "medium"}}, "text.format"),
            (ASKED | {"text": {"format": {"type": "json_object"}}}, "text.format"),
            (ASKED | {"text": {"format": plain}}, None),
        ],
        "/messages": [
            (TOLD | {"output_config": {"format": FORM, "effort": None}}, "output_config.format"),
            (TOLD | {"output_format": FORM}, "output_format"),
            (TOLD, None),
        ],
    }
    for path, bodies in of_apis.items():
        responses, asked = ask(*(body for body, _ in bodies), path=path)
        assert [response.status_code for response in responses] == [200, 200, 200]
        first, second, free = (request.grammar for request in asked)
        assert first.schema == json.dumps(SCHEMA)  # its names are in the order in which they were sent
        assert second.schema == (json.dumps(SCHEMA) if path == "/messages" else '{"type": "object"}')
        assert free is None
        assert [form and form.field for form in (first, second, free)] == [name for _, name in bodies]
        if path == "/responses":
            assert responses[1].json()["text"] == {"format": {"type": "json_object"}}
            assert responses[2].json()["text"] == {"format": plain}


def test_an_unknown_key_in_anthropics_form():
    (response,), _ = ask(TOLD, path="/messages", key="", **{"x-api-key": "another"})
    assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
    (response,), _ = ask(TOLD, path="/messages", key="", **{"x-api-key": KEY})
    assert response.json()["content"] == [{"type": "text", "text": "hi"}]


def test_what_claude_code_and_codex_send_is_taken():
    cached = {"cache_control": {"type": "ephemeral"}}
    claude = TOLD | {
        "system": [{"type": "text", "text": "Be brief.", **cached}], "metadata": {"user_id": "u"}, "stream": True,
        "tools": [{"name": "Bash", "description": "Runs.", "input_schema": {"type": "object"}, **cached}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}, "thinking": {"type": "disabled"},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello", **cached}]}],
        "stop_sequences": ["END"], "temperature": 1, "service_tier": "auto", "context_management": {},
    }  # fmt: skip
    (response,), (request,) = ask(
        claude, path="/messages", answer=replace(CALLS, finish_reason="stop", stopped_by="END")
    )
    assert request.tools[0]["function"]["name"] == "Bash" and request.stop == ("END",) and request.max_tokens == 5
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    names = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", *block, *block, "message_delta", "message_stop"]
    assert [event["type"] for event in events] == names
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
    assert events[-2]["usage"]["output_tokens"] == 2 and events[0]["message"]["usage"]["input_tokens"] == 5
    codex = ASKED | {
        "instructions": "Be brief.", "store": False, "stream": True, "include": ["reasoning.encrypted_content"],
        "tools": [{"type": "function", "name": "shell", "parameters": {"type": "object"}, "strict": False}],
        "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": None, "prompt_cache_key": "k", "text": None,
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
    }  # fmt: skip
    (response,), (request,) = ask(codex, path="/responses", answer=replace(CALLS, finish_reason="length"))
    assert [message.role for message in request.messages] == ["system", "user"]
    names = [line[7:].removeprefix("response.") for line in response.text.splitlines() if line.startswith("event: ")]
    assert names == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "incomplete",
    ]  # fmt: skip


def test_a_request_that_never_ends_is_refused_without_being_kept(monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 1 << 20)
    (response,), asked = ask({"messages": [{"role": "user", "content": "x" * (1 << 20)}]})
    assert response.status_code == 413 and not asked
    assert response.json()["error"]["message"] == "the body has more than 1 MiB"


def test_models_and_no_other_address():
    (models,), _ = ask(b"", path="/models", method="GET")
    assert [model["id"] for model in models.json()["data"]] == ["policy"]
    for path, method, status in (("/completions", "POST", 404), ("/chat/completions", "GET", 405)):
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

        endpoint = ChatEndpoint(("policy",), KEY.__eq__, answered, None, None)
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
        endpoint = ChatEndpoint(("policy",), KEY.__eq__, None, None, None)
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
    pair = {
        "from": {"type": "array", "items": [{"type": "number"}, {"type": "number"}]},
        "any": {"items": True},
        "b": True,
        "c": {"anyOf": [False, {}]},
    }
    given = [
        {"type": "function", "function": {"name": "now"}},
        of_parameters({"properties": pair}),
        tool(parameters=None, description=None, strict=None),
        of_parameters({"properties": nested, "required": ["a"], "additionalProperties": False, "$defs": {}}),
        tool(parameters={}),
    ]
    responses, (request,) = ask(HELLO | {"tools": given})
    assert responses[0].status_code == 200 and request.tools == tuple(given)


PAYING = [
    ([], "must be a JSON object"),
    ({"id": "x", "reward": 1, "weight": 2}, "'weight' is unknown; a reward has id, reward and index"),
    ({"reward": 1}, "id=None: must be the id of an answer"),
    ({"id": 3, "reward": 1}, "id=3: must be the id of an answer"),
    ({"id": "x"}, "reward=None: must be a finite number"),
    ({"id": "x", "reward": True}, "reward=True: must be a finite number"),
    ({"id": "x", "reward": "1"}, "reward='1': must be a finite number"),
    ('{"id": "x", "reward": 1e999}', "must be a finite number"),
    ({"id": "x", "reward": 1, "index": -1}, "index=-1: must be the number of a choice"),
    ({"id": "x", "reward": 1, "index": 1.5}, "index=1.5: must be the number of a choice"),
]


def test_what_is_no_reward_is_refused_in_one_line():
    responses, _ = ask(*(body for body, _ in PAYING), path="/rewards")
    for response, (body, said) in zip(responses, PAYING, strict=True):
        message = response.json()["error"]["message"]
        assert response.status_code == 400 and said in message and "\n" not in message, body
    (unknown, none, wrong), _ = ask({"id": "x", "reward": 1}, {"id": "", "reward": 1}, b"{", path="/rewards")
    assert unknown.status_code == none.status_code == 404 and wrong.status_code == 400
    (other,), _ = ask({"id": "x", "reward": 1}, path="/rewards", key="of another run")
    assert other.status_code == 401 and "no episode has this API key, or it is over" in other.text
