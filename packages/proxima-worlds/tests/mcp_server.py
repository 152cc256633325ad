"""An MCP server over stdio of the standard library alone: tools `add`, `count` (with a state), `fail`, `leave`."""

import json
import sys

state = {"count": 0}
TEXT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
PAGES = {
    None: (
        [{"name": "add", "description": "Add.", "inputSchema": TEXT}, {"name": "count", "description": "Count."}], "x"
    ),
    "x": ([{"name": "fail", "description": "Fail."}, {"name": "leave", "description": "End."}], None),
}  # fmt: skip


def tool(name, arguments):
    if name == "add":
        return {"content": [{"type": "text", "text": str(arguments["a"] + arguments["b"])}]}
    if name == "count":
        state["count"] += 1
        image = {"type": "image", "data": "", "mimeType": "image/png"}
        return {"content": [image, {"type": "text", "text": str(state["count"])}], "isError": False}
    if name == "leave":
        print("goodbye", file=sys.stderr)
        sys.exit(3)
    return {"content": [{"type": "text", "text": "no way"}], "isError": True}


def say(message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked or "method" not in asked:
            continue
        say({"method": "notifications/message", "params": {"level": "info", "data": "chatter"}})
        say({"id": "own", "method": "ping"})
        parameters = asked.get("params", {})
        if asked["method"] == "initialize":
            result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "s"}}
        elif asked["method"] == "tools/list":
            tools, cursor = PAGES[parameters.get("cursor")]
            result = {"tools": tools} | ({"nextCursor": cursor} if cursor else {})
        else:
            result = tool(parameters["name"], parameters["arguments"])
        say({"id": asked["id"], "result": result})
