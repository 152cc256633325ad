"""The servers of an engine: started together, restarted when they die, stopped together. Their logs say why."""

import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from textwrap import shorten

import httpx

from proxima.data import FieldError, UserError, require
from proxima.engine.serve.launch import LAUNCHES, Launch, Serve, find_executable, variable_value
from proxima.process.children import start_module
from proxima.process.exit_status import describe_exit
from proxima.system.http_clients import http_client

BEAT = 0.25  # seconds between two polls of a server
STEADY = 60.0  # seconds of answering after which earlier deaths are forgotten
LONGEST_BREAK = 60.0  # seconds between a death and the next start
HEALTH = 5.0  # seconds between two health checks of a server that has answered
SILENCE = 120.0  # seconds without an answer to a health check after which it counts as dead
NEWS = 5.0  # seconds between two progress lines about a starting server
PATIENCE = 10.0  # seconds from SIGTERM to SIGKILL
TAIL = 200_000  # bytes at the end of the log that are read
ASK_SECONDS = 5.0
WIDTH = 300  # most characters of a line that explains a death
# `(EngineCore pid=1234) INFO 11-21 09:02:38 [core.py:93] Loading weights` → `Loading weights`
_PREFIX = re.compile(r"^(\([^()]* pid=\d+\) ?)*((INFO|WARNING|ERROR|DEBUG|CRITICAL) \S+ \S+ \[[^\]]*\] ?)?")
_ERROR = re.compile(
    r"^(?:[\w.]+: error: |(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b ?(?::|$)|Value error, |\[Errno|Killed\b)"
)
_KILLED = re.compile(r"out of memory|cannot allocate memory|std::bad_alloc|oom[- ]kill", re.IGNORECASE)
_WRAPPERS = (  # errors that only wrap another one
    "engine core initialization failed",
    "see root cause above",
    "enginecore encountered",
    "worker failed with",
    "validation error for",
)
Report = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def check_serve(kind: str, serve: Serve, *, model: str) -> None:
    """Check for anything that would prevent the servers from starting, without starting one.

    Raises:
        FieldError: `executable` or `environment` has no server, `port` is taken, or a variable is not set; fields are
            relative to `engine.serve`.
        UserError: proxima can't start this kind, no server is installed, or it can't load the model.
    """
    if kind not in LAUNCHES:
        kinds = ", ".join(LAUNCHES)
        raise UserError(f"proxima can't start {kind}, only {kinds}", remedy=f"start {kind} yourself and set engine.url")
    if model.endswith(".gguf"):
        remedy = "give a Hugging Face folder; `proxima export` and `make demo` write one"
        raise UserError(f"model.path={model!r}: {kind} can't serve .gguf files", remedy=remedy)
    find_executable(serve, kind)
    for name, value in serve.variables.items():
        reason = "must name an environment variable that is set"
        require(variable_value(value) is not None, f"variables.{name}", value, reason)
    if serve.port:
        for port in range(serve.port, serve.port + serve.replicas):
            if not is_free(port):
                remedy = f"0 takes a free one; engine.url=http://127.0.0.1:{port} uses a server that is running"
                raise FieldError("port", serve.port, f"is in use on 127.0.0.1: {port}", remedy=remedy)


class ServerProcess:
    """A server that is started immediately, and stops when this process ends, however it ends.

    Args:
        launch: command and address.
        key: key that clients must send; it is passed in an environment variable, and never written.
        log: file to which its output is appended, below a line with the command.
    """

    def __init__(self, launch: Launch, key: str, log: Path) -> None:
        self.launch = launch
        self.log = log
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = http_client(launch.url, base_url=launch.url, headers=headers, timeout=ASK_SECONDS)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            stream.write(f"$ {launch.by_hand}\n".encode())
            stream.flush()
            self._begin = stream.tell()
            command = (f"{PATIENCE:g}", *launch.command)
            environment = launch.environment(key)
            self._child = start_module(
                "proxima.process.guardian", *command, flag="-I", stdout=stream, stderr=stream, env=environment
            )

    @property
    def code(self) -> int | None:
        """Exit code of the server, 128 + N or -N after signal N; None while it runs."""
        return self._child.process.poll()

    def answers(self) -> bool:
        """Return True if the server is ready: it is healthy, and serves its model to clients with the key."""
        try:
            ready = self._status_is_good("/health") and self._status_is_good("/v1/models")
        except httpx.HTTPError:
            return False
        return ready and self.code is None

    def is_unhealthy(self) -> bool | None:
        """Return True if a server that has answered before can't recover although its process runs: it reports so, or
        no longer listens. None: it does not answer, for example because it is busy.
        """
        try:
            return not self._status_is_good("/health")
        except httpx.ConnectError:
            return True
        except httpx.HTTPError:
            return None

    def _status_is_good(self, path: str) -> bool:
        """Send a GET and return whether its status is a success; the body is not read."""
        with self._http.stream("GET", path) as response:
            return response.is_success

    def output(self) -> str:
        """The last part of its output since its start."""
        with self.log.open("rb") as stream:
            end = stream.seek(0, 2)
            stream.seek(max(self._begin, end - TAIL))
            return self.launch.masked(stream.read().decode(errors="replace"))

    def describe_exit(self) -> str:
        """Describe how it ended, with the line of its log that explains why."""
        code = self.code or 0
        if code - 128 in list(signal.Signals):
            code = 128 - code
        return describe_exit(code, last_error(self.output()))

    def ask_to_stop(self) -> None:
        """Start stopping all its processes; `stop` waits until they have ended."""
        self._child.channel.close()

    def stop(self) -> None:
        """Stop all its processes and wait until they have ended. May be called twice."""
        self._child.end(3 * PATIENCE)  # if it is killed, the server gets a SIGTERM from the kernel
        self._http.close()


@dataclass(eq=False)
class StartedServer:
    """A server of `Servers`, across all its restarts.

    Args:
        launch: its command, on the same port at each start.
        log: of its output.
        process: the running process, or the last one.
        ready: it has answered, and has not died since.
        answered: one of its processes has answered; from then on it is restarted when it dies.
        deaths: number of consecutive processes that ended before they were steady.
    """

    launch: Launch
    log: Path
    process: ServerProcess | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    answered: bool = False
    deaths: int = 0

    @property
    def name(self) -> str:
        """Kind and address, for messages."""
        return f"{self.launch.kind} {self.launch.url.removeprefix('http://')}"


class Servers:
    """Servers with the same model and the same key. `close` stops them.

    A server that dies is restarted on its port, with a longer delay after each consecutive death, and then has the
    weights from its model's files: new weights must be published to it again.

    Args:
        launch: gives the launch of a server at a port.
        serve: the settings, such as the start timeout and the number of restarts.
        key: key that clients must send; None: one is generated; empty: no key.
        log: file of the first server's output; that of the second is `NAME.1.log`, and so on. None: a temporary one.
        report: receives lines of progress.
    """

    def __init__(
        self, launch: Callable[[int], Launch], serve: Serve, *, key: str | None, log: Path | None, report: Report
    ) -> None:
        if key is None:
            self.token = secrets.token_urlsafe(24)
        else:
            self.token = key
        self.serve = serve
        self.report = report
        self.failure: UserError | None = None
        self._reserved = ExitStack()
        self._log_stays = log is not None
        launches = [launch(port) for port in ports_for(serve, self._reserved)]
        for each in launches:
            report(f"$ {each.by_hand}")
        if log is None:
            folder = self._reserved.enter_context(tempfile.TemporaryDirectory(prefix="proxima-server-"))
            log = Path(folder) / "engine.log"
        self.started = list[StartedServer]()
        for number, each in enumerate(launches):
            own_log = log.with_name(f"{log.stem}.{number}{log.suffix}") if number else log
            self.started.append(StartedServer(each, own_log))
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep, args=(server,), name=f"proxima-{server.name}", daemon=True)
            for server in self.started
        ]

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of all servers, unchanged by restarts."""
        return tuple(server.launch.url for server in self.started)

    def start(self) -> "Servers":
        """Start all servers, and return when all answer.

        Raises:
            UserError: a server died or did not answer in time; all are stopped.
        """
        started = time.monotonic()
        for thread in self._threads:
            thread.start()
        try:
            news = started
            while not all(server.ready.is_set() for server in self.started):
                if self.failure is not None:
                    raise self.failure
                self._closing.wait(BEAT)
                if time.monotonic() - news >= NEWS:
                    news = time.monotonic()
                    self._tell(news - started)
        except BaseException:
            self.close()
            raise
        for server in self.started:
            self.report(f"{server.name}  answers after {time.monotonic() - started:.0f} s")
        return self

    def wait(self) -> UserError:
        """Wait until a server is given up; return the reason."""
        while self.failure is None:
            self._closing.wait(BEAT)
        return self.failure

    def close(self) -> None:
        """Stop all servers and wait until they have ended. May be called twice."""
        self._closing.set()
        for server in self.started:
            if server.process is not None:
                server.process.ask_to_stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._reserved.close()

    def _tell(self, seconds: float) -> None:
        for server in self.started:
            if not server.ready.is_set() and server.process is not None:
                self.report(f"{server.name}  {seconds:.0f} s  {doing(server.process.output()) or 'starting'}")

    # ---- in a thread a server ----------------------------------------------------------------------------------------

    def _keep(self, server: StartedServer) -> None:
        """Start a server, and restart it after each death, until it is given up or all are closed."""
        while not self._closing.is_set() and self.failure is None:
            try:
                server.process = ServerProcess(server.launch, self.token, server.log)
            except OSError as error:  # no memory for another process, or the program is gone
                self.failure = UserError(f"{server.name} can't be started: {error}")
                return
            try:
                reason = self._watch(server, server.process)
            finally:
                server.process.stop()
            if self._closing.is_set():
                return
            server.deaths += 1
            message = f"{server.name} {reason or server.process.describe_exit()}"
            most = self.serve.restarts
            if server.deaths > most or not server.answered:
                if self._log_stays:
                    message = f"{message}; see {server.log}"
                self.failure = UserError(message)
                return
            server.ready.clear()
            pause = min(LONGEST_BREAK, 2.0 ** (server.deaths - 1))
            self.report(f"{message}; restarting in {pause:.0f} s, death {server.deaths} of at most {most}")
            self._closing.wait(pause)

    def _watch(self, server: StartedServer, process: ServerProcess) -> str:
        """Wait until the process has ended or all are closed; return why it must be stopped, if it does not end by
        itself."""
        ready_at = time.monotonic()
        answered_at = ready_at
        checked = ready_at
        while process.code is None and not self._closing.wait(BEAT):
            now = time.monotonic()
            if not server.ready.is_set():
                if process.answers():
                    ready_at = now
                    answered_at = now
                    checked = now
                    server.answered = True
                    server.ready.set()
                elif now - answered_at > self.serve.start_seconds:
                    silent = f"has not answered for {self.serve.start_seconds:g} s"
                    words = doing(process.output())
                    return f"{silent}; its log ends with: {words}" if words else silent
                continue
            if now - ready_at >= STEADY:
                server.deaths = 0
            if now - checked < HEALTH:
                continue
            checked = now
            unhealthy = process.is_unhealthy()
            if unhealthy and process.code is None:
                return f"is not healthy any more: {last_error(process.output())}"
            if unhealthy is False:
                answered_at = now
            if now - answered_at > SILENCE:
                return f"has not answered for {SILENCE:g} s"
        return ""


def start_servers(
    kind: str,
    serve: Serve,
    *,
    model: str,
    key: str | None = None,
    log: Path | None = None,
    report: Report = to_stderr,
    max_length: int | None = None,
    quantization: str | None = None,
    sampling_mask: bool = False,
    routed_experts: bool = False,
    adapter_rank: int = 0,
) -> Servers:
    """Start the servers of an engine; returns when all answer, after half a minute or more.

    Args:
        kind: kind of the engine, `vllm` or `sglang`.
        serve: the section `engine.serve`.
        model: hub name or folder; a server loads it by itself.
        key, log, report: see `Servers`.
        max_length, quantization, sampling_mask, routed_experts, adapter_rank: see `vllm_launch`.

    Raises:
        FieldError, UserError: as for `check_serve`, or a server did not start.
    """
    check_serve(kind, serve, model=model)
    expanded = os.path.expanduser(model)
    if os.path.exists(expanded):
        model = os.path.abspath(expanded)
    launch = partial(
        LAUNCHES[kind],
        serve,
        model,
        max_length=max_length,
        quantization=quantization,
        sampling_mask=sampling_mask,
        routed_experts=routed_experts,
    )
    if adapter_rank:
        launch = partial(launch, adapter_rank=adapter_rank)
    return Servers(launch, serve, key=key, log=log, report=report).start()


def ports_for(serve: Serve, reserved: ExitStack) -> list[int]:
    """Choose a port for each server: the requested ones, or free ones.

    Args:
        reserved: receives the sockets that reserve free ports, also between two starts of a server. They are bound but
            do not listen, so Linux still lets the server listen on the port.
    """
    if serve.port:
        return list(range(serve.port, serve.port + serve.replicas))
    sockets = [reserved.enter_context(socket.socket()) for _ in range(serve.replicas)]
    for reserving in sockets:
        reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserving.bind(("127.0.0.1", 0))
    ports = [reserving.getsockname()[1] for reserving in sockets]
    if sys.platform != "linux":  # elsewhere they would block the servers too
        reserved.close()
    return ports


def is_free(port: int) -> bool:
    """Return True if a server could listen on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def doing(text: str) -> str:
    """The last line of the log that reads like a sentence, shortened; empty if there is none."""
    for line in reversed(text.splitlines()):
        words = _PREFIX.sub("", line).strip()
        if len(re.findall(r"[A-Za-z]{2,}", words)) > 1 and not words.startswith(("File ", "Traceback", "warnings.")):
            return shorten(words, 90, placeholder=" …")
    return ""


def last_error(text: str) -> str:
    """The line that explains why a server died; the last line if none does; empty for an empty log.

    Of several exceptions, the first one since the last start that does not merely wrap another counts.
    """
    every_line = [_PREFIX.sub("", line).strip() for line in text.splitlines()]
    lines = list(filter(None, every_line))
    errors = [line for line in lines if _ERROR.match(line) and not line.startswith(("SystemExit", "KeyboardInterrupt"))]
    causes = [line for line in errors if not any(wrapper in line.lower() for wrapper in _WRAPPERS)]
    memory = [line for line in lines if _KILLED.search(line)]
    return shorten([*causes, *errors, *memory, *reversed(lines), ""][0], WIDTH, placeholder=" …")
