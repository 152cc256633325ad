"""Ranks that do not run the same thing are refused by one line."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxima.data import UserError
from proxima.runtime.placement import rendezvous
from proxima.runtime.placement.rendezvous import agree_on_files, compare_facts, lack_of_space, rank_facts
from proxima.training.ranks import Ranks

FIRST, OTHER = "rank 0 on a", "rank 3 on b"


SAME = {"torch": "2.13.0", "WORLD_SIZE": 4, "device": "cuda", "seed": 1}


def facts(same: dict[str, Any] | None = None, lack: str = "") -> dict[str, Any]:
    return {"same": SAME | (same or {}), "lack": lack}


DIFFERS = "rank 3 on b differs from rank 0 on a in"
DIFFERENCES = [
    (
        {"same": {"torch": "2.12.0"}},
        f"{DIFFERS} torch: 2.12.0 there, 2.13.0 here; install the same version on all nodes",
    ),
    ({"same": {"seed": 2}}, f"{DIFFERS} seed: 2 there, 1 here; start every rank with one command line, and one recipe"),
    ({"lack": "/dev/shm has 1.0 MiB free"}, "rank 3 on b: /dev/shm has 1.0 MiB free"),
]


@pytest.mark.parametrize(("changed", "line"), DIFFERENCES)
def test_the_first_difference_is_named(changed: dict[str, Any], line: str) -> None:
    compare_facts({FIRST: facts(), OTHER: facts()})
    with pytest.raises(UserError) as refused:
        compare_facts({FIRST: facts(), OTHER: facts(**changed)})
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


SHARED, DISK = "/dev/shm has 1.0 MiB free, and its node needs 64; start its container", "/ has 0.0 MiB free, and its"


@pytest.mark.parametrize(("shared", "disk", "line"), [(64, 64, ""), (1, 64, SHARED), (64, 0, DISK)])
def test_what_a_node_lacks(shared: int, disk: int, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"/dev/shm": shared, "/": disk}
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free[str(folder)] * 2**20))
    lack = lack_of_space(64 * 2**20)
    assert lack.startswith(line) and bool(lack) == bool(line)
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/dev/shm")  # both needs are of one folder
    assert bool(lack_of_space(128 * 2**20)) == (shared < 128)


class Gathered(Ranks):
    """Rank 0, with what the others send."""

    def __init__(self, *others: dict[str, str] | None) -> None:
        self.others = others

    def gather(self, value: Any) -> list[Any]:
        return [value, *self.others]


def test_files_are_compared_between_nodes() -> None:
    ours = {"task: its rows": "a" * 12, "model.path: config.json": "b" * 12}
    agree_on_files(lambda: ours, Gathered(None, ours))
    with pytest.raises(
        UserError, match=r"^rank 2 differs from rank 0 in task: its rows: c{12} there, a{12} here; copy"
    ):
        agree_on_files(lambda: ours, Gathered(None, ours | {"task: its rows": "c" * 12}))
    with pytest.raises(UserError, match=r"in model\.path: config\.json: missing there"):
        agree_on_files(
            lambda: {file: whole + "0" for file, whole in ours.items()}, Gathered({"task: its rows": "a" * 12})
        )


def test_the_facts_of_a_rank(monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]) -> None:
    from proxima.api.run_start import resolve_run

    monkeypatch.setattr(rendezvous, "lack_of_space", lambda shared: f"{shared} bytes")
    words = ["seed=7", f"model.path={tiny_model()}"]  # the recipe's own model would be downloaded

    def facts_of(sharding: str, ranks_of_node: str) -> dict[str, Any]:
        own = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": ranks_of_node, "RANK": "1", "LOCAL_RANK": "1"}
        for name, value in {**own, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        placement = f"placement={{kind: torchrun, sharding: {sharding}}}"
        return rank_facts(resolve_run("quickstart", [*words, placement]).config)

    own, other = facts_of("full", "2"), facts_of("full", "1")
    assert (own["same"]["seed"], own["same"]["WORLD_SIZE"], own["lack"]) == (7, 4, f"{2 * 2**20} bytes")
    assert "folder" not in own["same"]
    assert all(own["same"][package] for package in ("proxima", "torch", "transformers", "python"))
    for node in (own, other):
        node["lack"] = ""
    compare_facts({FIRST: own, OTHER: other})  # only hybrid sharding needs equal nodes
    line = r"in ranks on its node: 4 there, 2 here; placement\.sharding=hybrid needs"
    hybrid = {FIRST: facts_of("hybrid", "2"), OTHER: facts_of("hybrid", "4")}
    with pytest.raises(UserError, match=line):
        compare_facts(hybrid)
