"""The code and the table of docs/environments.md."""

import inspect
import re
from contextlib import closing

import pytest

from proxima.environment import ENVIRONMENTS
from proxima.environment.hosts import Hosts
from proxima.environment.interface import EnvironmentSpec
from tests.docs.printed import section
from tests.environment.worlds import called


@pytest.mark.slow
def test_the_ten_lines_run(tmp_path, monkeypatch):
    (code,) = re.findall(
        r"```python\n(.*?)```", section("docs/environments.md", "Write an environment in ten lines"), re.DOTALL
    )
    (tmp_path / "vault.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    row = {"messages": [{"role": "user", "content": "Open the vault."}], "code": 42}
    with closing(Hosts(EnvironmentSpec(kind="vault:Vault"), workers=1)) as hosts:
        opening, answers, reward = called(hosts, row, *(("turn", {"number": n}) for n in (7, 50, 42)))
    assert opening[0]["content"] == "Open the vault. It has 2 digits." and reward == 1.0
    assert [answer.messages[0]["content"] for answer in answers] == ["higher", "lower", "open"]


def test_the_table_has_every_environment_and_argument():
    table = section("docs/environments.md", "What comes with proxima")
    for name, cls in ENVIRONMENTS.items():
        (line,) = re.findall(rf"^\| `{name}` \|.*$", table, re.MULTILINE)
        for parameter in list(inspect.signature(cls).parameters.values()):
            default = parameter.default
            number = isinstance(default, int | float)
            shown = "" if default in (None, parameter.empty, "", (), False) else f" `{default:{'g' * number}}`"
            assert f"`{parameter.name}`{shown}" in line.rpartition("|")[0].rpartition("|")[2], (name, parameter)
