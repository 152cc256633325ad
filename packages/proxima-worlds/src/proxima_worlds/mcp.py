"""Tools of a server that speaks MCP, the Model Context Protocol, over its standard input and output.

https://modelcontextprotocol.io/specification/2025-06-18: JSON-RPC 2.0, one message per line. Only the part of
the protocol that tools need is implemented: `initialize`, `tools/list` and `tools/call`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from proxima.data import FieldError, require
from proxima.data.json_reader import json_type
from proxima.environment.protocol import Environment
from proxima.process.program import Program, ProgramFailed

VERSION = "2025-06-18"
MOST_PAGES = 100  # of tools, that a server may list
MOST_TOOLS = 1000


class Mcp(Environment):
    """The tools of an MCP server, as tools of the model. Each episode has its own server, unless it is `shared`.

    The texts of a tool's answer are its result; the model sees an error that the server reports as the tool's. The
    episode fails if the server ends or answers with a protocol error.

    Args:
        command: the server's program and its arguments.
        tools: names of the server's tools that the model may call; null: all.
        shared: use one server for all episodes of a worker; only for a server that keeps no state.
    """

    _shared: "dict[tuple[str, ...], ToolServer]" = {}  # noqa: RUF012

    def __init__(self, command: Sequence[str], tools: Sequence[str] | None = None, shared: bool = False) -> None:
        ok = not isinstance(command, str) and command and all(isinstance(word, str) for word in command)
        require(bool(ok), "command", command, "must be a list of a program and its arguments")
        key = tuple(command)
        server = self._shared.get(key) if shared else None
        if server is None or not server.program.alive:
            server = ToolServer(key)
            if shared:
                self._shared[key] = server
        self.server = server
        self.names = None if tools is None else tuple(tools)

    def tools(self) -> list[dict[str, Any]]:
        """Return the schemas of the tools that the model may call."""
        by_name = {tool["name"]: tool for tool in self.server.tools()}
        for name in self.names or ():
            if name not in by_name:
                raise FieldError("tools", name, "is not a tool of the server", remedy=f"it has {', '.join(by_name)}")
        return [_schema(by_name[name]) for name in self.names or by_name]

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool."""
        answer = self.server.program.call("tools/call", name=name, arguments=dict(arguments))
        content = _object(answer, "tools/call").get("content") or []
        if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
            raise ProgramFailed("tools/call: `content` must be a list of objects")
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        if not all(isinstance(text, str) for text in texts):
            raise ProgramFailed("tools/call: a content of type text must have a `text`")
        text = "\n".join(texts)
        if answer.get("isError"):
            raise ValueError(text or f"{name} failed")
        return text


class ToolServer:
    """A running server, after the handshake.

    Raises: ProgramFailed: it can't be started, or doesn't speak the protocol.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.program = Program(command)
        client = {"name": "proxima", "version": "1"}
        answer = self.program.call("initialize", protocolVersion=VERSION, capabilities={}, clientInfo=client)
        _object(answer, "initialize")
        self.program.write({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def tools(self) -> list[dict[str, Any]]:
        """List the server's tools, across all pages."""
        listed: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        for _ in range(MOST_PAGES):
            page = _object(self.program.call("tools/list", **cursor), "tools/list")
            tools = page.get("tools")
            if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
                raise ProgramFailed("tools/list: `tools` must be a list of tools with names and schemas")
            listed += tools
            following = page.get("nextCursor")
            if not following:
                return listed
            if len(listed) > MOST_TOOLS or not isinstance(following, str) or cursor == {"cursor": following}:
                break
            cursor = {"cursor": following}
        raise ProgramFailed(f"tools/list has no end: more than {MOST_TOOLS} tools or {MOST_PAGES} pages, or one twice")


def _object(answer: Any, method: str) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise ProgramFailed(f"{method}: the result must be an object, not {json_type(answer)}")
    return answer


def _is_tool(tool: Any) -> bool:
    return (
        isinstance(tool, dict)
        and isinstance(tool.get("name"), str)
        and isinstance(tool.get("description") or "", str)
        and isinstance(tool.get("inputSchema") or {}, dict)
    )


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a tool to the schema format of chat templates."""
    parameters = {"type": "object", "properties": {}} | dict(tool.get("inputSchema") or {})
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}
