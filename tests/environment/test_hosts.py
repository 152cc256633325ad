"""Environments in worker processes: order, limits, blame, and what hostile ones do."""

import asyncio
import os
import re
import signal
from contextlib import closing

import pytest

from proxima.data import FieldError
from proxima.data.episode import ToolCall
from proxima.environment import host_process
from proxima.environment.hosts import EnvironmentFailure, Hosts
from proxima.environment.interface import EnvironmentSpec
from proxima.process import worker
from proxima.process.worker import Worker
from tests.environment.hostile import CHILDREN, CLASS, DONE, END, RESET, RESPOND, SHORT, TIME
from tests.environment.worlds import called
from tests.processes import assert_all_end, eventually, family

pytestmark = pytest.mark.usefixtures("lent_servers")
LONG = 600.0  # seconds for calls that end
QUESTION = ({"role": "user", "content": "What?"},)
OUTCOMES = {kind: said for table in (RESPOND, RESET, END, CLASS) for kind, (_, said) in table.items() if kind != "good"}


def spec(name, tools=()):
    return EnvironmentSpec(kind=name and f"tests.environment.{name}", tools=tools)


SAID = f"environment slow_world:Slow: {{}} has taken {SHORT:g} s so far; it is given up after {{}} s\n"
SLOW = """
import time
{at_import}
class Slow:
    def reset(self, seconds=3600.0):
        time.sleep(seconds)
    def respond(self, message):
        return "again"
"""


@pytest.mark.slow
@pytest.mark.parametrize("place", ["import", "reset"])
def test_a_start_that_hangs_says_so_long_before_it_is_given_up(place, tmp_path, monkeypatch, capfd):
    """Once, not for each of the episodes that begin."""
    (tmp_path / "slow_world.py").write_text(SLOW.format(at_import="time.sleep(3600)" if place == "import" else ""))
    monkeypatch.syspath_prepend(tmp_path)
    slow = EnvironmentSpec(kind="slow_world:Slow")
    if place == "import":
        monkeypatch.setattr(worker, "SLOW_SECONDS", SHORT)
        with pytest.raises(FieldError, match="can't be loaded: timed out after 1 s"):
            Hosts(slow, workers=1, start_seconds=1.0)
        assert capfd.readouterr().err == SAID.format("loading it", 1)
        return
    with closing(Hosts(slow, workers=2)) as made:
        made._server.slow.pop("load_environment")  # it may be slow on a busy machine
        monkeypatch.setattr(worker, "SLOW_SECONDS", SHORT)
        for number, host in enumerate(made._hosts):
            host.submit("open_environment", {"number": number, "row": {"messages": QUESTION}, "seed": 0})
        eventually(lambda: not made._server.slow.keys() & {"open_environment"})
        eventually(lambda: all(host.queue.kept[0].worker for host in made._hosts))
    assert capfd.readouterr().err == SAID.format("its first `reset`", 600)


ENDLESS = {kind: "respond" for kind, outcome in OUTCOMES.items() if outcome == TIME}
ENDLESS |= {"reset hangs": "open_environment", "end hangs": "end", "freeing hangs": "end"}


@pytest.fixture(scope="module")
def hosts():
    """A worker. Only those calls have a short limit that never end."""
    run = Worker.run

    def limited(worker, job, arguments, seconds, *others):
        return run(worker, job, arguments, SHORT if ENDLESS.get(arguments.get("label")) == job else seconds, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "run", limited)
        made = Hosts(spec("hostile:Hostile"), workers=1, call_seconds=LONG)
        yield made
        made.close()


async def play(hosts, kind):
    """The reward, or why there is none."""
    try:
        instance = await hosts.open({"messages": QUESTION, "kind": kind}, seed=0, label=kind)
        (message,) = (await instance.respond("go")).messages
        assert message["role"] == "user"
        return await instance.end()
    except EnvironmentFailure as failure:
        return failure


@pytest.mark.slow
@pytest.mark.parametrize("kind", OUTCOMES)
def test_a_hostile_environment_costs_its_own_episode(hosts, kind):
    async def run():
        bystander = await hosts.open({"messages": QUESTION, "kind": "good"}, seed=0)
        epoch = hosts._hosts[0].queue.kept[0].deaths
        hostile = await play(hosts, kind)
        try:
            beside = await bystander.respond("?")
        except EnvironmentFailure as failure:
            beside = failure
        bystander.drop()
        return hostile, beside, hosts._hosts[0].queue.kept[0].deaths - epoch, await play(hosts, "good")

    hostile, beside, killed, after = asyncio.run(run())
    if OUTCOMES[kind] == DONE:
        assert hostile == 1.0 and killed == 0
    else:
        assert not hostile.collateral
        assert re.search(OUTCOMES[kind], hostile.reason), hostile.reason
        assert len(hostile.reason) < 400 and "\n" not in hostile.reason and hostile.reason.isascii()
    assert killed <= 1 and after == 1.0
    if killed:
        assert beside.collateral and beside.reason == f"another episode ended its worker: {hostile.reason}"
    else:
        assert beside.messages == ({"role": "user", "content": "yes"},)
    assert not hosts._hosts[0].alive


def at_once(*coroutines):
    async def run():
        return await asyncio.gather(*coroutines)

    return asyncio.run(run())


@pytest.fixture
def opened():
    made = []

    def open_hosts(name, tools=(), **limits):
        kind = name if name is None or ":" in name else f"worlds:{name}"
        made.append(Hosts(spec(kind, tools), **{"workers": 1, "call_seconds": LONG, **limits}))
        return made[-1]

    yield open_hosts
    for hosts in made:
        hosts.close()


@pytest.mark.slow
def test_many_hostile_episodes_at_once(hosts):
    """Each hostile one fails once by its own fault however often others end its worker; every good one ends well."""
    enders = [kind for kind, outcome in OUTCOMES.items() if "worker" in outcome]
    hostile = [*enders[::3], "raises", "image", "forks", "reset raises", "end raises", "becomes another class"]

    async def until_its_own(kind):
        tries = 0
        while isinstance(result := await play(hosts, kind), EnvironmentFailure) and result.collateral:
            tries += 1
            assert tries <= len(hostile)
        return result

    kinds = [kind for pair in zip(hostile, ["good"] * len(hostile), strict=True) for kind in pair]
    for kind, result in zip(kinds, at_once(*map(until_its_own, kinds)), strict=True):
        assert result == 1.0 if kind == "good" else re.search(OUTCOMES[kind], result.reason), (kind, result)


@pytest.mark.slow
def test_calls_keep_their_order_and_stay_apart(opened):
    hosts = opened("Counter", workers=2)

    async def count(number):
        instance = await hosts.open({"messages": QUESTION, "start": number}, seed=number)
        answers = [await instance.call([ToolCall(name="add", arguments={"count": 1})] * 2) for _ in range(3)]
        return [a.messages[0]["content"] for pair in answers for a in pair], await instance.end()

    for number, (contents, reward) in enumerate(at_once(*(count(i) for i in range(8)))):
        assert contents == [str(number + i) for i in range(1, 7)] and reward == number + 6
    assert sum(host.queue.kept[0].started for host in hosts._hosts) == 2 and not any(
        host.alive for host in hosts._hosts
    )


def test_calls_that_cannot_be_made_are_told_to_the_model(opened):
    messages = {
        ("nothing", ()): "error: there is no tool 'nothing', only add, choose, fetch, find, finish",
        ("add", (("number", 1),)): "error: add has no argument 'number', only count",
        ("add", ()): "error: add needs the argument 'count'",
        ("add", (("count", "many"),)): 'error: count must be integer, not "many"',
        ("add", (("count", True),)): "error: count must be integer, not true",
        ("add", (("count", -1),)): "error: only forwards",
        ("add", (("count", 1000),)): "error: KeyError: 1000",
        ("find", (("pattern", "("),)): "error: error: missing ), unterminated subpattern at position 0",
        ("choose", (("way", "up"),)): 'error: way must be one of left, right, not "up"',
    }
    calls = [(name, dict(arguments)) for name, arguments in messages]
    _, answers, _ = called(opened("Counter"), {"messages": QUESTION, "start": 0}, *calls)
    assert [answer.messages[0]["content"] for answer in answers] == list(messages.values())
    assert all(answer.error and not answer.done and answer.messages[0]["role"] == "tool" for answer in answers)


def test_a_fault_of_the_environment_in_a_tool_is_no_observation(opened):
    with pytest.raises(EnvironmentFailure, match="ConnectionError: no server"):
        called(hosts := opened("Counter"), {"messages": QUESTION, "start": 0}, ("add", {"count": 404}))
    assert not hosts._hosts[0].alive


def test_coroutines_share_a_loop_and_done_ends_the_calls(opened):
    hosts = opened("Counter")

    async def run():
        instance = await hosts.open({"messages": QUESTION, "start": 0}, seed=0)
        first, second = await instance.call([ToolCall(name="fetch")] * 2)
        assert first.messages[0]["content"] == second.messages[0]["content"]
        return await instance.call([ToolCall(name="finish"), ToolCall(name="add", arguments={"count": 1})])

    finished, skipped = asyncio.run(run())
    assert finished.done and finished.reward == 2.0 and finished.messages[0]["content"] == "over"
    assert skipped.done and skipped.messages == () and not skipped.error


ASKED = {"messages": QUESTION}
OPENINGS = [  # a class, a row, and the opening that `reset` makes of it
    ("Columns", {**ASKED, "a": 1, "b": 2}, "What?a=1 b=2 seed=7"),
    ("Columns", {**ASKED, "a": 1, "b": 2, "seed": 3}, "What?a=1 b=2 seed=3"),
    ("Row", {**ASKED, "seed": 3}, "What?messages, seed seed=7"),
    ("Row", {}, " seed=7"),
    ("NoReset", ASKED, None),
]


@pytest.mark.parametrize(("name", "row", "opening"), OPENINGS)
def test_what_reset_gets_and_gives(opened, name, row, opening):
    instance = asyncio.run(opened(name).open(row, seed=7))
    assert instance.opening == (None if opening is None else ({"role": "user", "content": opening},))
    assert instance.state == ("begun" if name == "Columns" else None)


def test_a_class_that_knows_no_seed_draws_the_same_again(opened):
    """In whatever order the episodes of a worker are played."""
    hosts = opened("Dice")

    async def play(seed):
        instance = await hosts.open({"messages": QUESTION}, seed)
        calls = [await instance.call([ToolCall(name="roll", arguments={"sides": 10**6})]) for _ in range(4)]
        return instance.opening[0]["content"], [answer.messages[0]["content"] for (answer,) in calls]

    first, other, again = at_once(play(1), play(2), play(1))
    assert first == again and not {first[0], *first[1]} & {other[0], *other[1]}
    assert at_once(play(2)) == [other] and len(set(first[1])) == 4


def test_functions_without_a_class(opened):
    hosts = opened(None, tools=("proxima.environment.builtin:calculate",))
    opening, (answer,), reward = called(hosts, {"messages": QUESTION}, ("calculate", {"expression": "2*3"}))
    assert (opening, answer.messages[0]["content"], reward) == (None, "6", None)


@pytest.mark.slow
def test_output_goes_to_a_log_that_does_not_grow(opened, tmp_path):
    log = tmp_path / "environments.log"
    hosts = opened("hostile:Hostile")

    async def in_log(kind):
        instance = await hosts.open({"messages": QUESTION, "kind": kind}, seed=0, label=f"prompt {kind}")
        await instance.respond("go")

    assert asyncio.run(play(hosts, "prints")) == 1.0 and not log.exists()
    hosts.log_to(log)
    asyncio.run(in_log("prints"))  # 2 MB
    printed = log.read_text()
    assert (1 << 16) - 2000 < len(printed) < (1 << 16) + 200 and "is left out" in printed.splitlines()[-1]
    assert re.match(r"\[\d+ prompt prints\] x{1000}\n", printed)
    for kind, line in [("raises", r"\[\d+ prompt raises\] OSError: no disk"), ("segfault", "Segmentation fault")]:
        with pytest.raises(EnvironmentFailure, match="; see environments.log$"):
            asyncio.run(in_log(kind))
        assert re.search(line, log.read_text()) and log.read_text().startswith(printed)
    os.truncate(log, host_process.LOG_BYTES + 1)
    asyncio.run(in_log("prints"))
    assert log.stat().st_size < 1 << 17
    with pytest.raises(EnvironmentFailure):
        asyncio.run(in_log("segfault"))
    assert "Segmentation fault" in log.read_text() and log.stat().st_size < 1 << 17


def test_a_log_that_changes_leaves_no_file_open_and_none_that_is_empty(opened, tmp_path):
    hosts = opened("hostile:Hostile")
    logs = [tmp_path / name for name in ("a.log", "b.log", "empty.log")]
    files_open = []
    for log, kind in zip([None, *logs, None], ["prints", "prints", "prints", "good", "prints"], strict=True):
        hosts.log_to(log)
        assert asyncio.run(play(hosts, kind)) == 1.0
        files_open.append(len(os.listdir(f"/proc/{hosts._hosts[0].queue.kept[0].worker.pid}/fd")))
    hosts.log_to(logs[-1])
    hosts.close()
    assert files_open == [files_open[0], *[files_open[0] + 1] * 3, files_open[0]]
    assert sorted(tmp_path.iterdir()) == logs[:2]  # in a.log and b.log what was printed then, and nothing later
    assert all(log.stat().st_size < (1 << 16) + 200 for log in logs[:2])


@pytest.mark.slow
def test_each_call_has_its_limit_and_the_first_reset_the_imports(opened, monkeypatch):
    """What an environment imports and builds may be left to the reset that succeeds."""
    run, limits = Worker.run, []
    monkeypatch.setattr(Worker, "run", lambda worker, *call: limits.append(call[::2]) or run(worker, *call))
    hosts = opened("hostile:Hostile", call_seconds=500.0, start_seconds=400.0)
    for kind in ("reset raises", "good", "good"):
        asyncio.run(play(hosts, kind))
    first = ("inspect", "load_environment", "open_environment", "open_environment")
    expected = [(job, 400.0) for job in first]
    expected += [(job, 500.0) for job in ("respond", "end", "open_environment", "respond", "end")]
    assert [limit for limit in limits if limit[0] != "drop"] == expected


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
@pytest.mark.parametrize("which", ["worker", "fork server", "process above it"])
def test_processes_that_others_kill_are_replaced(opened, which):
    hosts = opened("NoReset", workers=2)

    async def run():
        first = await hosts.open({"messages": QUESTION}, seed=0)
        above, server, worker = everyone = family(hosts._server.child.process.pid)
        killed = {"worker": worker, "fork server": server, "process above it": above}[which]
        os.kill(killed, signal.SIGKILL)
        assert_all_end(everyone if which == "fork server" else [killed])
        second = await hosts.open({"messages": QUESTION}, seed=0)
        assert_all_end(everyone if which != "worker" else [])
        with pytest.raises(EnvironmentFailure, match="between two calls|its worker died|its worker ended"):
            await first.respond("")
        third = await hosts.open({"messages": QUESTION}, seed=0)
        return [(await each.respond("")).messages[0]["content"] for each in (second, third)]

    assert asyncio.run(run()) == ["yes", "yes"]


@pytest.mark.slow
@pytest.mark.usefixtures("own_servers")
def test_close_ends_what_runs_and_what_it_has_started(opened):
    hosts = opened("hostile:Hostile")

    async def run():
        instance = await hosts.open({"messages": QUESTION, "kind": "many forks"}, seed=0)
        calls = [asyncio.ensure_future(instance.respond("")) for _ in range(2)]
        while len(running := family(hosts._server.child.process.pid)) < 3 + CHILDREN:
            await asyncio.sleep(0.01)
        hosts.close()
        hosts.close()
        results = await asyncio.gather(*calls, return_exceptions=True)
        with pytest.raises(EnvironmentFailure, match="closed"):
            await hosts.open({"messages": QUESTION}, seed=0)
        return running, results

    running, (called, waited) = asyncio.run(run())
    assert isinstance(called, EnvironmentFailure) and called.reason == "its worker ended"
    assert isinstance(waited, EnvironmentFailure)
    assert_all_end(running)


def test_line_ends_alone_are_bounded_with_their_labels(tmp_path):
    log, path = host_process.Log(), tmp_path / "environments.log"
    log.path, log.label, log.left = str(path), b"[1 prompt 2 sample 3] ", 1000
    assert log.write(b"\n" * 70_000) == 70_000
    assert path.stat().st_size == 1000 + len(host_process.CUT) and path.read_bytes().endswith(host_process.CUT)
    log.write(b"more\n")
    assert path.stat().st_size == 1000 + len(host_process.CUT)
