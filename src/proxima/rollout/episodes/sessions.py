"""Sessions: the episodes of a run, as an application from outside opens and closes them.

The run offers a place for each episode that it wants next. A session takes a place, and has the place's row and API
key. All sessions of a row, or of a group that the application names, are completions of one prompt: a group.

    a place: offered ──▶ open ──▶ closed, with its reward         its episode is over
                ▲          └────▶ ended: late, or abandoned       the episode is restarted, `episode.retries` times
                └─────────────────┘
"""

import asyncio
import math
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from proxima.data import FieldError, UserError
from proxima.environment.agents import AgentFailed, AgentJob, AgentReward, ListeningAgents
from proxima.environment.protocol import RewardWithParts
from proxima.rollout.episodes.formats.chat import ChatRefused
from proxima.system.jsonl import dumps, read_lines
from proxima.system.listening import open_socket

FILE = "sessions.jsonl"
MOST_KNOWN = 1 << 16  # sessions and groups that are over, of which the state is remembered
MOST_REWARD = 3e38  # of float32
QUEUE = 1024  # connections that wait in the kernel until the run serves them
BURST_SECONDS = 10.0  # of requests that may come at once
State = Literal["open", "closed", "ended"]


@dataclass(frozen=True)
class SessionLimits:
    """Bounds of sessions; see `Sessions`."""

    most_open: int
    per_minute: int
    group_seconds: float


@dataclass(eq=False)
class SessionPlace:
    """An episode that the run wants played."""

    job: AgentJob
    taken: "asyncio.Future[Session]"


@dataclass(eq=False)
class Session:
    """A session that is open."""

    name: str
    job: AgentJob
    group: "SessionGroup"
    closed: "asyncio.Future[AgentReward]"


@dataclass(eq=False)
class SessionGroup:
    """The sessions of a prompt.

    Args:
        uid: that of the prompt.
        name: the application's; empty: none.
        closed: number of its sessions that were closed.
        over: why no session of it can be opened any more; empty: it can.
    """

    uid: int
    name: str = ""
    places: list[SessionPlace] = field(default_factory=list)
    open: int = 0
    begun: bool = False
    closed: int = 0
    over: str = ""
    timer: asyncio.TimerHandle | None = None

    @property
    def free(self) -> list[SessionPlace]:
        """The places that a session can take: not those whose episode is being stopped."""
        return [place for place in self.places if not place.taken.done()]

    def stop_timer(self) -> None:
        """Let it wait without a limit."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def matches(self, row: int | Mapping[str, Any] | None) -> bool:
        """True if its row is the wanted one: its number in the run, or one with these columns; None: any."""
        if row is None or isinstance(row, int):
            return row in (None, self.uid)
        columns = self.places[0].job.row
        return all(name in columns and columns[name] == value for name, value in row.items())


class SessionFile:
    """The journal of sessions: a line when one is opened, closed or ends. What a kill left open ends with the next
    start.

    Args:
        path: the file; created if it is missing.

    Attributes: `known`, the state of each session that is over, and why, by its name, as far back as MOST_KNOWN.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: OrderedDict[str, tuple[State, str]] = OrderedDict()
        self._drop_torn_line()
        opened = dict[str, None]()
        for line in read_lines(path):
            name = str(line.get("session", ""))
            if line.get("event") == "opened":
                opened[name] = None
            elif line.get("event") in ("closed", "ended"):
                opened.pop(name, None)
                self.remember(name, line["event"], str(line.get("why", "")))
        for name in opened:
            self.ended(name, "the run was stopped before it was closed")

    def write(self, event: str, **facts: object) -> None:
        """Append a line, whole or not at all; OSError if it can't be written."""
        line = dumps({"time": round(time.time(), 3), "event": event, **facts}) + "\n"
        with self.path.open("ab", buffering=0) as file:
            size = file.tell()
            data = line.encode()
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                file.truncate(size)
                raise

    def ended(self, name: str, why: str) -> None:
        """Write that a session has ended without a reward."""
        self.remember(name, "ended", why)
        self.write("ended", session=name, why=why)

    def remember(self, name: str, state: State, why: str = "") -> None:
        """Keep the state of a session that is over."""
        self.known[name] = (state, why)
        while len(self.known) > MOST_KNOWN:
            self.known.popitem(last=False)

    def _drop_torn_line(self) -> None:
        """Cut off what a kill left of a line."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        if content and not content.endswith(b"\n"):
            with self.path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)


class SessionAgents(ListeningAgents):
    """Agents that are sessions of an application. The methods that refuse raise ChatRefused, with an HTTP status.

    Args:
        host, port: where the run listens.
        key: returns the application's key; FieldError: there is none.
        limits: bounds.
        now: a clock, in seconds.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: Callable[[], str],
        limits: SessionLimits,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.port = port
        self.limits = limits
        self.key = ""
        self.sessions: dict[str, Session] = {}
        self.listening: socket.socket | None = None
        self._read_key = key
        self._now = now
        self._groups: OrderedDict[int, SessionGroup] = OrderedDict()
        self._by_name: dict[str, SessionGroup] = {}
        self._file: SessionFile | None = None
        self._waiting = 0
        self._offered: asyncio.Event | None = None
        self._allowance = self._most_at_once
        self._allowed_at = now()

    # ---- the run's side ----------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Listen; requests wait until the run serves them.

        Raises:
            FieldError: there is no key, or the run can't listen there.
        """
        self.key = self._read_key()
        try:
            self.listening = open_socket(self.host, self.port)
            self.listening.listen(QUEUE)
        except (UserError, OSError) as error:
            why = error.reason if isinstance(error, UserError) else f"can't listen: {error.strerror}"
            remedy = "name another port or host, or end what listens there"
            raise FieldError("port", self.port, why, remedy=remedy) from None

    def begin(self, folder: Path) -> None:
        """Write the journal to a run's folder."""
        assert self.listening is not None
        self._file = SessionFile(folder / FILE)
        host, port, *_ = self.listening.getsockname()
        self._file.write("listening", host=host, port=port)

    async def play(self, job: AgentJob) -> AgentReward:
        """Offer a place, and wait until its session is closed.

        Raises:
            AgentFailed: the application has abandoned the session.
            UserError: its group has ended without this session.
        """
        group = self._groups.setdefault(job.group, SessionGroup(job.group))
        if group.over:
            raise UserError(group.over)
        place = SessionPlace(job, asyncio.get_running_loop().create_future())
        group.places.append(place)
        self._touch(group)
        self._notify()
        try:
            with job.clock.queued():
                session = await place.taken
        except asyncio.CancelledError:
            if place.taken.done() and not place.taken.cancelled() and place.taken.exception() is None:
                self._end(place.taken.result(), "the run has stopped")
            raise
        finally:
            if place in group.places:
                group.places.remove(place)
        try:
            return await session.closed
        except asyncio.CancelledError:
            reason = "it was open for longer than episode.seconds" if job.clock.late else "the run has stopped"
            self._end(session, reason)
            raise
        finally:
            self._touch(group)
            self._forget()

    def close(self) -> None:
        if self.listening is not None:
            self.listening.close()

    # ---- the application's side --------------------------------------------------------------------------------------

    async def open(self, row: int | Mapping[str, Any] | None, name: str, wait: float) -> Session:
        """Open a session.

        Args:
            row: the number of the row in this run, or columns that it has; None: the run chooses.
            name: the application's name of its group; empty: the group is that of the row.
            wait: seconds to wait for a place.
        """
        self._admit()
        deadline = self._now() + wait
        self._waiting += 1
        try:
            while (found := self._place(row, name)) is None:
                if self._offered is None:
                    self._offered = asyncio.Event()
                left = deadline - self._now()
                try:
                    async with asyncio.timeout(max(0.0, left)):  # `wait_for` may swallow that the client has gone
                        await self._offered.wait()
                except TimeoutError:
                    reason = "the run wants no further episode now: ask again"
                    raise ChatRefused(reason, code="no_place", status=503) from None
            group, place = found
            return self._opened(group, place, name)
        finally:
            self._waiting -= 1

    def give(self, name: str, reward: float | None, parts: Mapping[str, float]) -> None:
        """Close a session with its reward."""
        session = self._session(name)
        self._write("closed", session=name, reward=reward, parts=parts)
        self._journal.remember(name, "closed")
        del self.sessions[name]
        session.group.open -= 1
        session.group.closed += 1
        if parts and reward is not None:
            session.closed.set_result(RewardWithParts(value=reward, parts=parts))
        else:
            session.closed.set_result(reward)

    def abandon(self, name: str) -> None:
        """End a session without a reward; its place is offered again."""
        session = self._session(name)
        self._end(session, "the application abandoned it")
        session.closed.set_exception(AgentFailed("the application abandoned its session", None))

    def state(self, name: str) -> tuple[State, str]:
        """The state of a session, and why it has ended."""
        if name in self.sessions:
            return "open", ""
        if name not in self._journal.known:
            raise ChatRefused(f"no session has the id {name!r:.60}", code="session_not_found", status=404)
        return self._journal.known[name]

    def offered(self) -> list[SessionGroup]:
        """The groups in which a session can be opened, in the order of the run's prompts."""
        waiting = [group for group in self._groups.values() if group.free and not group.over]
        return sorted(waiting, key=lambda group: group.uid)

    # ---- helpers -----------------------------------------------------------------------------------------------------

    @property
    def _journal(self) -> SessionFile:
        assert self._file is not None
        return self._file

    @property
    def _most_at_once(self) -> float:
        return max(1.0, self.limits.per_minute / 60 * BURST_SECONDS)

    def _admit(self) -> None:
        """Refuse a request for a session beyond the bounds."""
        now = self._now()
        earned = (now - self._allowed_at) * self.limits.per_minute / 60
        self._allowance = min(self._most_at_once, self._allowance + earned)
        self._allowed_at = now
        if self._allowance < 1:
            reason = f"more than {self.limits.per_minute} requests for a session a minute (per_minute)"
            raise ChatRefused(reason, code="rate_limit", status=429)
        self._allowance -= 1
        if self._waiting >= self.limits.most_open or len(self.sessions) >= self.limits.most_open:
            what = f"{len(self.sessions)} sessions are open and {self._waiting} wait; most_open={self.limits.most_open}"
            raise ChatRefused(what, code="too_many_sessions", status=429)

    def _place(self, row: int | Mapping[str, Any] | None, name: str) -> tuple[SessionGroup, SessionPlace] | None:
        """The place that a session takes next; None: there is none yet. Places that a named group may still get are
        not waited for: they come only if an episode is restarted."""
        if len(self.sessions) >= self.limits.most_open:
            return None
        group = self._by_name.get(name) if name else None
        if group is not None:
            if group.over or not group.free:
                reason = group.over or f"all places of the group {name!r:.80} are taken"
                raise ChatRefused(reason, code="group_full", status=409)
            if not group.matches(row):
                reason = f"the group {name!r:.80} has another row, {group.uid}"
                raise ChatRefused(reason, code="other_row", status=409)
            return group, group.free[0]
        unnamed = [each for each in self.offered() if not each.name and each.matches(row)]
        if name:
            unnamed = [each for each in unnamed if not each.begun]
        else:
            unnamed.sort(key=lambda each: not each.begun)  # fill what has begun
        if not unnamed:
            return None
        return unnamed[0], unnamed[0].free[0]

    def _opened(self, group: SessionGroup, place: SessionPlace, name: str) -> Session:
        session = Session(secrets.token_hex(8), place.job, group, asyncio.get_running_loop().create_future())
        facts: dict[str, Any] = {"uid": group.uid, "sample": place.job.sample}
        if name:
            facts["group"] = name
        self._write("opened", session=session.name, **facts)
        if name and not group.name:
            group.name = name
            self._by_name[name] = group
        group.places.remove(place)
        group.begun = True
        group.open += 1
        group.stop_timer()
        self.sessions[session.name] = session
        place.taken.set_result(session)
        return session

    def _session(self, name: str) -> Session:
        """An open session; ChatRefused if it is not open."""
        session = self.sessions.get(name)
        if session is not None:
            if session.closed.done():  # its episode is being stopped
                raise ChatRefused("the session has just ended", code="session_ended", status=410)
            return session
        state, why = self.state(name)
        if state == "closed":
            raise ChatRefused("the session is closed already", code="session_closed", status=409)
        raise ChatRefused(f"the session has ended: {why}", code="session_ended", status=410)

    def _end(self, session: Session, why: str) -> None:
        """End an open session without a reward."""
        if self.sessions.pop(session.name, None) is None:
            return
        session.group.open -= 1
        try:
            self._journal.ended(session.name, why)
        except OSError:  # the next start writes that it has ended
            return

    def _write(self, event: str, **facts: object) -> None:
        """Write to the journal before anything changes."""
        try:
            self._journal.write(event, **facts)
        except OSError as error:
            reason = f"the run can't write its journal, {FILE}: {error.strerror}; ask again later"
            raise ChatRefused(reason, code="not_journalled", status=507) from None

    def _notify(self) -> None:
        """Wake the requests that wait for a place."""
        if self._offered is not None:
            self._offered.set()
            self._offered = None

    def _touch(self, group: SessionGroup) -> None:
        """Start the time after which a group ends, if some of its sessions were closed and none is open."""
        self._notify()  # one session fewer is open
        if group.closed and not group.open and group.places and group.timer is None:
            loop = asyncio.get_running_loop()
            group.timer = loop.call_later(self.limits.group_seconds, self._give_up, group)

    def _give_up(self, group: SessionGroup) -> None:
        """End the places of a group that nobody has opened."""
        group.over = f"the group ended with {group.closed} sessions: none was open for {self.limits.group_seconds:g} s"
        for place in group.free:
            place.taken.set_exception(UserError(group.over))

    def _forget(self) -> None:
        """Forget the oldest groups that are over."""
        if len(self._groups) <= MOST_KNOWN:
            return
        for uid, group in list(self._groups.items()):
            if group.places or group.open:
                continue
            del self._groups[uid]
            self._by_name.pop(group.name, None)
            if len(self._groups) <= MOST_KNOWN:
                return


def checked_reward(value: object, where: str) -> float:
    """A reward as a number; ChatRefused if it is none that can be trained on."""
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not abs(number) <= MOST_REWARD:
        raise ChatRefused(f"{where}={value!r:.60}: must be a finite number, at most {MOST_REWARD:g} in size")
    return number
