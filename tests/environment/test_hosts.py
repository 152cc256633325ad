"""Environments in worker processes: order, limits, blame, and what hostile ones do."""

import asyncio
import faulthandler
import os
import re
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from proxima.data import ToolCall
from proxima.environment import host_process
from proxima.environment.hosts import EnvironmentFailure, HostLimits, Hosts
from proxima.environment.interface import EnvironmentSpec
from tests.environment.hostile import CLASS, END, RESET, RESPOND

QUESTION = ({"role": "user", "content": "What?"},)
DONE = "done"  # the episode ends with its reward
NONSENSE = "expected a text, messages or a Reply"
TIME = "timed out after 1 s"
OUTCOMES = {
    "raises": r"OSError: no disk \(hostile.py:\d+\)",
    "interrupt": "KeyboardInterrupt",
    "base": "BaseException: all",
    "hangs": TIME,
    "spins": TIME,
    "spins in C": TIME,
    "async hang": TIME,
    "forks": f"respond returned None, {NONSENSE}",
    "forks and returns": f"respond returned None, {NONSENSE}",
    "many forks": TIME,
    "exits": "its worker ended",
    "sys.exit": "SystemExit: 0",
    "segfault": r"its worker died \(SIGSEGV\)",
    "kills itself": r"its worker died \(SIGKILL\)",
    "alarm": r"its worker died \(SIGALRM\)",
    "prints": DONE,
    "prints to files": DONE,
    "writes to all files": "something wrote into its worker's socket",
    "closes all files": "its worker (ended|died)",
    "closes input": DONE,
    "closes output": DONE,
    "eats memory": "MemoryError: above the worker's limit",
    "recursion": "RecursionError",
    "breaks json": "its worker ended",
    "changes directory": DONE,
    "leaves threads": DONE,
    "deletes its module": DONE,
    "stops collecting": DONE,
    "None": f"respond returned None, {NONSENSE}",
    "number": f"respond returned a value of type float, {NONSENSE}",
    "object": f"respond returned a value of type object, {NONSENSE}",
    "bytes": f"respond returned a value of type bytes, {NONSENSE}",
    "generator": f"respond returned a value of type generator, {NONSENSE}",
    "circular": "respond returned a value of type list, expected a list of messages",
    "dict": f"respond returned a value of type dict, {NONSENSE}",
    "long text": "respond returned a text of 30,000,000 characters; at most 1,048,576 are allowed",
    "surrogate": "respond returned a text with a lone surrogate",
    "no messages": "respond returned a message with the keys text, expected role and content",
    "image": "respond returned a value of type list, expected a text",
    "wrong role": "respond returned a message of role 'assistant', expected user, tool, system",
    "done is a text": "Reply.done of respond is a value of type str, expected True or False",
    "reward is a text": "Reply.reward of respond is a value of type str, expected a number",
    "reward is NaN": "Reply.reward of respond is nan, expected a finite number",
    "reward is infinite": "Reply.reward of respond is inf, expected a finite number",
    "exits well": "its worker ended",
    "prints forever": DONE,
    "changes the process": DONE,
    "limits itself": DONE,
    "opens no file": "it left its worker without files to open",
    "opens too many files": "it left its worker without files to open",
    "lowers the recursion limit": DONE,
    "takes builtins": "'NoneType' object is not callable",
    "takes sys.stdout": DONE,
    "becomes a daemon": DONE,
    "async generator": f"respond returned a value of type async_generator, {NONSENSE}",
    "cancels itself": "CancelledError",
    "stops the loop": "RuntimeError: Event loop stopped",
    "StopIteration": "StopIteration",
    "raises a surrogate": r"OSError: half",
    "raises much": "^E{50}",
    "raises notes": r"OSError: noted",
    "raises what has no text": "its worker ended",
    "surrogate key": "respond returned a message with the keys half",
    "reward is a scalar": DONE,
    "reward is an array": "Reply.reward of respond is a value of type Number, expected a number",
    "state is a number": "Reply.state of respond is a value of type int, expected a text",
    "reset raises": r"ValueError: no \(hostile.py:\d+\)",
    "reset hangs": TIME,
    "reset returns a number": f"reset returned a value of type int, {NONSENSE}",
    "reset returns nothing": "reset gave no prompt, and the row has none",
    "end raises": "ZeroDivisionError: no",
    "end hangs": TIME,
    "end is None": "get_reward is None, expected a number",
    "end is NaN": "get_reward is nan, expected a finite number",
    "end is a text": "get_reward is a value of type str, expected a number",
    "end exits": "its worker ended",
    "freeing hangs": TIME,
    **dict.fromkeys(CLASS, "it changed its class Hostile"),
}


@cache
def spec(name, tools=()):
    """Once for each, with the interface that it reads in a worker."""
    return EnvironmentSpec(kind=name and f"tests.environment.{name}", tools=tools)


@pytest.fixture(scope="module")
def hosts():
    others = len(family(os.getpid(), "fork_server.py"))  # of rewards that tests of this process share
    made = Hosts(spec("hostile:Hostile"), HostLimits(workers=1, call_seconds=1.0, memory_mb=160))
    yield made
    assert len(family(os.getpid(), "fork_server.py")) > others
    made.close()
    assert len(family(os.getpid(), "fork_server.py")) <= others


async def play(hosts, kind):
    """The reward, or why there is none."""
    try:
        instance = await hosts.open({"messages": QUESTION, "kind": kind}, seed=0)
        (message,) = (await instance.respond("go")).messages
        assert message["role"] == "user"
        return await instance.end()
    except EnvironmentFailure as failure:
        return failure


@pytest.mark.parametrize("kind", OUTCOMES)
def test_a_hostile_environment_costs_its_own_episode(hosts, kind):
    async def run():
        bystander = await hosts.open({"messages": QUESTION, "kind": "good"}, seed=0)
        epoch = hosts._hosts[0].epoch
        hostile = await play(hosts, kind)
        try:
            beside = await bystander.respond("?")
        except EnvironmentFailure as failure:
            beside = failure
        bystander.drop()
        return hostile, beside, hosts._hosts[0].epoch - epoch, await play(hosts, "good")

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


def test_every_hostile_kind_has_an_outcome():
    assert {*RESPOND, *RESET, *END, *CLASS, "freeing hangs"} - {"good"} == set(OUTCOMES)


def everything():
    """Each process that runs, by number: its parent and its command line. No zombies."""
    listed = subprocess.run(["ps", "-eww", "-o", "pid=,ppid=,stat=,args="], capture_output=True, text=True).stdout
    lines = [line.split(None, 3) for line in listed.splitlines()]
    return {int(pid): (int(above), args) for pid, above, stat, args in lines if "Z" not in stat}


def below(pid, above, processes):
    while pid in processes and pid != above:
        pid = processes[pid][0]
    return pid == above


def family(above, name):
    """The command lines of the processes below one that hold a name."""
    processes = everything()
    return [
        args for pid, (_, args) in processes.items() if pid != above and name in args and below(pid, above, processes)
    ]


def at_once(*coroutines):
    async def run():
        return await asyncio.gather(*coroutines)

    return asyncio.run(run())


@pytest.fixture
def opened():
    made = []

    def open_hosts(name, tools=(), **limits):
        made.append(Hosts(spec(name and f"worlds:{name}", tools), HostLimits(**{"workers": 1, **limits})))
        return made[-1]

    yield open_hosts
    for hosts in made:
        hosts.close()


def test_many_hostile_episodes_at_once(hosts):
    """Each hostile one fails once by its own fault however often others end its worker; every good one ends well."""
    hostile = [kind for kind, outcome in OUTCOMES.items() if outcome not in (DONE, TIME)]

    async def until_its_own(kind):
        tries = 0
        while isinstance(result := await play(hosts, kind), EnvironmentFailure) and result.collateral:
            tries += 1
            assert tries <= len(hostile)
        return result

    kinds = [kind for pair in zip(hostile, ["good"] * len(hostile), strict=True) for kind in pair]
    for kind, result in zip(kinds, at_once(*map(until_its_own, kinds)), strict=True):
        assert result == 1.0 if kind == "good" else re.search(OUTCOMES[kind], result.reason), (kind, result)


def test_calls_keep_their_order_and_stay_apart(opened):
    hosts = opened("Counter", workers=2)

    async def count(number):
        instance = await hosts.open({"messages": QUESTION, "start": number}, seed=number)
        answers = [await instance.call([ToolCall(name="add", arguments={"count": 1})] * 2) for _ in range(3)]
        return [a.messages[0]["content"] for pair in answers for a in pair], await instance.end()

    for number, (contents, reward) in enumerate(at_once(*(count(i) for i in range(20)))):
        assert contents == [str(number + i) for i in range(1, 7)] and reward == number + 6
    assert hosts.started == 2 and not any(host.alive for host in hosts._hosts)


def test_calls_that_cannot_be_made_are_told_to_the_model(opened):
    hosts = opened("Counter")
    messages = {
        ("nothing", ()): "error: there is no tool 'nothing', only add, choose, fetch, finish",
        ("add", (("number", 1),)): "error: add has no argument 'number', only count",
        ("add", ()): "error: add needs the argument 'count'",
        ("add", (("count", "many"),)): 'error: count must be integer, not "many"',
        ("add", (("count", True),)): "error: count must be integer, not true",
        ("add", (("count", -1),)): "error: only forwards",
        ("add", (("count", 1000),)): "error: KeyError: 1000",
        ("choose", (("way", "up"),)): 'error: way must be one of left, right, not "up"',
    }

    async def run():
        instance = await hosts.open({"messages": QUESTION, "start": 0}, seed=0)
        calls = [ToolCall(name=name, arguments=dict(arguments)) for name, arguments in messages]
        return await instance.call(calls)

    answers = asyncio.run(run())
    assert [answer.messages[0]["content"] for answer in answers] == list(messages.values())
    assert all(answer.error and not answer.done and answer.messages[0]["role"] == "tool" for answer in answers)


def test_a_fault_of_the_environment_in_a_tool_is_no_observation(opened):
    async def run(hosts):
        instance = await hosts.open({"messages": QUESTION, "start": 0}, seed=0)
        await instance.call([ToolCall(name="add", arguments={"count": 404})])

    with pytest.raises(EnvironmentFailure, match="ConnectionError: no server"):
        asyncio.run(run(hosts := opened("Counter")))
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


@pytest.mark.parametrize(
    ("name", "row", "opening"),
    [
        ("Columns", {"messages": QUESTION, "a": 1, "b": 2}, "What?a=1 b=2 seed=7"),
        ("Columns", {"messages": QUESTION, "a": 1, "b": 2, "seed": 3}, "What?a=1 b=2 seed=3"),
        ("Row", {"messages": QUESTION, "seed": 3}, "What?messages, seed seed=7"),
        ("Row", {}, " seed=7"),
        ("NoReset", {"messages": QUESTION}, None),
    ],
)
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


def test_a_pattern_of_the_model_that_is_none_is_told(opened):
    async def run():
        instance = await opened("Dice").open({"messages": QUESTION}, seed=0)
        return await instance.call([ToolCall(name="find", arguments={"pattern": "("})])

    (answer,) = asyncio.run(run())
    assert answer.error and "error: error: missing )" in answer.messages[0]["content"]


def test_functions_without_a_class(opened):
    hosts = opened(None, tools=("proxima.environment.calculator:calculate",))

    async def run():
        instance = await hosts.open({"messages": QUESTION}, seed=0)
        answers = await instance.call([ToolCall(name="calculate", arguments={"expression": "2*3"})])
        return instance.opening, answers[0].messages[0]["content"], await instance.end()

    assert asyncio.run(run()) == (None, "6", None)


def test_output_goes_to_a_log_that_does_not_grow(tmp_path, monkeypatch):
    log = tmp_path / "environments.log"
    hosts = Hosts(spec("hostile:Hostile"), HostLimits(workers=1))

    async def in_log(kind):
        instance = await hosts.open({"messages": QUESTION, "kind": kind}, seed=0, label=f"prompt {kind}")
        await instance.respond("go")

    try:
        assert asyncio.run(play(hosts, "prints")) == 1.0 and not log.exists()
        hosts.log_to(log)
        asyncio.run(in_log("prints"))  # 20 MB
        printed = log.read_text()
        assert (1 << 16) - 2000 < len(printed) < (1 << 16) + 200 and "is left out" in printed.splitlines()[-1]
        assert re.match(r"\[\d+ prompt prints\] x{1000}\n", printed)
        for kind, line in [("raises", r"\[\d+ prompt raises\] OSError: no disk"), ("segfault", "Segmentation fault")]:
            with pytest.raises(EnvironmentFailure, match="; see environments.log$"):
                asyncio.run(in_log(kind))
            assert re.search(line, log.read_text()) and log.read_text().startswith(printed)
        for _ in range(140):
            asyncio.run(in_log("prints"))
    finally:
        hosts.close()
    older = tmp_path / "environments.log.1"
    assert {file.name for file in tmp_path.iterdir()} == {log.name, older.name}
    assert 1 << 22 < older.stat().st_size < (1 << 22) + (1 << 17) and log.stat().st_size < 1 << 23


def test_a_log_that_changes_leaves_no_file_open_and_none_that_is_empty(tmp_path):
    hosts = Hosts(spec("hostile:Hostile"), HostLimits(workers=1))
    logs = [tmp_path / name for name in ("a.log", "b.log", "empty.log")]

    def files_open():
        return len(os.listdir(f"/proc/{hosts._hosts[0]._worker._pid}/fd"))

    try:
        opened = []
        for log, kind in zip([None, *logs, None], ["prints", "prints", "prints", "good", "prints"], strict=True):
            hosts.log_to(log)
            assert asyncio.run(play(hosts, kind)) == 1.0
            opened.append(files_open())
        hosts.log_to(logs[-1])
    finally:
        hosts.close()
    assert opened == [opened[0], *[opened[0] + 1] * 3, opened[0]]
    assert sorted(tmp_path.iterdir()) == logs[:2]  # in a.log and b.log what was printed then, and nothing later
    assert all(log.stat().st_size < (1 << 16) + 200 for log in logs[:2])


def test_the_first_reset_of_a_worker_may_take_longer(opened):
    async def run():
        hosts = opened("SlowStart", call_seconds=0.3, start_seconds=30)
        for _ in range(2):
            await (await hosts.open({"messages": QUESTION}, seed=0)).respond("")
        return hosts.started

    assert asyncio.run(run()) == 1


@pytest.mark.parametrize("how", ["idle", "fork server"])
def test_processes_that_others_kill_are_replaced(opened, how):
    hosts = opened("NoReset")

    async def run():
        first = await hosts.open({"messages": QUESTION}, seed=0)
        worker, server = hosts._hosts[0]._worker, hosts._server._server
        os.kill(worker._pid if how == "idle" else parent(worker._pid), signal.SIGKILL)
        server._process.wait() if how != "idle" else time.sleep(0.1)
        with pytest.raises(EnvironmentFailure, match="between two calls|its worker died|its worker ended"):
            await first.respond("")
        second = await hosts.open({"messages": QUESTION}, seed=0)
        return await second.respond("")

    assert asyncio.run(run()).messages[0]["content"] == "yes"


def test_what_loses_the_process_above_it_ends_when_it_is_replaced(opened):
    hosts = opened("NoReset", workers=2)

    async def run():
        first = await hosts.open({"messages": QUESTION}, seed=0)
        above, worker = hosts._server._server._process, hosts._hosts[0]._worker._pid
        left = {worker, parent(worker)}
        os.kill(above.pid, signal.SIGKILL)
        above.wait()
        await hosts.open({"messages": QUESTION}, seed=0)  # in a worker that another process has started
        with pytest.raises(EnvironmentFailure, match="between two calls|its worker died|its worker ended"):
            await first.respond("")
        return left

    left = asyncio.run(run())
    for _ in range(600):
        if not left & everything().keys():
            return
        time.sleep(0.05)
    raise AssertionError("the first worker, or what had started it, is left")


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_close_while_a_call_runs_and_after():
    async def run():
        hosts = Hosts(spec("hostile:Hostile"), HostLimits(workers=1))
        instance = await hosts.open({"messages": QUESTION, "kind": "hangs"}, seed=0)
        call = asyncio.ensure_future(instance.respond(""))
        waiting = asyncio.ensure_future(instance.respond(""))
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        hosts.close()
        hosts.close()
        results = await asyncio.gather(call, waiting, return_exceptions=True)
        with pytest.raises(EnvironmentFailure, match="closed"):
            await hosts.open({"messages": QUESTION}, seed=0)
        return results, time.monotonic() - begun

    (called, waited), seconds = asyncio.run(run())
    assert isinstance(called, EnvironmentFailure) and isinstance(waited, asyncio.CancelledError | EnvironmentFailure)
    assert seconds < 10


ORPHANS = """
import asyncio, sys
from proxima.environment.hosts import HostLimits, Hosts
from proxima.environment.interface import EnvironmentSpec
async def main():
    hosts = Hosts(EnvironmentSpec(kind="tests.environment.hostile:Hostile"), HostLimits(call_seconds=600))
    row = {"kind": "many forks", "messages": [{"role": "user", "content": "x"}]}
    instances = [await hosts.open(row, seed=0) for _ in range(2)]
    asyncio.get_running_loop().call_later(0.5, lambda: print(hosts._server._server._process.pid, flush=True))
    await asyncio.gather(*(instance.respond("") for instance in instances))
asyncio.run(main())
"""


def test_no_process_outlives_the_run():
    run = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    run.stdout.readline()
    assert len(family(run.pid, "fork_server.py")) > 100
    processes = everything()
    mark = {pid for pid in processes if below(pid, run.pid, processes)}
    run.kill()
    run.communicate()
    for _ in range(600):
        if not mark & everything().keys():
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {mark & everything().keys()}")


@pytest.mark.parametrize("field", ["workers", "call_seconds", "start_seconds"])
def test_bad_limits(field):
    with pytest.raises(ValueError, match=f"{field}=0 must be >"):
        HostLimits(**{field: 0})


def test_two_workers_that_find_the_log_full_rename_it_once(tmp_path, monkeypatch):
    """The second has opened the file that the first renames."""
    path = tmp_path / "environments.log"
    path.write_text("much\n")
    fstat = os.fstat

    def others_first(file):
        monkeypatch.setattr(os, "fstat", fstat)
        os.replace(path, f"{path}.1")
        path.write_text("new\n")
        return fstat(file)

    monkeypatch.setattr(host_process, "LOG_BYTES", 4)
    monkeypatch.setattr(os, "fstat", others_first)
    log = host_process.Log()
    log.path, log.left = str(path), 100
    log.write(b"mine\n")
    assert (path.read_text(), Path(f"{path}.1").read_text()) == ("new\n", "much\nmine\n")


def test_a_crash_after_the_log_was_renamed_is_told_in_the_new_one(tmp_path):
    """Another worker renames the file that this one keeps open for its crashes."""
    path = tmp_path / "environments.log"
    log = host_process.Log()
    output = sys.stdout, sys.stderr
    try:
        log.to(str(path))
        os.replace(path, f"{path}.1")
        path.write_text("new\n")
        log.begin("prompt 1")
        faulthandler.dump_traceback(log.crashes)
    finally:
        sys.stdout, sys.stderr = output
        log.to(None)
        faulthandler.enable()
    assert path.read_text().startswith("new\n") and "most recent call first" in path.read_text()
    assert Path(f"{path}.1").read_text() == ""


def test_line_ends_alone_are_bounded_with_their_labels(tmp_path):
    log, path = host_process.Log(), tmp_path / "environments.log"
    log.path, log.label, log.left = str(path), b"[1 prompt 2 sample 3] ", 1000
    assert log.write(b"\n" * 70_000) == 70_000
    assert path.stat().st_size == 1000 + len(host_process.CUT) and path.read_bytes().endswith(host_process.CUT)
    log.write(b"more\n")
    assert path.stat().st_size == 1000 + len(host_process.CUT)
