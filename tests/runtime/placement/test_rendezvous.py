"""How a process learns that it is a rank, and what it says where the ranks do not meet."""

import os
import socket
from types import SimpleNamespace

import pytest

from proxima.cli.main import main
from proxima.data import FieldError, UserError
from proxima.runtime.placement import rendezvous
from proxima.runtime.placement.launcher import adopt_launcher, is_first, is_rank, slurm_variables
from tests.ports import kept_port

PLACE = {"SLURM_JOB_ID": "40123", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
STEP = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
SRUN = PLACE | STEP | {"MASTER_ADDR": "node1"}


def test_a_task_of_srun_is_a_rank() -> None:
    place = {"RANK": "5", "WORLD_SIZE": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2"}
    assert slurm_variables(SRUN) == place | {"MASTER_PORT": "20123"}
    assert slurm_variables(SRUN | {"MASTER_PORT": "29500"})["MASTER_PORT"] == "29500"
    assert slurm_variables(SRUN | {"SLURM_NODEID": "3"})["LOCAL_WORLD_SIZE"] == "1"


@pytest.mark.parametrize("changed", [{"MASTER_ADDR": ""}, {"SLURM_STEP_NUM_TASKS": ""}, {"RANK": "0"}])
def test_runs_without_it_batch_scripts_and_torchrun_below_srun_are_none(changed: dict[str, str]) -> None:
    assert slurm_variables({name: value for name, value in (SRUN | changed).items() if value}) == {}


def test_only_adopting_writes_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict(SRUN)
    monkeypatch.setattr(os, "environ", environment)
    assert is_first() and not is_rank() and environment == SRUN
    adopt_launcher()
    assert is_rank() and not is_first() and environment == SRUN | slurm_variables(SRUN)


def test_a_command_line_adopts_them_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ) | SRUN)
    assert main(["list", "recipes"]) == 0
    assert is_rank() and os.environ["RANK"] == "5"


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, port: int, size: int = 2) -> None:
    rest = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in rest.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        as_rank(monkeypatch, 0, port)
        with pytest.raises(FieldError) as refused:
            rendezvous._store(2)
    line = f"MASTER_PORT='{port}' is in use on this machine; set another port for the ranks to meet at"
    assert str(refused.value) == line


@pytest.mark.slow
def test_rank_0_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    port = kept_port()
    as_rank(monkeypatch, 1, port)
    line = rf"^rank 0 \(127\.0\.0\.1:{port}\) could not be reached within 0\.01 s; see its"
    with pytest.raises(UserError, match=line):
        rendezvous._store(0.01)


@pytest.mark.slow
def test_ranks_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    watches, make = [], rendezvous.RankWatch
    as_rank(monkeypatch, 0, 0, size=3)
    monkeypatch.setattr(rendezvous, "_store", lambda seconds: SimpleNamespace(set=lambda key, value: None))
    monkeypatch.setattr(rendezvous, "RankWatch", lambda *watched: watches.append(make(*watched)) or watches[0])
    monkeypatch.setattr(rendezvous, "rank_facts", lambda config: {})
    placement = SimpleNamespace(tensor_parallel=1, context_parallel=1, timeout=0.01)  # a recipe says a second at least
    config = SimpleNamespace(placement=placement)
    line = r"^ranks 1-2 of 3 did not call port \d+ of .* within 0.01 s; its node has left or can't reach this one: "
    with pytest.raises(UserError, match=line), rendezvous.met_ranks(config):
        pass
    watches[0].close()
