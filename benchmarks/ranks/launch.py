"""Run the command line on one process or several: forked from this one, which has imported everything, with the
environment that torchrun sets; or started by torchrun itself."""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import harness

ROOT = harness.HERE.parent
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
SECONDS = 300.0  # timeout of one run, after which its processes are killed


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def run_command(words: Sequence[str], ranks: int, log: Path, *, torchrun: bool = False) -> str:
    """Run `proxima WORDS` on `ranks` processes and return why it failed, or an empty string."""
    if torchrun and ranks > 1:
        return _by_torchrun(words, ranks, log)
    processes = start(words, ranks, log)
    return wait(processes, log)


def start(words: Sequence[str], ranks: int, log: Path) -> list[int]:
    """Fork the processes and return their ids."""
    port, sizes = free_port(), {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    log.unlink(missing_ok=True)
    processes = []
    for rank in range(ranks):
        pid = os.fork()
        if pid:
            processes.append(pid)
            continue
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(ONE_THREAD if ranks == 1 else ONE_THREAD | sizes | own)
        os.chdir(ROOT)
        with log.open("a", encoding="utf-8") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        code = 70
        try:
            from proxima.cli.main import main

            code = main([*words, *([] if ranks == 1 else [f"placement.timeout={SECONDS:g}"])])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return processes


def wait(processes: list[int], log: Path, until: Callable[[], bool] = lambda: False) -> str:
    """Wait for the processes to exit; kill them after a timeout, after a failure, or when `until` returns True. Return
    why they failed, or an empty string."""
    codes: dict[int, int] = {}
    deadline, failed_at = time.monotonic() + SECONDS, 0.0
    while len(codes) < len(processes):
        for pid in processes:
            if pid not in codes and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        now = time.monotonic()
        failed_at = failed_at or (now if any(codes.values()) else 0.0)
        killed = until()
        if killed or now > deadline or (failed_at and now > failed_at + 5):  # as torchrun stops the others
            for pid in processes:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[pid] = 0 if killed else -9
        time.sleep(0.01)
    if any(codes.values()):
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line]
        return f"exit codes {list(codes.values())}: {(errors or lines or ['no output'])[-1].strip()[:300]}"
    return ""


def _by_torchrun(words: Sequence[str], ranks: int, log: Path) -> str:
    torch_run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    torch_run += ["--master-port", str(free_port()), "-m", "proxima.cli.main"]
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    with log.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                [*torch_run, *words], cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=SECONDS
            ).returncode
        except subprocess.TimeoutExpired:
            return f"no end after {SECONDS:g} seconds"
    return "" if code == 0 else f"exit code {code}: {log}"
