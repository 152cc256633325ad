"""The environment `sessions`: an application that already runs plays the episodes."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from proxima.data import FieldError, require
from proxima.environment.agent_kinds import AgentKind
from proxima.rollout.episodes.sessions import SessionAgents, SessionLimits
from proxima.system.machine import SERVER_REMEDY, missing_for_server

LEAST_KEY = 16  # characters
NEW_KEY = "openssl rand -hex 32 makes one"


@dataclass(frozen=True, kw_only=True)
class Sessions(AgentKind):
    """Episodes that an application opens, plays against the run's endpoint, rewards and closes.

    Args:
        host, port: where the run listens, from its start to its end; 0: a free port, which sessions.jsonl names.
        key_env: environment variable with the key that the application sends. The key is written nowhere.
        key_file: a file with the key, in place of the variable.
        most_open: sessions that are open at once; as many more requests may wait for a place.
        per_minute: requests for a session that are answered in a minute; others have status 429.
        group_seconds: the remaining places of a group end when, after one of its sessions was closed, none was open
            for so long.
        count: rows of its own, for the task `environment`, without a question: the application asks its own.
    """

    trains_only: ClassVar[bool] = True

    host: str = "127.0.0.1"
    port: int = 8700
    key_env: str = "PROXIMA_SESSIONS_KEY"
    key_file: str = ""
    most_open: int = 256
    per_minute: int = 6000
    group_seconds: float = 3600.0
    count: int = 1000

    def __post_init__(self) -> None:
        require(bool(self.host), "host", self.host, "must be an address of this machine")
        require(0 <= self.port < 1 << 16, "port", self.port, "must be in [0, 65535]", remedy="0: a free one")
        for name in ("most_open", "per_minute", "count"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be >= 1")
        require(0 < self.group_seconds < 1e7, "group_seconds", self.group_seconds, "must be > 0 and < 1e7")
        require(bool(self.key_env or self.key_file), "key_env", self.key_env, "must name an environment variable")
        missing = missing_for_server()
        require(not missing, "port", self.port, f"is served by {missing}, not installed here", remedy=SERVER_REMEDY)

    def key(self) -> str:
        """The key; FieldError if there is none, or one that is too easily guessed or can't be sent."""
        if self.key_file:
            field = "key_file"
            place = self.key_file
            try:
                key = Path(self.key_file).expanduser().read_text(encoding="ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                why = getattr(error, "strerror", None) or "it is not ASCII"
                raise FieldError(field, place, f"can't be read: {why}", remedy=NEW_KEY) from None
        else:
            field = "key_env"
            place = self.key_env
            key = os.environ.get(self.key_env, "").strip()
            require(bool(key), field, place, "must name an environment variable that is set", remedy=NEW_KEY)
        sound = len(key) >= LEAST_KEY and key.isascii() and key.isprintable() and " " not in key
        bound = f"must have a key of at least {LEAST_KEY} letters, digits and signs, without spaces"
        require(sound, field, place, bound, remedy=NEW_KEY)
        return key

    def build(self) -> SessionAgents:
        from proxima.rollout.episodes.session_routes import ServedSessions  # serves by starlette, an optional package

        limits = SessionLimits(self.most_open, self.per_minute, self.group_seconds)
        return ServedSessions(self.host, self.port, self.key, limits)

    def rows(self, split: str, skip: int, size: int | None) -> Sequence[Mapping[str, Any]]:
        """Rows without a question."""
        require(split == "train", "split", split, "has no rows: sessions play in training alone")
        end = self.count
        if size is not None:
            end = min(end, skip + size)
        return [{"messages": (), "answer": None, "number": number} for number in range(skip, end)]
