"""Habits of the OpenAI Agents SDK and of LangGraph, which have loops of their own: `FRAMEWORKS` has a function that
prepares each for the settings of a client, and its habits by name. The policy does what the last `do:` of a chat says,
see `agent_habits`."""

import asyncio
import time
from types import SimpleNamespace


def agents_sdk(api, base_url, api_key):
    """What the habits of the Agents SDK use."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    model = kind(model="policy", openai_client=client)

    @agents.function_tool
    def add(a: int) -> str:
        """Add one."""
        return f"do:say {a + 1}"

    @agents.function_tool
    def fails() -> str:
        """Fail."""
        raise ValueError("do:say no")

    def agent(name="main", instructions="Be brief.", **more):
        return agents.Agent(name=name, instructions=instructions, model=model, **more)

    return SimpleNamespace(sdk=agents, run=agents.Runner.run, agent=agent, add=add, fails=fails, api=api)


async def one_turn(f):
    assert "answer" in (await f.run(f.agent(), "do:say")).final_output


async def several_turns(f):
    agent, chat = f.agent(), [{"role": "user", "content": "do:say"}]
    for _ in range(3):
        chat = [*(await f.run(agent, chat)).to_input_list(), {"role": "user", "content": "do:say more"}]


async def sessions(f):
    session = f.sdk.SQLiteSession("a")
    for _ in range(3):
        await f.run(f.agent(), "do:say", session=session)


async def edited_session(f):
    session = f.sdk.SQLiteSession("a")
    await f.run(f.agent(), "do:say", session=session)
    await session.pop_item()
    await session.pop_item()
    await f.run(f.agent(), "do:say else", session=session)


async def sliding_session(f):
    session = f.sdk.SQLiteSession("a", session_settings=f.sdk.SessionSettings(limit=2))
    for i in range(4):
        await f.run(f.agent(), f"do:say {i}", session=session)


async def previous_response(f):
    first = await f.run(f.agent(), "do:say")
    if f.api == "responses":
        await f.run(f.agent(), "do:say more", previous_response_id=first.last_response_id)
        await f.run(f.agent(tools=[f.add]), "do:call", previous_response_id=first.last_response_id)


async def auto_previous_response(f):
    more = {"auto_previous_response_id": True} if f.api == "responses" else {}
    await f.run(f.agent(tools=[f.add]), "do:call", **more)


async def tool(f):
    result = await f.run(f.agent(tools=[f.add]), "do:call")
    assert len(result.raw_responses) == 2


async def parallel_tools(f):
    result = await f.run(f.agent(tools=[f.add]), "do:two")
    assert len(result.new_items) == 5


async def streamed(f):
    result = f.sdk.Runner.run_streamed(f.agent(tools=[f.add]), "do:call")
    kinds = [event.type async for event in result.stream_events()]
    assert "raw_response_event" in kinds and "answer" in result.final_output


async def leaves_a_stream(f):
    result = f.sdk.Runner.run_streamed(f.agent(), "do:say")
    async for _ in result.stream_events():
        break
    result.cancel()
    await f.run(f.agent(), "do:say again")


async def handoff(f):
    helper = f.agent("helper", "You help.", handoff_description="helps")
    await f.run(f.agent(handoffs=[helper]), "do:use_transfer_to_helper")


async def agent_as_tool(f):
    helper = f.agent("helper", "You help.").as_tool("ask_helper", "Ask.")
    await f.run(f.agent(tools=[helper]), "do:use_ask_helper")


async def guardrail(f):
    @f.sdk.input_guardrail
    async def checked(context, agent, given):
        await f.run(f.agent("guard", "You guard."), f"{given} guard")
        return f.sdk.GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

    await f.run(f.agent(input_guardrails=[checked]), "do:say")


async def edited_history(f):
    chat = (await f.run(f.agent(), "do:say")).to_input_list()
    chat[0] = {"role": "user", "content": "do:say otherwise"}
    await f.run(f.agent(), [*chat, {"role": "user", "content": "do:say more"}])


async def parallel_runs(f):
    await asyncio.gather(*(f.run(f.agent(), f"do:say {i}") for i in range(3)))


async def retries(f):
    for _ in range(2):
        await f.run(f.agent(), "do:say")


async def clock(f):
    chat = "do:say"
    for _ in range(2):
        agent = f.agent(instructions=lambda context, agent: f"It is {time.time_ns()}.")
        chat = [*(await f.run(agent, chat)).to_input_list(), {"role": "user", "content": "do:say more"}]


async def forced_tool(f):
    settings = f.sdk.ModelSettings(tool_choice="add")
    result = await f.run(f.agent(tools=[f.fails, f.add], model_settings=settings), "do:say")
    assert len(result.raw_responses) == 2


async def too_many_turns(f):
    try:
        await f.run(f.agent(tools=[f.add]), "do:call", max_turns=1)
    except f.sdk.MaxTurnsExceeded:
        return
    raise AssertionError("it had more turns")


async def tool_error(f):
    await f.run(f.agent(tools=[f.fails]), "do:use_fails")


async def tools_that_change(f):
    chat = (await f.run(f.agent(tools=[f.add]), "do:call")).to_input_list()
    await f.run(f.agent(tools=[f.add, f.fails]), [*chat, {"role": "user", "content": "do:say more"}])


async def short_answers(f):
    settings = f.sdk.ModelSettings(max_tokens=2, temperature=0.3, parallel_tool_calls=False, metadata={"a": "b"})
    try:
        chat = (await f.run(f.agent(model_settings=settings), "do:say")).to_input_list()
    except f.sdk.ModelBehaviorError:  # of an incomplete response
        chat = [{"role": "user", "content": "do:say"}]
    await f.run(f.agent(), [*chat, {"role": "user", "content": "do:say more"}])


AGENTS_SDK = (
    one_turn, several_turns, sessions, edited_session, sliding_session, previous_response, auto_previous_response,
    tool, parallel_tools, streamed, leaves_a_stream, handoff, agent_as_tool, guardrail, edited_history,
    parallel_runs, retries, clock, forced_tool, too_many_turns, tool_error, tools_that_change, short_answers,
)  # fmt: skip


def langgraph(api, base_url, api_key):
    """What the habits of LangGraph use."""
    from langchain_anthropic import ChatAnthropic
    from langchain_core import messages
    from langchain_core.tools import tool as as_tool
    from langchain_openai import ChatOpenAI
    from langgraph import graph
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.prebuilt import create_react_agent

    if api == "messages":
        base = base_url.removesuffix("/v1")
        model = ChatAnthropic(model="policy", base_url=base, api_key=api_key, max_retries=0, max_tokens=100)
    else:
        responses = {"use_responses_api": api == "responses"}
        model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, max_retries=0, **responses)

    @as_tool
    def add(a: int) -> str:
        """Add one."""
        return f"do:say {a + 1}"

    @as_tool
    def other() -> str:
        """Do nothing."""
        return "do:say"

    return SimpleNamespace(
        model=model,
        react=create_react_agent,
        add=add,
        other=other,
        saver=InMemorySaver,
        graph=graph,
        m=messages,
        api=api,
    )


def given(text):
    return {"messages": [("user", text)]}


THREAD = {"configurable": {"thread_id": "1"}}


async def lg_one_turn(f):
    assert "answer" in (await f.model.ainvoke("do:say")).text


async def lg_several_turns(f):
    agent = f.react(f.model, [], checkpointer=f.saver(), prompt="Be brief.")
    for _ in range(3):
        await agent.ainvoke(given("do:say"), THREAD)


async def lg_tool(f):
    made = await f.react(f.model, [f.add]).ainvoke(given("do:call"))
    assert [message.type for message in made["messages"]] == ["human", "ai", "tool", "ai"]


async def lg_parallel_tools(f):
    made = await f.react(f.model, [f.add]).ainvoke(given("do:two"))
    assert [message.type for message in made["messages"]] == ["human", "ai", "tool", "tool", "ai"]


async def lg_streamed(f):
    agent = f.react(f.model, [f.add])
    parts = [part async for part, _ in agent.astream(given("do:call"), stream_mode="messages")]
    assert any("answer" in part.text for part in parts)


async def lg_leaves_a_stream(f):
    async for _ in f.model.astream("do:say"):
        break
    await f.model.ainvoke("do:say again")


async def lg_retries(f):
    for _ in range(2):
        await f.model.ainvoke("do:say")


async def lg_batch(f):
    await f.model.abatch(["do:say 1", "do:say 2", "do:say 3"])


async def lg_clock(f):
    agent = f.react(f.model, [], checkpointer=f.saver(), prompt=lambda state: [
        f.m.SystemMessage(f"It is {time.time_ns()}."), *state["messages"]])  # fmt: skip
    for _ in range(2):
        await agent.ainvoke(given("do:say"), THREAD)


async def lg_trims(f):
    def last(state):
        kept = f.m.trim_messages(state["messages"], max_tokens=3, token_counter=len, start_on="human")
        return {"llm_input_messages": kept}

    agent = f.react(f.model, [], checkpointer=f.saver(), pre_model_hook=last)
    for i in range(4):
        await agent.ainvoke(given(f"do:say {i}"), THREAD)


async def lg_summarises(f):
    first = await f.model.ainvoke([("user", "do:say")])
    summary = await f.model.ainvoke([("system", "Summarise."), ("user", f"do:say {first.text}")])
    await f.model.ainvoke([("system", summary.text), ("user", "do:say more")])


async def lg_time_travel(f):
    agent = f.react(f.model, [], checkpointer=f.saver())
    await agent.ainvoke(given("do:say"), THREAD)
    before = (await agent.aget_state(THREAD)).config
    await agent.ainvoke(given("do:say more"), THREAD)
    await agent.ainvoke(given("do:say otherwise"), before)


async def lg_edits_state(f):
    agent = f.react(f.model, [], checkpointer=f.saver())
    made = await agent.ainvoke(given("do:say"), THREAD)
    last = made["messages"][-1]
    await agent.aupdate_state(THREAD, {"messages": [f.m.AIMessage("edited", id=last.id)]})
    await agent.ainvoke(given("do:say more"), THREAD)


async def lg_removes_messages(f):
    agent = f.react(f.model, [], checkpointer=f.saver())
    made = await agent.ainvoke(given("do:say"), THREAD)
    gone = [f.m.RemoveMessage(id=message.id) for message in made["messages"]]
    await agent.aupdate_state(THREAD, {"messages": gone})
    await agent.ainvoke(given("do:say more"), THREAD)


async def lg_branches(f):
    """Two nodes at once, and one that joins them."""
    from typing import Annotated, TypedDict

    class State(TypedDict):
        messages: Annotated[list, f.graph.add_messages]

    async def ask(state, text):
        return {"messages": [await f.model.ainvoke([*state["messages"], ("user", text)])]}

    async def left(state):
        return await ask(state, "do:say left")

    async def right(state):
        return await ask(state, "do:say right")

    async def join(state):
        return await ask(state, "do:say both")

    flow = f.graph.StateGraph(State)
    for node in (left, right, join):
        flow.add_node(node.__name__, node)
    for edge in (("__start__", "left"), ("__start__", "right"), ("left", "join"), ("right", "join")):
        flow.add_edge(*edge)
    await flow.compile().ainvoke(given("do:say"))


async def lg_supervisor(f):
    """An agent that is a tool of another one."""
    from langchain_core.tools import tool as as_tool

    helper = f.react(f.model, [f.add], prompt="You help.")

    @as_tool
    async def ask_helper(a: int) -> str:
        """Ask."""
        return (await helper.ainvoke(given("do:call")))["messages"][-1].text + " do:say"

    await f.react(f.model, [ask_helper]).ainvoke(given("do:use_ask_helper"))


async def lg_tools_that_change(f):
    first = await f.react(f.model, [f.add]).ainvoke(given("do:call"))
    await f.react(f.model, [f.add, f.other]).ainvoke({"messages": [*first["messages"], ("user", "do:say more")]})


async def lg_tool_error(f):
    await f.react(f.model, [f.add]).ainvoke(given("do:use_add_to_nothing"))


async def lg_forces_a_tool(f):
    message = await f.model.bind_tools([f.other, f.add], tool_choice="add").ainvoke("do:say")
    assert [call["name"] for call in message.tool_calls] == ["add"]


async def lg_structured(f):
    """As a tool that the answer must call."""
    if f.api == "messages":
        return await lg_forces_a_tool(f)
    schema = {"title": "add", "description": "A.", "type": "object", "properties": {"a": {"type": "integer"}}}
    made = await f.model.with_structured_output(schema, method="function_calling").ainvoke("do:say")
    assert made == {"a": 1}


async def lg_short_answers(f):
    name = "max_output_tokens" if f.api == "responses" else "max_tokens"
    first = await f.model.bind(**{name: 2}).ainvoke("do:say")
    await f.model.ainvoke([("user", "do:say"), first, ("user", "do:say more")])


LANGGRAPH = (
    lg_one_turn, lg_several_turns, lg_tool, lg_parallel_tools, lg_streamed, lg_leaves_a_stream, lg_retries, lg_batch,
    lg_clock, lg_trims, lg_summarises, lg_time_travel, lg_edits_state, lg_removes_messages, lg_branches, lg_supervisor,
    lg_tools_that_change, lg_tool_error, lg_forces_a_tool, lg_structured, lg_short_answers,
)  # fmt: skip
FRAMEWORKS = {
    "agents": (agents_sdk, {habit.__name__: habit for habit in AGENTS_SDK}),
    "langgraph": (langgraph, {habit.__name__: habit for habit in LANGGRAPH}),
}


async def play(row, base_url, api_key):
    """A habit of a framework, `FRAMEWORK API`."""
    framework, _, api = row["speaker"].partition(" ")
    make, habits = FRAMEWORKS[framework]
    await habits[row["habit"]](make(api, base_url, api_key))
    return 1.0
