"""Ranks that do not run the same thing are refused by one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxima.data import UserError
from proxima.runtime.placement.agreement import compare_facts, compare_files, rank_facts

FIRST, OTHER = "rank 0 on a", "rank 3 on b"


VERSIONS = {"proxima": "1", "torch": "2.13.0", "transformers": "5", "python": "3.11.7"}
NODE = {"ranks": 4, "ranks_of_node": 2, "first_of_node": True, "device": "cuda", "shared_memory": 2**30, "disk": 2**30}


def facts(sharding: str = "full", seed: int = 1, **changed: Any) -> dict[str, Any]:
    config = {"seed": seed, "placement.sharding.kind": sharding}
    return NODE | {"versions": VERSIONS, "config": config} | changed


DIFFERS = "rank 3 on b differs from rank 0 on a in"
DIFFERENCES = [
    (
        {"versions": VERSIONS | {"torch": "2.12.0"}},
        f"{DIFFERS} torch: 2.12.0 there, 2.13.0 here; install the same version on all nodes",
    ),
    ({"seed": 2}, f"{DIFFERS} seed: 2 there, 1 here; start every rank with one command line, and one recipe"),
    ({"ranks": 3}, f"{DIFFERS} WORLD_SIZE: 3 there, 4 here; start all ranks with one"),
    ({"device": "cpu"}, f"{DIFFERS} device: cpu there, cuda here; give every rank a"),
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


def test_hybrid_sharding_needs_equal_nodes() -> None:
    compare_facts({FIRST: facts(), OTHER: facts(ranks_of_node=1)})  # full sharding does not
    with pytest.raises(UserError, match=r"in ranks on its node: 1 there, 2 here; placement\.sharding=hybrid needs"):
        compare_facts({FIRST: facts("hybrid"), OTHER: facts("hybrid", ranks_of_node=1)})


def test_files_are_compared_between_nodes() -> None:
    ours = {"task: its rows": "a" * 64, "model.path: config.json": "b" * 64}
    compare_files({FIRST: ours, "rank 1 on a": None, OTHER: ours})
    with pytest.raises(UserError, match=r"^rank 3 on b differs from rank 0 on a in task: its rows: c{12} there, a{12}"):
        compare_files({FIRST: ours, OTHER: ours | {"task: its rows": "c" * 64}})
    with pytest.raises(UserError, match=r"in model\.path: config\.json: no such file there"):
        compare_files({FIRST: ours, OTHER: {"task: its rows": "a" * 64}})


def test_the_facts_of_a_rank(monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]) -> None:
    from proxima.api.run_config import resolve_run
    from proxima.config.schema import RunConfig

    words = ["seed=7", "placement=torchrun", f"model.path={tiny_model()}"]  # the recipe's own model would be downloaded
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    own = rank_facts(resolve_run("quickstart", words, root=RunConfig).config, "cpu")
    assert (own["ranks"], own["ranks_of_node"], own["first_of_node"]) == (4, 2, False)
    assert own["config"]["seed"] == 7
    assert "folder" not in own["config"]
    assert all(own["versions"].values())
    compare_facts({FIRST: own, OTHER: own})
