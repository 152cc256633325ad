"""The actor of a rank, without Ray: it is a class like any other."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from proxima.runtime.placement.rank_host import RankHost
from tests.processes import is_running


async def started(folder: Path, act: str | int | None = None) -> RankHost:
    """An actor, when its process has noted that it runs."""
    host, environment = RankHost(), {"RANK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = {"folder": str(folder), "acts": [{} if act is None else {"1": act}]}
    function = "tests.runtime.placement.rank_functions:play"
    await host.start(function, arguments, environment, sys.executable, str(folder))
    while not list(folder.glob("1.*.json")):
        await asyncio.sleep(0.02)
    return host


async def finished(host: RankHost) -> tuple[list[tuple[int, str]], int]:
    lines: list[tuple[int, str]] = []
    while True:
        report = await host.report(0.2)
        lines += report.lines
        if report.exit_code is not None:
            return lines, report.exit_code


ENDS = {  # how it ends → exit code, last line
    "by itself": (2, "waits 1"),
    "an exception": (70, "RuntimeError: a bad day"),
    "a signal": (-signal.SIGKILL, "waits 1"),
    "interrupt": (130, "writes a checkpoint"),
    "kill": (-signal.SIGKILL, "waits 1"),
}
ACTS = {"by itself": 2, "an exception": "raise", "a signal": "kill"}


@pytest.mark.parametrize("how", ENDS)
def test_lines_and_exit_code(tmp_path, how):
    async def run() -> None:
        host = await started(tmp_path, ACTS.get(how))
        if how not in ACTS:
            await getattr(host, how)()
        lines, exit_code = await finished(host)
        assert lines[0] == (1, "waits 1") and (exit_code, lines[-1][1]) == ENDS[how]
        await host.kill()  # of a process that has ended

    asyncio.run(run())


def test_the_process_ends_with_its_actor(tmp_path):
    async def run() -> int:
        host = await started(tmp_path)
        assert host.channel is not None and host.process is not None
        host.channel.close()
        assert await host.process.wait() == 0
        return host.process.pid

    pid = asyncio.run(run())
    assert [file.name for file in tmp_path.iterdir()] == [f"1.{pid}.json"] and not is_running(pid)
