"""What agents do with a chat, in each API: `HABITS` by name, for speakers that send the shapes of the official SDKs by
plain HTTP, or are these SDKs. Imports only the standard library until a speaker needs more.

A chat is a list of messages `{"role", "text", "calls", "call_id"}`, with calls `{"id", "name", "arguments"}`. The
policy does what the last `do:` of a chat says: `say`, `call`, `two` (calls)."""

import asyncio
import json
import time
import uuid
from urllib.request import Request, urlopen

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "any": True}, "required": ["a"]}
ADD = {"name": "add", "description": "Add one.", "parameters": SCHEMA}
OTHER = {"name": "other", "description": "Another one.", "parameters": {"type": "object", "properties": {}}}


def user(text):
    return {"role": "user", "text": text}


def system(text):
    return {"role": "system", "text": text}


def results(message, text="do:say 2"):
    return [{"role": "tool", "text": text, "call_id": call["id"]} for call in message["calls"]]


# ---- the requests of each API ----------------------------------------------------------------------------------------


def chat_body(chat, tools=(), force="", **more):
    messages = []
    for m in chat:
        message = {"role": m["role"], "content": m["text"]}
        if m.get("calls"):
            message["content"] = m["text"] or None
            message["tool_calls"] = [
                {"id": c["id"], "type": "function",
                 "function": {"name": c["name"], "arguments": json.dumps(c["arguments"])}}
                for c in m["calls"]
            ]  # fmt: skip
        if m["role"] == "tool":
            message["tool_call_id"] = m["call_id"]
        messages.append(message)
    body = {"model": "policy", "messages": messages} | more
    if tools:
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
    if force:
        body["tool_choice"] = {"type": "function", "function": {"name": force}}
    return body


def read_chat(answer, choice=0):
    message = answer["choices"][choice]["message"]
    calls = [
        {"id": c["id"], "name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])}
        for c in message.get("tool_calls") or ()
    ]
    return {"role": "assistant", "text": message["content"] or "", "calls": calls}


def responses_body(chat, tools=(), force="", **more):
    items, body = [], {"model": "policy"} | more
    if chat and chat[0]["role"] == "system":
        body["instructions"], chat = chat[0]["text"], chat[1:]
    for m in chat:
        if m["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": m["call_id"], "output": m["text"]})
            continue
        kind = "output_text" if m["role"] == "assistant" else "input_text"
        if m["text"] or not m.get("calls"):
            parts = [{"type": kind, "text": m["text"]}]
            items.append({"type": "message", "role": m["role"], "content": parts})
        items += [
            {"type": "function_call", "call_id": c["id"], "name": c["name"], "arguments": json.dumps(c["arguments"])}
            for c in m.get("calls") or ()
        ]
    body["input"] = items
    if tools:
        body["tools"] = [{"type": "function", **tool} for tool in tools]
    if force:
        body["tool_choice"] = {"type": "function", "name": force}
    return body


def read_response(answer):
    text = "".join(part["text"] for item in answer["output"] for part in item.get("content") or ())
    calls = [
        {"id": item["call_id"], "name": item["name"], "arguments": json.loads(item["arguments"])}
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    return {"role": "assistant", "text": text, "calls": calls, "response": answer["id"]}


def messages_body(chat, tools=(), force="", **more):
    messages, body = [], {"model": "policy", "max_tokens": 200} | more
    if chat and chat[0]["role"] == "system":
        body["system"] = [{"type": "text", "text": chat[0]["text"], "cache_control": {"type": "ephemeral"}}]
        chat = chat[1:]
    for m in chat:
        if m["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": m["call_id"], "content": m["text"]}
            if messages[-1]["role"] == "user":
                messages[-1]["content"].append(block)
            else:
                messages.append({"role": "user", "content": [block]})
            continue
        blocks = [{"type": "text", "text": m["text"]}] if m["text"] else []
        calls = m.get("calls") or ()
        blocks += [{"type": "tool_use", "id": c["id"], "name": c["name"], "input": c["arguments"]} for c in calls]
        messages.append({"role": m["role"], "content": blocks})
    body["messages"] = messages
    if tools:
        body["tools"] = [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]}
                         for t in tools]  # fmt: skip
    if force:
        body["tool_choice"] = {"type": "tool", "name": force}
    return body


def read_message(answer):
    text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    calls = [
        {"id": block["id"], "name": block["name"], "arguments": block["input"]}
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    return {"role": "assistant", "text": text, "calls": calls}


# ---- streams: the complete answer that a client makes of the events --------------------------------------------------


def joined_chat(events):
    message = {"role": "assistant", "content": "", "tool_calls": []}
    for each in events:
        for choice in each["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["tool_calls"] += delta.get("tool_calls") or []
    return {"choices": [{"message": message}]}


def joined_response(events):
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    kinds = [each["type"] for each in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    whole, items = events[-1]["response"], {}
    for each in events[2:-1]:
        place = each["output_index"]
        if each["type"] == "response.output_item.added":
            items[place] = json.loads(json.dumps(each["item"]))
        elif each["type"] == "response.content_part.added":
            items[place]["content"].append(dict(each["part"]))
        elif each["type"] == "response.output_text.delta":
            items[place]["content"][each["content_index"]]["text"] += each["delta"]
        elif each["type"] == "response.function_call_arguments.delta":
            items[place]["arguments"] += each["delta"]
    made = read_response({"id": whole["id"], "output": [items[place] for place in sorted(items)]})
    assert made == read_response(whole)
    return whole


def joined_message(events):
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    whole = {**events[0]["message"], "content": []}
    for each in events[1:-2]:
        if each["type"] == "content_block_start":
            assert each["index"] == len(whole["content"])
            whole["content"].append({**each["content_block"], "json": ""})
        elif each["type"] == "content_block_delta":
            block, delta = whole["content"][each["index"]], each["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            else:
                block["json"] += delta["partial_json"]
    for block in whole["content"]:
        if written := block.pop("json"):
            block["input"] = json.loads(written)
    return whole | events[-2]["delta"]


FORMS = {
    "chat": ("/chat/completions", chat_body, read_chat, joined_chat),
    "responses": ("/responses", responses_body, read_response, joined_response),
    "messages": ("/messages", messages_body, read_message, joined_message),
}


class Plain:
    """Sends what the SDKs send, by plain HTTP."""

    def __init__(self, api, base_url, api_key):
        self.api, self.base_url, self.api_key = api, base_url, api_key
        self.path, self.body, self.read, self.joined = FORMS[api]

    def post(self, body, read=None, path=""):
        own = {"x-api-key": self.api_key} if self.api == "messages" else {"Authorization": f"Bearer {self.api_key}"}
        headers = own | {"Content-Type": "application/json"}
        with urlopen(Request(self.base_url + self.path + path, json.dumps(body).encode(), headers)) as answer:
            return answer.read(read).decode() if read else answer.read().decode()

    async def answer(self, body):
        """The JSON of an answer; of a stream, what its events say."""
        text = await asyncio.to_thread(self.post, body)
        if not body.get("stream"):
            return json.loads(text)
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return self.joined([json.loads(each) for each in events if each != "[DONE]"])

    async def say(self, chat, tools=(), **more):
        return self.read(await self.answer(self.body(chat, tools, **more)))

    async def count(self, body):
        """The number of tokens of a chat of Messages."""
        return json.loads(await asyncio.to_thread(self.post, body, None, "/count_tokens"))["input_tokens"]

    async def leave(self, chat):
        """Stop reading a stream after a few bytes."""
        await asyncio.to_thread(self.post, self.body(chat, stream=True), 16)


class OpenAiSdk(Plain):
    """The package openai, in both of its APIs."""

    def __init__(self, api, base_url, api_key):
        from openai import AsyncOpenAI

        super().__init__(api, base_url, api_key)
        self.client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)

    async def answer(self, body):
        known = {"continue_final_message", "add_generation_prompt"}
        extra = {name: body.pop(name) for name in known & body.keys()}
        if self.api == "responses" and body.pop("stream", False):
            async with self.client.responses.stream(**body) as stream:
                return (await stream.get_final_response()).to_dict()
        if self.api == "responses":
            return (await self.client.responses.create(**body)).to_dict()
        if not body.get("stream"):
            return (await self.client.chat.completions.create(**body, extra_body=extra)).to_dict()
        del body["stream"]
        async with self.client.chat.completions.stream(**body) as stream:
            return (await stream.get_final_completion()).to_dict()

    async def leave(self, chat):
        create = self.client.responses.create if self.api == "responses" else self.client.chat.completions.create
        async for _ in await create(**self.body(chat, stream=True)):
            break


class AnthropicSdk(Plain):
    """The package anthropic."""

    def __init__(self, api, base_url, api_key):
        from anthropic import AsyncAnthropic

        super().__init__(api, base_url, api_key)
        self.client = AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key, max_retries=0)

    async def answer(self, body):
        if not body.pop("stream", False):
            return (await self.client.messages.create(**body)).to_dict()
        async with self.client.messages.stream(**body) as stream:
            return (await stream.get_final_message()).to_dict()

    async def count(self, body):
        return (await self.client.messages.count_tokens(**body)).input_tokens

    async def leave(self, chat):
        async for _ in await self.client.messages.create(**self.body(chat, stream=True)):
            break


# ---- habits ----------------------------------------------------------------------------------------------------------


async def one_turn(say, row):
    await say([user("do:say")])


async def several_turns(say, row, **more):
    chat = [system("Be brief."), user("do:say")]
    for _ in range(3):
        chat += [await say(chat, **more), user("do:say more")]
    await say(chat, **more)


async def streamed(say, row):
    await several_turns(say, row, stream=True)


async def uses_a_tool(say, row, **more):
    chat = [user("do:call")]
    for asked in ("do:call 2", "do:say 3"):
        message = await say(chat, [ADD], **more)
        assert [call["name"] for call in message["calls"]] == ["add"]
        chat += [message, *results(message, asked)]
    assert not (await say(chat, [ADD], **more))["calls"]


async def streams_tools(say, row):
    await uses_a_tool(say, row, stream=True)


async def parallel_calls(say, row):
    chat = [system("Be brief."), user("do:two")]
    message = await say(chat, [ADD])
    assert [call["arguments"]["a"] for call in message["calls"]] == [1, 2]
    await say([*chat, message, *results(message)], [ADD])


async def leaves_a_stream(say, row):
    await say.speaker.leave([user("do:say")])
    chat = [user("do:say")]
    await say([*chat, await say(chat), user("do:say more")])


async def retries(say, row):
    chat = [user("do:say")]
    first = await say(chat)
    await say(chat)
    more = [*chat, first, user("do:say more")]
    await say(more)
    await say(more)


async def parallel_branches(say, row):
    chat = [user("do:say")]
    chat.append(await say(chat))
    await asyncio.gather(*(say([*chat, user(f"do:say branch {i}")]) for i in range(3)))


async def helpers(say, row):
    own = [user("do:say")]
    own.append(await say(own))
    helped = await asyncio.gather(*(say([system(f"You are {i}."), user("do:say help")]) for i in range(2)))
    await say([*own, user("do:say " + " ".join(message["text"] for message in helped))])


async def edits_a_question(say, row):
    chat = [user("do:say")]
    answer = await say(chat)
    await say([user("do:say another"), answer, user("do:say more")])


async def edits_an_answer(say, row):
    chat = [user("do:say")]
    chat.append(await say(chat))
    await say([chat[0], {**chat[1], "text": "edited"}, user("do:say more")])


async def sliding_window(say, row):
    chat = [system("Be brief.")]
    for i in range(4):
        chat = [chat[0], *chat[1:][-2:], user(f"do:say {i}")]
        chat.append(await say(chat))


async def summarises(say, row):
    chat = [user("do:say")]
    for _ in range(2):
        chat += [await say(chat), user("do:say more")]
    await say([system("So far: much."), user("do:say at last")])


async def tools_that_change(say, row):
    chat = [user("do:call")]
    message = await say(chat, [ADD])
    chat += [message, *results(message, "do:say")]
    chat += [await say(chat, [ADD, OTHER]), user("do:say without")]
    await say(chat)


async def strips_answers(say, row):
    chat = [user("do:pad")]
    message = await say(chat)
    await say([*chat, {**message, "text": message["text"].strip()}, user("do:say more")])


async def other_ids(say, row):
    chat = [user("do:call")]
    message = await say(chat, [ADD])
    calls = [{**call, "id": f"own_{i}"} for i, call in enumerate(message["calls"])]
    message = {**message, "calls": calls}
    await say([*chat, message, *results(message)], [ADD])


async def a_clock_every_turn(say, row):
    chat = [user("do:say")]
    for _ in range(3):
        now = [system(f"It is {time.time_ns()} in /tmp/{uuid.uuid4()}.")]
        chat += [await say([*now, *chat]), user("do:say more")]


async def is_cut_off(say, row):
    chat = [user("do:say")]
    name = "max_output_tokens" if say.speaker.api == "responses" else "max_tokens"
    message = await say(chat, **{name: 2})
    await say([*chat, message, user("do:say more")])


async def empty_results(say, row):
    chat = [user("do:call")]
    message = await say(chat, [ADD])
    await say([*chat, message, *results(message, ""), user("do:say")], [ADD])


async def forces_a_tool(say, row):
    chat = [user("do:say")]
    message = await say(chat, [OTHER, ADD], force="add")
    assert [(call["name"], call["arguments"]) for call in message["calls"]] == [("add", {"a": 1})]
    await say([*chat, message, *results(message)], [OTHER, ADD])


async def prefills(say, row):
    """An answer that the agent has begun, joined with it or sent as a message of its own."""
    own = {"continue_final_message": True, "add_generation_prompt": False} if say.speaker.api == "chat" else {}
    chat = [user("do:say"), {"role": "assistant", "text": "I think", "calls": []}]
    message = await say(chat, **own)
    joined = {**message, "text": "I think" + message["text"]}
    await say([chat[0], joined, user("do:say more")])
    await say([*chat, user("do:say else")])


async def several_answers(say, row):
    """The agent goes on with the second, and then asks for several again."""
    if say.speaker.api != "chat":
        return await one_turn(say, row)
    chat = [user("do:say")]
    for _ in range(2):
        answer = await say.speaker.answer(chat_body(chat, n=3))
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        chat += [read_chat(answer, 1), user("do:say more")]
    await say(chat)


async def log_probs(say, row):
    more = {"logprobs": True, "top_logprobs": 0} if say.speaker.api == "chat" else {}
    more |= {"include": ["message.output_text.logprobs"]} if say.speaker.api == "responses" else {}
    answer = await say.speaker.answer(say.speaker.body([user("do:say")], **more))
    if say.speaker.api != "messages":
        own = answer["choices"][0]["logprobs"] if "choices" in answer else answer["output"][0]["content"][0]
        values = [token["logprob"] for token in own["content" if "choices" in answer else "logprobs"]]
        assert values == [round(-(i + 1) / 100, 6) for i in range(len(values))] or max(values) <= 0
        assert len(values) == answer["usage"].get("completion_tokens", answer["usage"].get("output_tokens"))


async def counts_tokens(say, row):
    chat = [system("Be brief."), user("do:say")]
    body = say.speaker.body(chat, [ADD])
    answer = await say.speaker.answer(dict(body))
    if say.speaker.api == "messages":
        del body["max_tokens"]
        assert await say.speaker.count(body) == answer["usage"]["input_tokens"]


async def stores_responses(say, row):
    """State by `previous_response_id`: a chat, a branch of it, and calls."""
    if say.speaker.api != "responses":
        return await several_turns(say, row)
    first = await say([user("do:say")])
    second = await say([user("do:call")], [ADD], previous_response_id=first["response"])
    await say([user("do:say a branch")], previous_response_id=first["response"])
    await say(results(second), [ADD], previous_response_id=second["response"], instructions="Be brief.")


ALL = (
    one_turn, several_turns, streamed, uses_a_tool, streams_tools, parallel_calls, leaves_a_stream, retries,
    parallel_branches, helpers, edits_a_question, edits_an_answer, sliding_window, summarises, tools_that_change,
    strips_answers, other_ids, a_clock_every_turn, is_cut_off, empty_results, forces_a_tool, prefills,
    several_answers, log_probs, counts_tokens, stores_responses,
)  # fmt: skip
HABITS = {habit.__name__: habit for habit in ALL}
SPEAKERS = {
    "plain chat": lambda *settings: Plain("chat", *settings),
    "plain responses": lambda *settings: Plain("responses", *settings),
    "plain messages": lambda *settings: Plain("messages", *settings),
    "openai chat": lambda *settings: OpenAiSdk("chat", *settings),
    "openai responses": lambda *settings: OpenAiSdk("responses", *settings),
    "anthropic messages": lambda *settings: AnthropicSdk("messages", *settings),
}


async def play(row, base_url, api_key):
    """A habit, by a speaker."""
    speaker = SPEAKERS[row["speaker"]](base_url, api_key)

    async def say(chat, tools=(), **more):
        return await speaker.say(chat, tools, **more)

    say.speaker = speaker
    await HABITS[row["habit"]](say, row)
    if client := getattr(speaker, "client", None):
        await client.close()
    return 1.0
