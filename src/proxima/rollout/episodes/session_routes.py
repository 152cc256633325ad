"""The HTTP API of sessions, beside that of the chats: `/v1/sessions`, for whoever has the application's key."""

import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from proxima.rollout.episodes.endpoint import unless_gone
from proxima.rollout.episodes.formats.chat import ChatRefused
from proxima.rollout.episodes.formats.completions import openai_error
from proxima.rollout.episodes.sessions import Session, SessionAgents, checked_reward
from proxima.system.bounded_reading import TooLargeError, UnreadableError, parse_json
from proxima.system.bounded_server import BoundedReader, bearer
from proxima.system.jsonl import dumps
from proxima.system.web_requests import name_in_host

MOST_BYTES = 1 << 20  # of a request
READ_SECONDS = 30.0  # to receive its body
MOST_WAIT = 60.0  # seconds for a place
USUAL_WAIT = 30.0
MOST_NAME = 256  # characters of a group's name
MOST_ROWS = 100  # that are listed
MOST_PARTS = 64  # of a reward
Handler = Callable[[Request], Awaitable[Response]]


def session_routes(agents: SessionAgents) -> list[Route]:
    """The routes that open, list, close and abandon sessions."""
    api = _SessionApi(agents)
    return [
        Route("/v1/sessions", api.guarded(api.open), methods=["POST"]),
        Route("/v1/sessions", api.guarded(api.listed), methods=["GET"]),
        Route("/v1/sessions/{name}", api.guarded(api.shown), methods=["GET"]),
        Route("/v1/sessions/{name}", api.guarded(api.abandon), methods=["DELETE"]),
        Route("/v1/sessions/{name}/close", api.guarded(api.close), methods=["POST"]),
    ]


class ServedSessions(SessionAgents):
    """Sessions with the routes by which they are opened and closed."""

    def routes(self) -> list[Route]:
        return session_routes(self)


class _SessionApi:
    def __init__(self, agents: SessionAgents) -> None:
        self.agents = agents
        self._reader = BoundedReader((), MOST_BYTES, READ_SECONDS, spared=1 << 16, option="")

    def guarded(self, handler: Handler) -> Handler:
        """A handler that only the key reaches, and whose refusals are answers."""

        async def answered(request: Request) -> Response:
            try:
                self._check_key(request)
                return await handler(request)
            except ChatRefused as refusal:
                if refusal.status in (429, 503, 507):
                    headers = {"Retry-After": "1"}
                else:
                    headers = {}
                return JSONResponse(openai_error(refusal), refusal.status, headers)

        return answered

    async def open(self, request: Request) -> Response:
        body = await self._read(request, {"row", "group", "wait"})
        row = body.get("row")
        name = body.get("group")
        wait = body.get("wait", USUAL_WAIT)
        whole = isinstance(row, int) and not isinstance(row, bool)
        if not (row is None or whole or (isinstance(row, dict) and row)):
            raise ChatRefused("row: must be the number of a row of this run, or an object of columns that it has")
        if name is not None and not (isinstance(name, str) and 0 < len(name) <= MOST_NAME):
            raise ChatRefused(f"group: must be a text of 1 to {MOST_NAME} characters")
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait <= MOST_WAIT:
            raise ChatRefused(f"wait={wait!r:.60}: must be seconds, from 0 to {MOST_WAIT:g}")
        session = await unless_gone(request, self.agents.open(row, name or "", wait))
        return JSONResponse(self._facts(session, str(request.base_url)), 201)

    async def listed(self, request: Request) -> Response:
        offered = self.agents.offered()
        rows = [{"row": each.uid, "group": each.name or None, "places": len(each.places)} for each in offered]
        places = sum(len(each.places) for each in offered)
        return JSONResponse({"open": len(self.agents.sessions), "places": places, "rows": rows[:MOST_ROWS]})

    async def shown(self, request: Request) -> Response:
        name = request.path_params["name"]
        state, why = self.agents.state(name)
        return JSONResponse({"id": name, "state": state, "why": why or None})

    async def close(self, request: Request) -> Response:
        body = await self._read(request, {"reward", "parts"})
        reward = body.get("reward")
        parts = body.get("parts") or {}
        if reward is not None:
            reward = checked_reward(reward, "reward")
        if not isinstance(parts, dict) or len(parts) > MOST_PARTS:
            raise ChatRefused(f"parts: must be an object of at most {MOST_PARTS} numbers")
        if parts and reward is None:
            raise ChatRefused("parts: have no effect without a reward")
        numbers = {part: checked_reward(value, f"parts.{part:.40}") for part, value in parts.items()}
        name = request.path_params["name"]
        self.agents.give(name, reward, numbers)
        return JSONResponse({"id": name, "state": "closed", "why": None})

    async def abandon(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.agents.abandon(name)
        return JSONResponse({"id": name, "state": "ended", "why": self.agents.state(name)[1]})

    def _facts(self, session: Session, url: str) -> dict[str, Any]:
        job = session.job
        facts = {
            "id": session.name,
            "api_key": job.api_key,
            "base_url": f"{url}v1",
            "model": job.model,
            "group": session.group.name or None,
            "row": {**job.row, "row": session.group.uid},
        }
        shown: dict[str, Any] = parse_json(dumps(facts).encode())  # columns are JSON values, without NaN
        return shown

    def _check_key(self, request: Request) -> None:
        """Refuse a request without the application's key, in a time that does not depend on what the key is."""
        host = request.headers.get("Host", "")
        if not name_in_host(host):
            raise ChatRefused(f"Host {host!a:.60} is malformed")
        given = (bearer(request) or request.headers.get("x-api-key", "").strip()).encode()
        if not given or not hmac.compare_digest(given, self.agents.key.encode()):
            reason = "not the key of this run: send it as a bearer token, or as x-api-key"
            raise ChatRefused(reason, code="invalid_api_key", status=401)

    async def _read(self, request: Request, fields: set[str]) -> Mapping[str, Any]:
        """The body of a request, an object with no other fields; empty if it has none."""
        try:
            async with self._reader.body(request, MOST_BYTES) as data:
                body = parse_json(data) if data.strip() else {}
        except HTTPException as error:
            raise ChatRefused(error.detail, status=error.status_code) from None
        except (TooLargeError, UnreadableError) as error:
            raise ChatRefused(f"the request can't be read: {error}") from None
        if not isinstance(body, dict):
            raise ChatRefused("the request must be an object")
        unknown = sorted(body.keys() - fields)
        if unknown:
            raise ChatRefused(f"{unknown[0]!r:.60} is unknown; the fields are {', '.join(sorted(fields))}")
        return {name: value for name, value in body.items() if value is not None}
