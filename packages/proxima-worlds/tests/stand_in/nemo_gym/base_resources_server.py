"""A resources server: an app with sessions, which a cookie names."""

import secrets
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class BaseResourcesServerConfig(BaseModel):
    host: str
    port: int
    entrypoint: str
    name: str
    domain: str


class SimpleResourcesServer(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    config: BaseResourcesServerConfig
    server_client: Any

    def setup_webserver(self) -> Starlette:
        routes = [
            Route("/seed_session", self._seeded, methods=["POST"]),
            Route("/verify", self._verified, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    async def _seeded(self, request: Request) -> Response:
        session = secrets.token_hex(8)
        await self.seed_session(session, await request.json())
        answer = JSONResponse({})
        answer.set_cookie("session", session)
        return answer

    async def _verified(self, request: Request) -> Response:
        body = await request.json()
        return JSONResponse({**body, **await self.verify(request.cookies["session"], body)})
