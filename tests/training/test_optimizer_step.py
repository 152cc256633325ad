"""Every kind of optimizer on ranks and over checkpoints: the state is the same whoever holds it."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from proxima.model.load import save
from proxima.training import optimizer, optimizer_8bit
from proxima.training.optimizer import AdamW, WeightwiseOptimizer
from proxima.training.optimizer_8bit import AdamW8bit
from proxima.training.optimizer_muon import Muon
from tests.campaigns import campaign
from tests.model.parallel.ranks import run_ranks
from tests.model.parallel.saves import moves
from tests.tiny import VOCABULARY, tiny_tokenizer
from tests.training.optimizer_ranks import slices, specs, stepped


@pytest.mark.slow
def test_slices_step_as_on_one_process(tmp_path):
    run_ranks(slices, 4, tmp_path)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Rows that have blocks of 8-bit moments."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 1, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    save(Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **sizes, **heads)), tiny_tokenizer(), folder / "qwen2")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "muon",
        "adamw_8bit",
        *campaign("tests/training/test_optimizer_step.py::test_a_checkpoint_goes_to_any_number_of_ranks", ["offload"]),
    ],
)
def test_a_checkpoint_goes_to_any_number_of_ranks(kind, wide, tmp_path):
    if kind not in specs():
        pytest.skip("torchao is not installed")
    run_ranks(moves, 2, wide, tmp_path, "qwen2", ("policy",), ({}, None, {}), kind)
    of_four = ({"kind": "hybrid"}, {})[: 1 + (kind == "muon")]
    run_ranks(moves, 4, wide, tmp_path, "qwen2", ("policy",), of_four, kind)


class Several:
    """Optimizers of some of the weights each, as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def state(self) -> dict[torch.Tensor, Any]:
        return {weight: slots for part in self.parts for weight, slots in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()


def of_torch(named) -> Several:
    """Muon has the matrices of layers."""
    muon = {"lr": 3e-3, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
    adamw = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
    return Several(
        torch.optim.Muon([named["layers.0.a"], named["layers.0.b"]], **muon),
        torch.optim.AdamW([named["embed"], named["layers.0.experts"]], weight_decay=0.1, **adamw),
        torch.optim.AdamW([named["n"]], weight_decay=0.0, **adamw),
    )


def decaying(named) -> Several:
    """Only matrices decay."""
    groups = ([p for p in named.values() if (p.dim() > 1) == decays] for decays in (True, False))
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "fused": True}
    return Several(
        *(
            torch.optim.AdamW(group, weight_decay=decay, **settings)
            for group, decay in zip(groups, (0.1, 0.0), strict=True)
        )
    )


def of_torchao(named) -> Any:
    """Its blocks lie in rows where these have multiples of 256 elements."""
    adam = pytest.importorskip("torchao.optim")
    groups = [{"params": [p for p in named.values() if (p.dim() > 1) == decays]} for decays in (True, False)]
    return adam.AdamW8bit([groups[0] | {"weight_decay": 0.1}, groups[1] | {"weight_decay": 0.0}], lr=1e-3)


ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "beta2": 0.95, "eps": 1e-6}
PEERS = {
    "muon": (Muon(lr=3e-3, beta2=0.95, weight_decay=0.1, momentum=0.9, adamw_lr=1e-3), of_torch),
    "adamw_8bit": (AdamW8bit(lr=1e-3, weight_decay=0.1), of_torchao),
    "adamw": (AdamW(**ADAMW), decaying),
    "offload": (AdamW(**ADAMW, offload=True), decaying),
}


@pytest.mark.parametrize("kind", PEERS)
def test_weights_and_state_are_those_of_a_peer_to_the_bit(kind, monkeypatch):
    monkeypatch.setattr(optimizer_8bit, "AT_ONCE", 5 * 512)  # five rows at a time
    spec, peer = PEERS[kind]
    with torch.compiler.set_stance("force_eager"):
        theirs, plain = stepped(peer, steps=4)
    ours, made = stepped(spec, steps=4)
    assert isinstance(made, WeightwiseOptimizer) == (kind != "adamw")
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
        slots, wanted = made.state[weight], plain.state[theirs[name]]
        assert {slot.removesuffix("_scale") for slot in slots} == wanted.keys(), name
        for slot, value in wanted.items():
            value = getattr(value, "codes", torch.as_tensor(value))
            assert slots[slot].dtype == value.dtype and torch.equal(slots[slot], value), (name, slot)


class Streams:
    """A device whose streams write down what they wait for, in the order in which the host gives it to them; what they
    do is done at once."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.own = self.Stream(None, "own")
        self.made = iter(("up", "down"))
        self.now = self.own

    def Stream(self, device, name: str = "") -> SimpleNamespace:
        name = name or next(self.made)
        note = partial(self._note, name)
        events = iter(range(10_000))
        return SimpleNamespace(
            name=name,
            wait_stream=lambda other: note("waits for all of", other.name),
            wait_event=lambda event: note("waits for", event),
            record_event=lambda: f"{name} {next(events)}",
            synchronize=lambda: note("is waited for"),
        )

    def _note(self, *words: str) -> None:
        self.log.append(words)

    def current_stream(self, device) -> SimpleNamespace:
        return self.own

    @contextmanager
    def stream(self, stream: SimpleNamespace):
        self.now = stream
        yield
        self.now = self.own


def test_offloaded_moments_come_and_go_beside_the_steps(monkeypatch):
    """In pieces; a buffer is filled again when its moments are back, the host waits once, and no bit changes."""
    streams = Streams()
    monkeypatch.setattr(optimizer, "ALONE", ())
    monkeypatch.setattr(optimizer, "PIECE", 128)
    monkeypatch.setattr(optimizer, "pinned", lambda state, device: state)
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    ours, made = stepped(AdamW(**ADAMW, offload=True), steps=1)
    pieces = sum(-(-weight.numel() // 128) for weight in ours.values())
    assert pieces > 200
    expected = [("up", "waits for all of", "own")]
    for number in range(pieces):
        if number >= optimizer.BUFFERS:
            expected.append(("up", "waits for", f"down {number - optimizer.BUFFERS}"))
        expected += [("own", "waits for", f"up {number}"), ("down", "waits for", f"own {number}")]
    assert streams.log == [*expected, ("own", "waits for all of", "down"), ("down", "is waited for")]

    streams.made = iter(("up", "down") * 4)
    ours, made = stepped(AdamW(**ADAMW, offload=True), steps=4)
    theirs, plain = stepped(decaying, steps=4)
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
        for slot, value in plain.state[theirs[name]].items():
            assert torch.equal(made.state[weight][slot], torch.as_tensor(value)), (name, slot)
