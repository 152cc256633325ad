"""The code and the table of docs/environments.md."""

import asyncio
import inspect
import re
from contextlib import closing
from pathlib import Path

from proxima.data import ToolCall
from proxima.environment import ENVIRONMENTS
from proxima.environment.hosts import Hosts
from proxima.environment.interface import EnvironmentSpec

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


def test_the_ten_lines_run(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "vault.py").write_text(code)
    monkeypatch.chdir(tmp_path)

    async def run(hosts):
        row = {"messages": [{"role": "user", "content": "Open the vault."}], "code": 42}
        instance = await hosts.open(row, seed=0)
        answers = await instance.call([ToolCall(name="turn", arguments={"number": n}) for n in (7, 50, 42)])
        return instance.opening[0]["content"], [a.messages[0]["content"] for a in answers], await instance.end()

    with closing(Hosts(EnvironmentSpec(kind="vault:Vault"), workers=1)) as hosts:
        assert asyncio.run(run(hosts)) == ("Open the vault. It has 2 digits.", ["higher", "lower", "open"], 1.0)


def test_the_table_has_every_environment_and_argument():
    table = PAGE.partition("## What comes with proxima")[2].partition("##")[0]
    for name, cls in ENVIRONMENTS.items():
        (line,) = re.findall(rf"^\| `{name}` \|.*$", table, re.MULTILINE)
        for parameter in list(inspect.signature(cls).parameters.values()):
            default = parameter.default
            shown = "" if default in (None, parameter.empty, "", (), False) else f" `{default:g}`"
            assert f"`{parameter.name}`{shown}" in line.rpartition("|")[0].rpartition("|")[2], (name, parameter)
