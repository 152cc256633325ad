"""Where the package is not installed, each of its kinds is one line that says what to install."""

import importlib.metadata
import re

import pytest

from proxima.data.kinds import install_command
from proxima.environment import ENVIRONMENTS
from proxima.environment.agent_kinds import AGENT_SANDBOXES
from proxima.process import sandbox
from proxima.task import TASKS
from tests.cli.conftest import here as here
from tests.cli.conftest import proxima as proxima

MORE = f"{install_command('proxima-worlds')} for more"
AGENT = "kind: agent, command: [a]"


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **asked: ())
    sandbox.brought_kinds.cache_clear()
    for table in (ENVIRONMENTS, AGENT_SANDBOXES, TASKS):
        vars(table).pop("brought", None)
    yield
    sandbox.brought_kinds.cache_clear()
    for table in (ENVIRONMENTS, AGENT_SANDBOXES, TASKS):
        vars(table).pop("brought", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("task.environment={kind: verifiers, name: x}", f"names 'verifiers', which is unknown; known: .*; {MORE}"),
        ("task={kind: harbor, path: x}", f"no task 'harbor'; known: .*; {MORE}"),
        (
            f"task.environment={{{AGENT}, container: x}}",
            f"environment.container=x .*has no field 'container'.*; {MORE}",
        ),
        (f"task.environment={{{AGENT}, sandbox: bubblewrap}}", f"no sandbox 'bubblewrap'; .*; {MORE}"),
        ("reward=[{kind: unit_tests, sandbox: container}]", "the package proxima-worlds has more"),
        ("task={kind: environment, environment: verifiers}", f"is unknown; known: .*; {MORE}"),
    ],
)
def test_what_is_missing(words, line, not_installed, proxima, here):
    code, _, errors = proxima("explain", "quickstart", words)
    assert code == 2 and errors.count("\n") == 1
    assert re.search(line, errors), errors
