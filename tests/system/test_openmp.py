"""Threads sleep instead of spinning, in a run and in what it starts, unless the user says otherwise."""

import os
import subprocess
import sys

import pytest

from proxima.system.openmp import SPINS

SHOW = "import os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
COMMAND = "import proxima.cli.main as cli; cli.call_of = lambda *words: (lambda: exec({show!r})); cli.main(['list'])"

AT_TORCH = """
import os, sys
seen = []
def hook(name, words):
    if name == "import" and words[0] == "torch":
        seen.append(os.environ.get("GOMP_SPINCOUNT"))
sys.addaudithook(hook)
"""


def printed(code: str, **variables: str) -> str:
    environment = {name: text for name, text in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    words = [sys.executable, "-c", code]
    return subprocess.run(words, env=environment | variables, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("code", [COMMAND.format(show=SHOW), f"import proxima.api; {SHOW}"], ids=["command", "api"])
def test_spinning_is_limited_before_torch_loads(code):
    assert printed(code) == f"{SPINS} False"


def test_a_run_from_python_limits_it_before_it_loads_torch():
    assert printed(f"{AT_TORCH}import inspect, proxima\ninspect.signature(proxima.train)\nprint(seen[0])") == str(SPINS)


@pytest.mark.parametrize("variable, text", [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "passive")])
def test_what_the_user_has_set_stays(variable, text):
    shown = printed(f"import proxima.api; {SHOW}", **{variable: text})
    assert shown == f"{'7' if variable == 'GOMP_SPINCOUNT' else None} False"


def test_the_mathematics_alone_sets_nothing():
    assert printed("import os, proxima.core; print(os.environ.get('GOMP_SPINCOUNT'))") == "None"
