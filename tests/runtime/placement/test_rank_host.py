"""The actor of a rank, without Ray: it is a class like any other."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from proxima.runtime.placement.rank_host import RankHost

FUNCTIONS = "tests.runtime.placement.rank_functions"


def started(folder: Path, **arguments: object) -> tuple[str, dict[str, object], dict[str, str], str, str]:
    environment = {"RANK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return f"{FUNCTIONS}:wait", {"folder": str(folder), **arguments}, environment, sys.executable, str(folder)


async def finished(host: RankHost) -> tuple[list[tuple[int, str]], int]:
    lines: list[tuple[int, str]] = []
    while True:
        report = await host.report(0.2)
        lines += report.lines
        if report.exit_code is not None:
            return lines, report.exit_code


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("code", "last"), [(2, "waits 1"), (70, "RuntimeError: a bad day"), (-9, "waits 1")])
def test_lines_and_exit_code(tmp_path, code, last):
    async def run() -> None:
        host = RankHost()
        await host.start(*started(tmp_path, victim=1, code=code))
        lines, exit_code = await finished(host)
        assert exit_code == code and lines[0] == (1, "waits 1") and lines[-1][1] == last
        await host.kill()  # of a process that has ended

    asyncio.run(run())


@pytest.mark.timeout(120)
def test_interrupt_and_kill(tmp_path):
    async def run() -> None:
        for end, code in (("interrupt", 130), ("kill", -signal.SIGKILL)):
            host = RankHost()
            await host.start(*started(tmp_path))
            while not list(tmp_path.glob("1.*.json")):
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            await getattr(host, end)()
            lines, exit_code = await finished(host)
            assert exit_code == code
            assert ((1, "writes a checkpoint") in lines) == (end == "interrupt")
            for file in tmp_path.glob("1.*.json"):
                file.unlink()

    asyncio.run(run())


@pytest.mark.timeout(120)
def test_the_process_ends_with_its_actor(tmp_path):
    async def run() -> int:
        host = RankHost()
        await host.start(*started(tmp_path))
        while not (files := list(tmp_path.glob("1.*.json"))):
            await asyncio.sleep(0.05)
        assert host.channel is not None and host.process is not None
        pid = int(json.loads(files[0].read_text())["pid"])
        assert pid == host.process.pid
        host.channel.close()
        return pid if await asyncio.wait_for(host.process.wait(), 30) == 0 else 0

    pid = asyncio.run(run())
    time.sleep(0.1)
    assert pid and not Path(f"/proc/{pid}").exists()
