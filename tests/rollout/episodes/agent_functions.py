"""Agents for tests: functions that play an episode with an OpenAI client, in a process of their own."""

import asyncio
import inspect
import json
import os
import time
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}


def asks_once(row, *policy):
    return float(len(asker(*policy)(row["messages"])))


async def uses_tools(row, base_url, api_key, model):
    """Calls tools until the policy calls none; every other answer is streamed."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as policy:
        messages = list(row["messages"])
        for turn in range(6):
            if turn % 2:
                calls, text = [], ""
                asked = {"model": model, "messages": messages, "tools": [TOOL], "stream": True}
                async for event in await policy.chat.completions.create(**asked):
                    for choice in event.choices:
                        text += choice.delta.content or ""
                        calls += choice.delta.tool_calls or []
            else:
                answer = await policy.chat.completions.create(model=model, messages=messages, tools=[TOOL])
                text, calls = answer.choices[0].message.content, answer.choices[0].message.tool_calls or []
            if not calls:
                return 1.0 if "done" in text else 0.0
            own = [{"id": c.id, "type": "function", "function": {"name": c.function.name,
                    "arguments": c.function.arguments}} for c in calls]  # fmt: skip
            messages.append({"role": "assistant", "content": text, "tool_calls": own})
            for call in calls:
                total = json.loads(call.function.arguments)["a"] + 1
                messages.append({"role": "tool", "content": str(total), "tool_call_id": call.id})
    return None


def asker(base_url, api_key, model):
    """The policy's answer to messages."""
    from openai import OpenAI

    policy = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    return lambda messages: policy.chat.completions.create(model=model, messages=messages).choices[0].message.content


def asks_a_helper(row, *policy):
    """Its own conversation, another one between the turns, and then a chat whose past it has rewritten."""
    ask, own = asker(*policy), list(row["messages"])
    own.append({"role": "assistant", "content": ask(own)})
    helped = ask([{"role": "user", "content": "help"}])
    own.append({"role": "user", "content": f"helper: {helped}"})
    own.append({"role": "assistant", "content": ask(own)})
    ask([*row["messages"], {"role": "user", "content": "summary"}])
    return 0.5


def asks_forever(row, *policy):
    ask, messages = asker(*policy), list(row["messages"])
    while True:
        messages += [{"role": "assistant", "content": ask(messages)}, {"role": "user", "content": "more"}]


def prints(row, *policy):
    print("{}\n" * 100, flush=True)
    return asks_once(row, *policy)


def rewrites_its_memory(row, *policy):
    """Three turns, each a chat of its own that holds what was said before."""
    ask, said = asker(*policy), []
    for _ in range(3):
        said.append(ask([{"role": "user", "content": f"so far: {said}"}] if said else row["messages"]))
    return 1.0


def asks_between_turns(row, *policy):
    """Two turns of one conversation, and one of a helper between them."""
    ask, own = asker(*policy), list(row["messages"])
    own.append({"role": "assistant", "content": ask(own)})
    own.append({"role": "user", "content": ask([{"role": "user", "content": "help"}])})
    ask(own)
    return 1.0


def proposes_and_solves(row, base_url, api_key, model):
    """A proposal, two attempts that begin alike, of which the first has a second turn, and a word of the proposer."""
    ask = {p: asker(base_url, api_key, f"{model}/{p}") for p in ("proposer", "solver/0", "solver/1")}
    own = list(row["messages"])
    own.append({"role": "assistant", "content": ask["proposer"](own)})
    task = [{"role": "user", "content": "solve"}]
    more = [*task, {"role": "assistant", "content": ask["solver/0"](task)}, {"role": "user", "content": "sure?"}]
    ask["solver/1"](task)
    ask["solver/0"](more)
    ask["proposer"]([*own, {"role": "user", "content": "right?"}])
    return {"proposer": -1.0, "solver/0": 1, "solver": 0.5}


def forgets_a_role(row, base_url, api_key, model):
    asker(base_url, api_key, f"{model}/solver")(row["messages"])
    return {"proposer": 1.0}


def rewards_another_role(row, base_url, api_key, model):
    asker(base_url, api_key, f"{model}/solver")(row["messages"])
    return {"sovler": 1.0}


def gives_endless_rewards(row, base_url, api_key, model):
    asker(base_url, api_key, f"{model}/solver")(row["messages"])
    return {"proposer": float("inf"), "solver": float("-inf")}


def names_no_role(row, *policy):
    from openai import NotFoundError

    try:
        asker(*policy)(row["messages"])
    except NotFoundError as error:
        raise ValueError(str(error)) from None


def breaks_after_an_answer(row, *policy):
    asker(*policy)(row["messages"])
    raise RuntimeError("the database is down")


async def asks_in_parallel(row, base_url, api_key, model):
    """Two conversations at once; the one that is refused ends the agent, while the other's answer is on its way."""
    from openai import AsyncOpenAI, BadRequestError

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as policy:

        async def ask(text):
            chat = [{"role": "user", "content": text}]
            return await policy.chat.completions.create(model=model, messages=chat)

        await policy.chat.completions.create(model=model, messages=row["messages"])
        both = await asyncio.gather(ask("one"), ask("one too many"), return_exceptions=True)
        (refused,) = (one for one in both if isinstance(one, BadRequestError))
        raise refused


def summarises(row, *policy):
    """A helper's chat that has no room is refused; the agent goes on and ends by itself."""
    from openai import BadRequestError

    ask = asker(*policy)
    own = [*row["messages"], {"role": "assistant", "content": ask(row["messages"])}]
    try:
        ask([{"role": "user", "content": "x" * 5000}])
    except BadRequestError:
        ask([*own, {"role": "user", "content": "shorter"}])
    return 1.0


_FUNCTIONS = (asks_once, uses_tools, asks_a_helper, asks_forever, prints, rewrites_its_memory, asks_between_turns)
_FUNCTIONS += (proposes_and_solves, forgets_a_role, rewards_another_role, gives_endless_rewards)
_FUNCTIONS += (names_no_role, breaks_after_an_answer, asks_in_parallel, summarises)
ASKING = {function.__name__: function for function in _FUNCTIONS}


async def named_by_its_row(row, base_url, api_key, model):
    """Any of those that ask, in one process: importing their client takes a second."""
    function = ASKING[row["agent"]]
    played = function if inspect.iscoroutinefunction(function) else partial(asyncio.to_thread, function)
    return await played(row, base_url, api_key, model)


async def hangs_between_turns(row, base_url, api_key, model):
    """Two turns; between them the row may say that it makes a file, and waits forever or computes in the event loop."""
    import httpx

    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}, timeout=None) as client:
        for turn in range(2):
            await client.post(f"{base_url}/chat/completions", json={"messages": row["messages"]})
            if row["hangs"] and not turn:
                Path(row["mark"]).touch()
            if row["hangs"] == "await" and not turn:
                await asyncio.Event().wait()
            while row["hangs"] == "compute" and not turn:
                pass
    return 1.0


def hangs_in_a_thread(row, base_url, api_key, model):
    import httpx

    with httpx.Client(headers={"Authorization": f"Bearer {api_key}"}, timeout=None) as client:
        for turn in range(2):
            client.post(f"{base_url}/chat/completions", json={"messages": row["messages"]})
            if row["hangs"] and not turn:
                Path(row["mark"]).touch()
            if row["hangs"] == "sleep" and not turn:
                time.sleep(1000)
            while row["hangs"] == "compute" and not turn:
                pass
    return 1.0


def raises(row):
    raise ValueError("no\nway")


def reads_another_column(row):
    return row["prompt"]


def returns_a_text(row):
    return "much"


def exits(row):
    os._exit(7)


def hangs(row):
    time.sleep(1000)


def never_asks(row):
    return 1.0


def _posted(base_url, api_key, path, body):
    """The status and the JSON of the endpoint's answer."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    try:
        with urlopen(Request(f"{base_url}/{path}", json.dumps(body).encode(), headers)) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def _asked(base_url, api_key, messages, **more):
    return _posted(base_url, api_key, "chat/completions", {"messages": messages, **more})[1]


def pays_turns(row, base_url, api_key, set_reward):
    """Two turns of a chat, a branch of two answers from its beginning, and a reward for some of them."""
    own = list(row["messages"])
    first = _asked(base_url, api_key, own)
    set_reward(first["id"], 0.25)
    set_reward(first["id"], 0.5)  # in place of the one before
    branches = _asked(base_url, api_key, [{"role": "user", "content": "other"}], n=2)
    own += [first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    second = _asked(base_url, api_key, own)
    set_reward(branches["id"], -2.0, index=1)
    set_reward(second["id"], 1)
    return None if row.get("silent") else 8.0


def pays_and_is_cut(row, base_url, api_key, set_reward):
    """Its second turn is refused; it does not survive that."""
    set_reward(_asked(base_url, api_key, row["messages"])["id"], 0.75)
    raise RuntimeError(_asked(base_url, api_key, row["messages"])["error"]["message"])


def pays_players(row, base_url, api_key, set_reward):
    """A role and two attempts; each is paid for its turn and at the end."""
    for number, player in enumerate(("proposer", "solver/0", "solver/1")):
        answer = _asked(base_url, api_key, row["messages"], model=f"policy/{player}")
        set_reward(answer["id"], 10.0 * number)
    return {"proposer": 1.0, "solver": 2.0}


def pays_what_it_may_not(row, base_url, api_key, set_reward):
    set_reward("chatcmpl-1", 1.0)


_OF_THE_FIRST: list[tuple[str, str]] = []


async def pays_another(row, base_url, api_key, model, set_reward):
    """The first episode leaves its key and an id; the second pays that answer with its own key, and with the other's,
    until the first episode is over."""
    answer = await asyncio.to_thread(_asked, base_url, api_key, row["messages"])
    await set_reward(answer["id"], 1.0)
    if not _OF_THE_FIRST:
        _OF_THE_FIRST.append((api_key, answer["id"]))
        return 0.0
    key, other = _OF_THE_FIRST.pop()
    body = {"id": other, "reward": 100.0}
    foreign, said = await asyncio.to_thread(_posted, base_url, api_key, "rewards", body)
    assert foreign == 404 and "no answer of this episode has it" in said["error"]["message"]
    body["reward"] = 1.0  # the first one has it already
    while (await asyncio.to_thread(_posted, base_url, key, "rewards", body))[0] == 200:
        await asyncio.sleep(0.01)
    status, said = await asyncio.to_thread(_posted, base_url, key, "rewards", body)
    assert status == 401 and "or it is over" in said["error"]["message"]
    return 0.0


_ATTEMPTS: list[int] = []


async def pays_and_fails_at_first(row, base_url, api_key, model, set_reward):
    """The first attempt pays its turn and fails; the second has two turns and pays the last one."""
    _ATTEMPTS.append(1)
    answer = await asyncio.to_thread(_asked, base_url, api_key, row["messages"])
    if len(_ATTEMPTS) == 1:
        await set_reward(answer["id"], 100.0)
        raise RuntimeError("at first")
    answer = await asyncio.to_thread(_asked, base_url, api_key, row["messages"])
    await set_reward(answer["id"], 2)
