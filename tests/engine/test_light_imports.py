"""The engine in this process, and the protocol, need neither HTTP nor what starts servers."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import proxima

SOURCE = Path(proxima.__file__).parent


def imported(module: str) -> Iterator[str]:
    """What importing a module imports at once, without its packages."""
    path = SOURCE.parent / (module.replace(".", "/") + ".py")
    pending: list[ast.AST] = list(ast.parse(path.read_text()).body) if path.exists() else []
    for node in pending:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
        elif isinstance(node, ast.Try):
            pending += node.body


@pytest.mark.parametrize("module", ["protocol", "local", "local_process", "served_engine", "executor"])
def test_no_client_of_servers_is_imported(module: str) -> None:
    reached = {f"proxima.engine.{module}"}
    pending = list(reached)
    while pending:
        new = {name for name in imported(pending.pop()) if name not in reached}
        reached |= new
        pending += [name for name in new if name.startswith("proxima.engine.")]
    assert "proxima.data" in reached
    assert not {name for name in reached if name.split(".")[0] == "httpx"}
    assert not {name for name in reached if name.startswith(("proxima.engine.http", "proxima.engine.serve."))}
