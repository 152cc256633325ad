"""How a run begins: from the command to the loop."""

import shutil
import sys
import threading

import pytest

from proxima.cli.train import train_recipe
from proxima.config.resolution import resolve
from proxima.data import UserError
from proxima.engine.executor import Executor
from proxima.reward.runner import RewardRunner
from proxima.runtime.launch import rl_workload, run
from proxima.runtime.launch.rl_workload import RlWorkload
from proxima.runtime.loop.controller import Controller
from tests.runtime.tiny_run import NO_EVAL, recipe


def short(tiny_model, tmp_path):
    size = {"train__steps": 1, "train__prompts_per_step": 2, "train__completions_per_prompt": 2}
    return recipe(tiny_model("llama"), folder=str(tmp_path / "run"), **size, **NO_EVAL)


def proxima_calls(frame):
    """The functions of proxima on a stack, the outermost first, without those that only move a call to a thread."""
    calls = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("proxima.") and module != "proxima.model.compute_thread":
            calls.append(f"{module}.{frame.f_code.co_name}")
        frame = frame.f_back
    return calls[::-1]


@pytest.mark.slow
def test_at_most_seven_frames_lie_between_the_command_and_the_loop(tiny_model, tmp_path, monkeypatch):
    seen, inner = [], Controller.train

    async def train(self):
        waiting = proxima_calls(sys._current_frames()[threading.main_thread().ident])
        seen.append([*waiting, *proxima_calls(sys._getframe(1))])
        await inner(self)

    monkeypatch.setattr(Controller, "train", train)
    config = short(tiny_model, tmp_path)
    assert train_recipe(config, quiet=True) == 0
    calls = seen[0][seen[0].index("proxima.cli.train.train_recipe") :]
    assert len(calls) <= 7, calls


@pytest.mark.slow
def test_the_files_are_hashed_once_though_the_ranks_compare_them_too(tiny_model, tmp_path, monkeypatch):
    made, inner = [], RlWorkload.hashes

    def hashes(self):
        made.append(inner(self))
        return made[-1]

    monkeypatch.setattr(RlWorkload, "hashes", hashes)
    monkeypatch.setattr(run, "_compare_files", lambda hashes, ranks: hashes())  # as with several ranks
    config = short(tiny_model, tmp_path)
    assert train_recipe(config, quiet=True) == 0
    assert len(made) == 1
    assert train_recipe(config, quiet=True, resume=True) == 0
    assert len(made) == 2


def test_what_was_begun_before_the_loop_could_not_be_made_is_ended(tiny_model, tmp_path, monkeypatch):
    begun, ended = [], []

    def noting(owner, name, calls):
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *parts: (calls.append(self), inner(self, *parts))[1])

    def fail(*parts):
        raise RuntimeError("no collector")

    noting(RewardRunner, "start", begun)
    noting(Executor, "close", ended), noting(RewardRunner, "close", ended)
    monkeypatch.setattr(rl_workload, "make_collector", fail)
    config = short(tiny_model, tmp_path)
    with pytest.raises(RuntimeError, match="no collector"):
        run.train(resolve(config).config)
    assert [type(each).__name__ for each in ended][-2:] == ["RewardRunner", "Executor"]
    assert all(any(each is other for other in ended) for each in begun) and begun


@pytest.mark.parametrize("made", [False, True])
def test_a_refused_run_leaves_nothing(tiny_model, tmp_path, made):
    """Nothing but the folder that was there."""
    shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"damaged")
    folder = tmp_path / "runs" / "mine"
    if made:
        folder.mkdir(parents=True)
    with pytest.raises(UserError, match="has model.safetensors, which is no whole"):
        train_recipe(recipe(tmp_path / "model", folder=str(folder)), quiet=True)
    assert list(tmp_path.rglob("runs/**/*")) == ([folder] if made else [])
    assert (tmp_path / "runs").exists() == made
