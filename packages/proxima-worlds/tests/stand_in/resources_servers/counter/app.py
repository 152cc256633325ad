"""A server that counts: each session has its own number, and rows differ in their tools."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from pydantic import PrivateAttr
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route


class CounterConfig(BaseResourcesServerConfig):
    record: str = ""  # a file for what is verified
    masks: bool = False  # as if a judge were away
    nan: bool = False


class Counter(SimpleResourcesServer):
    config: CounterConfig
    _numbers: dict[str, int] = PrivateAttr(default_factory=dict)

    def setup_webserver(self) -> Any:
        app = super().setup_webserver()
        for name, tool in {"add": self.add, "look": self.look, "misbehave": self.misbehave}.items():
            app.routes.append(Route(f"/{name}", tool, methods=["POST"]))
        return app

    async def seed_session(self, session: str, body: dict[str, Any]) -> None:
        self._numbers[session] = body.get("begin", 0)

    async def add(self, request: Request) -> Response:
        by = (await request.json()).get("by")
        if not isinstance(by, int):
            return JSONResponse({"detail": "by must be a number"}, status_code=422)
        self._numbers[request.cookies["session"]] += by
        return JSONResponse({"added": by})

    async def look(self, request: Request) -> Response:
        return JSONResponse({"number": self._numbers[request.cookies["session"]]})

    async def misbehave(self, request: Request) -> Response:
        how = (await request.json())["how"]
        if how == "waits":
            await asyncio.sleep(1000)
        if how == "keeps busy":
            time.sleep(1000)
        if how == "exits once" and not os.path.exists(self.config.record):
            Path(self.config.record).touch()
            os._exit(3)
        if how == "raises":
            raise RuntimeError("no such number")
        if how == "prints":
            print("to the model's process", flush=True)
            sys.stdout.write("more\n")
        return PlainTextResponse(how)

    async def verify(self, session: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.config.record:
            with Path(self.config.record).open("a", encoding="utf-8") as file:
                file.write(json.dumps(body) + "\n")
        number = self._numbers.pop(session)
        made = {"reward": float(number == body["expected"]), "number": number, "word": "no number", "digits": 10**400}
        if self.config.masks:
            made |= {"mask_sample": True, "failure_reason": "the judge is away"}
        if self.config.nan:
            made["reward"] = "much"
        return made | {"reward_components": {"near": float(abs(number - body["expected"]) < 2)}}
