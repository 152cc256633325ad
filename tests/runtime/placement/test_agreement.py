"""Ranks that do not run the same thing are refused by one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxima.data import UserError
from proxima.runtime.placement.agreement import compare_facts, compare_files, rank_facts

FIRST, OTHER = "rank 0 on a", "rank 3 on b"


SAME = {"torch": "2.13.0", "WORLD_SIZE": 4, "device": "cuda", "seed": 1}
NODE = {"least_shared": 64 * 2**20, "shared_memory": 2**30, "disk": 2**30}


def facts(same: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
    return NODE | {"same": SAME | (same or {})} | changed


DIFFERS = "rank 3 on b differs from rank 0 on a in"
DIFFERENCES = [
    (
        {"same": {"torch": "2.12.0"}},
        f"{DIFFERS} torch: 2.12.0 there, 2.13.0 here; install the same version on all nodes",
    ),
    ({"same": {"seed": 2}}, f"{DIFFERS} seed: 2 there, 1 here; start every rank with one command line, and one recipe"),
    ({"same": {"WORLD_SIZE": 3}}, f"{DIFFERS} WORLD_SIZE: 3 there, 4 here; start all ranks with one"),
    ({"same": {"device": "cpu"}}, f"{DIFFERS} device: cpu there, cuda here; give every rank a"),
    (
        {"shared_memory": 2**20},
        "rank 3 on b: /dev/shm has 1.0 MiB free, and its node needs 64; start its container with a larger one",
    ),
    ({"disk": 0}, "rank 3 on b: /"),
]


@pytest.mark.parametrize(("changed", "line"), DIFFERENCES)
def test_the_first_difference_is_named(changed: dict[str, Any], line: str) -> None:
    compare_facts({FIRST: facts(), OTHER: facts()})
    with pytest.raises(UserError) as refused:
        compare_facts({FIRST: facts(), OTHER: facts(**changed)})
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_files_are_compared_between_nodes() -> None:
    ours = {"task: its rows": "a" * 64, "model.path: config.json": "b" * 64}
    compare_files({FIRST: ours, "rank 1 on a": None, OTHER: ours})
    with pytest.raises(UserError, match=r"^rank 3 on b differs from rank 0 on a in task: its rows: c{12} there, a{12}"):
        compare_files({FIRST: ours, OTHER: ours | {"task: its rows": "c" * 64}})
    with pytest.raises(UserError, match=r"in model\.path: config\.json: no such file there"):
        compare_files({FIRST: ours, OTHER: {"task: its rows": "a" * 64}})


def test_the_facts_of_a_rank(monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]) -> None:
    from proxima.api.run_config import resolve_run

    words = ["seed=7", f"model.path={tiny_model()}"]  # the recipe's own model would be downloaded

    def facts_of(sharding: str, ranks_of_node: str) -> dict[str, Any]:
        for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": ranks_of_node, "LOCAL_RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        placement = f"placement={{kind: torchrun, sharding: {sharding}}}"
        return rank_facts(resolve_run("quickstart", [*words, placement]).config)

    own, other = facts_of("full", "2"), facts_of("full", "1")
    assert (own["same"]["seed"], own["same"]["WORLD_SIZE"], own["least_shared"]) == (7, 4, 2 * 2**20)
    assert "folder" not in own["same"]
    assert all(own["same"][package] for package in ("proxima", "torch", "transformers", "python"))
    compare_facts({FIRST: own, OTHER: other})  # only hybrid sharding needs equal nodes
    line = r"in ranks on its node: 4 there, 2 here; placement\.sharding=hybrid needs"
    hybrid = {FIRST: facts_of("hybrid", "2"), OTHER: facts_of("hybrid", "4")}
    with pytest.raises(UserError, match=line):
        compare_facts(hybrid)
