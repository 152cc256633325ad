"""The probe, and the hand-over around it, against a server that is a model of this process."""

import copy
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from proxima.data import NotFiniteError, UserError
from proxima.engine.http.dialect import ServerFacts, ServerHealth, WeightsInFolder, WrittenTokens
from proxima.engine.http.vllm import Vllm
from proxima.engine.http.weights import probe as weight_probe
from proxima.engine.http.weights.probe import (
    CONTEXT,
    Bound,
    bound_of,
    check_distance,
    copy_bound,
    perturbed,
    probe_tokens,
    trainer_log_prob,
)
from proxima.engine.http.weights.sync import WeightSync
from proxima.engine.http.weights.transport import PushRound
from proxima.engine.protocol import EngineSetup, ServerError, WeightUpdate
from proxima.model.adapters.lora import Lora, attach
from proxima.model.load import load
from proxima.model.pretrained import LoadedModel
from tests.model.adapters import with_adapter

DTYPES = ("float32", "bfloat16")
FACTS = ServerFacts(server="fake 1", model="fake", dtype="float32", takes_weights=True)


class ModelServer:
    """A server that computes, with a model of its own; the tensors in `ignores` it never loads."""

    def __init__(self, loaded: LoadedModel, ignores: Collection[str] = (), facts: ServerFacts = FACTS) -> None:
        self.model, self.ignores, self.label = copy.deepcopy(loaded.model), ignores, "default"
        self.client, self.dialect, self.facts, self.url = None, self, facts, "http://127.0.0.1:1"
        self.unnamed = set[str]()  # parameters that are in no file
        self.calls = list[str]()

    async def load_folder(self, client: None, facts: ServerFacts, weights: WeightsInFolder) -> None:
        self.calls.append(f"load {weights.label}")
        values = {name: v for f in weights.folder.glob("*.safetensors") for name, v in load_file(f).items()}
        assert {name for name, _ in self.model.named_parameters()} - self.unnamed == set(values)
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if name not in {*self.ignores, *self.unnamed}:
                    weight.copy_(values[name])
        self.label = weights.label

    async def health(self, client: None, facts: ServerFacts) -> ServerHealth:
        return ServerHealth(weight_version=self.label)

    async def pause(self, client: None, facts: ServerFacts, mode: str) -> None:
        self.calls.append(f"pause {mode}")

    async def take_cache(self) -> None:
        """It has never slept."""

    async def resume(self, client: None, facts: ServerFacts) -> None:
        self.calls.append("resume")

    async def reset_prefix_cache(self, client: None, facts: ServerFacts, *, running: bool) -> None:
        self.calls.append(f"forget {running}")

    async def score(self, client: None, facts: ServerFacts, given: WrittenTokens, first: int) -> np.ndarray:
        self.calls.append("score")
        assert first == CONTEXT
        return trainer_log_prob(self.model, given.read)


def server_in(dtype: str, loaded: LoadedModel, ignores: Collection[str] = ()) -> ModelServer:
    """One that computes in a dtype."""
    server = ModelServer(loaded, ignores, replace(FACTS, dtype=dtype))
    server.model.to(getattr(torch, dtype))
    return server


@pytest.fixture(params=["llama", "qwen2"])  # tied, untied
def loaded(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> LoadedModel:
    return load(str(tiny_model(request.param)), dtype=torch.float32, device="cpu")


@asynccontextmanager
async def syncing(loaded: LoadedModel, tokens: int = 64, **settings: Any) -> AsyncIterator[WeightSync]:
    sync = WeightSync(Vllm(probe_tokens=tokens, **settings), EngineSetup.of(loaded, max_length=tokens + 64))
    try:
        yield sync
    finally:
        await sync.close()


async def push(
    sync: WeightSync, server: Any, module: torch.nn.Module, version: int = 0, push_round: PushRound | None = None
) -> Any:
    sync.newest = await sync.prepare(WeightUpdate(version=version, module=module), f"v{version}", server.facts.dtype)
    return await sync.push(server, push_round)


def names_of(loaded: LoadedModel) -> list[str]:
    return [name for name, _ in loaded.model.named_parameters()]


def grow(loaded: LoadedModel, factor: float) -> None:
    with torch.no_grad():
        for weight in loaded.model.parameters():
            weight.mul_(factor)


@pytest.mark.slow
async def test_a_server_with_all_weights_is_proven(loaded: LoadedModel) -> None:
    server = ModelServer(loaded)
    async with syncing(loaded) as sync:
        report = await push(sync, server, loaded.model)
        assert report["probe_max"] < 1e-5 and report["perturbed_max"] < 1e-4
        cycle = ["load v0-perturbed", "forget True", "resume", "score", "pause keep"]
        assert server.calls == [*cycle, "load v0", "forget True", "resume", "score"]
        server.calls.clear()
        await push(sync, server, loaded.model, 1)
        assert server.calls == ["load v1", "forget True", "resume", "score"]  # no perturbed copy, and no pause


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
async def test_any_tensor_that_stays_behind_is_found_at_the_first_sync(dtype: str, loaded: LoadedModel) -> None:
    """One line says who, how far and what to do."""
    line = r"^.*127.0.0.1:1.*perturbed copy.*nats from the trainer's on average.*over 256 known tokens.*worker-ext.*$"
    async with syncing(loaded, 256) as sync:
        await push(sync, server_in(dtype, loaded), loaded.model)
        for name in names_of(loaded):
            if name.endswith("k_proj.bias"):
                continue  # a softmax does not see a constant added to the keys' scores
            sync._proven.clear()
            with pytest.raises(UserError, match=line):
                await sync.push(server_in(dtype, loaded, [name]))


@pytest.mark.parametrize("dtype", DTYPES)
async def test_a_stale_head_is_found_at_the_first_sync(dtype: str, llama: LoadedModel) -> None:
    """One that is tied and was packed at the start, as vLLM's on a CPU: its embedding is loaded."""
    server = server_in(dtype, llama)
    server.model.lm_head.weight = torch.nn.Parameter(server.model.lm_head.weight.detach().clone())
    server.unnamed = {"lm_head.weight"}
    async with syncing(llama, 256) as sync:
        with pytest.raises(UserError, match="the perturbed copy"):
            await push(sync, server, llama.model)


@pytest.mark.parametrize(("dtype", "steps"), zip(DTYPES, (1, 6), strict=True))
async def test_a_server_that_stays_at_an_old_version_is_found(dtype: str, steps: int, llama: LoadedModel) -> None:
    """Once the weights have moved its log-probs further than the bound of its dtype; a sound server is never accused.
    It calls them by the label of the newest."""
    sound, stays = server_in(dtype, llama), server_in(dtype, llama)
    stays.url = "http://127.0.0.1:2"
    draws = torch.Generator().manual_seed(0)
    ways = [torch.randn(weight.shape, generator=draws).sign() for weight in llama.model.parameters()]
    async with syncing(llama, 256) as sync:
        await push(sync, sound, llama.model)
        await sync.push(stays)  # type: ignore[arg-type]
        stays.ignores = names_of(llama)
        for version in range(1, steps + 1):
            with torch.no_grad():
                for weight, way in zip(llama.model.parameters(), ways, strict=True):
                    weight.add_(way * 1e-3)
            await push(sync, sound, llama.model, version)
            if version < steps:
                await sync.push(stays)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=rf"127.0.0.1:2 does not compute with the weights of version {steps}"):
            await sync.push(stays)  # type: ignore[arg-type]
        assert stays.label == f"v{steps}"


@pytest.mark.parametrize("stale", ["head", "embedding"])
def test_rows_of_tokens_that_stay_behind_stand_out_from_bfloat16(stale: str, llama: LoadedModel) -> None:
    """A tied head that is packed once, as vLLM's on a CPU, keeps the rows of the start."""
    module: Any = llama.model
    tokens = probe_tokens(llama.tokenizer, 64, None)
    with torch.no_grad():
        module.model.embed_tokens.weight.mul_(8.0)  # a trained head is sharper than one of random weights
    before = module.model.embed_tokens.weight.detach().bfloat16()
    with perturbed(module, tokens):
        expected = trainer_log_prob(module, tokens)
        server = copy.deepcopy(module).bfloat16()
        sound = np.abs(trainer_log_prob(server, tokens) - expected)
        rows = server.model.embed_tokens.weight.detach().clone()
        server.lm_head.weight = torch.nn.Parameter(before if stale == "head" else rows)
        server.model.embed_tokens.weight = torch.nn.Parameter(rows if stale == "head" else before)
        behind = np.abs(trainer_log_prob(server, tokens) - expected)
    assert behind.mean() > 4 * sound.mean()


@pytest.mark.parametrize("fails", ["probe", "score", "load", "loads"])
async def test_no_perturbed_copy_stays_at_a_server_when_something_fails(fails: str, llama: LoadedModel) -> None:
    class Fails(ModelServer):
        async def score(self, *given: Any) -> np.ndarray:
            scores = await super().score(*given)
            if fails == "score":
                raise ServerError(self.url, "/score", "status 500")
            return scores + 1.0 if fails == "probe" else scores

        async def load_folder(self, client: None, facts: ServerFacts, weights: WeightsInFolder) -> None:
            before = sum(call.startswith("load ") for call in self.calls)
            if before and (fails == "loads" or (fails == "load" and before == 1)):
                self.calls.append("load fails")
                raise ServerError(self.url, "/load", "status 500")
            await super().load_folder(client, facts, weights)

    server = Fails(llama)
    async with syncing(llama) as sync:
        with pytest.raises((UserError, ServerError), match="perturbed copy" if fails == "probe" else "status 500"):
            await push(sync, server, llama.model)
        assert server.url not in sync._proven
    if fails == "loads":
        assert server.calls[-1] == "pause keep"  # it can't be mended, and samples nothing
    else:
        assert server.label == "v0" and server.calls[-1] == "resume"
        for served, weight in zip(server.model.parameters(), llama.model.parameters(), strict=True):
            assert torch.equal(served, weight)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_in_training_is_left_as_it_was(
    dtype: torch.dtype, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter, dropout, frozen weights, parts in evaluation mode, gradients, and the global draws."""
    model = load(str(tiny_model("llama")), dtype=dtype, device="cpu").model
    attach(model, Lora(rank=2), seed=0)
    model.config.attention_dropout = 0.5
    model.train()
    model.get_input_embeddings().eval()
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.ones_like(weight)

    def state() -> tuple[Any, ...]:
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        kinds = [(weight.requires_grad, weight.grad is None) for weight in model.parameters()]
        return weights, kinds, [part.training for part in model.modules()], torch.get_rng_state()

    tokens = np.arange(40, dtype=np.int32)
    before = state()
    first = trainer_log_prob(model, tokens)
    assert np.array_equal(trainer_log_prob(model, tokens), first)
    with suppress(KeyError), perturbed(model, tokens):
        raise KeyError
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no memory"):
        patched.setattr(weight_probe, "_log_prob", _no_memory)
        with perturbed(model, tokens):
            pass
    after = state()
    assert all(torch.equal(after[0][name], weight) for name, weight in before[0].items())
    assert after[1:3] == before[1:3] and torch.equal(after[3], before[3])


def _no_memory(*_: Any) -> None:
    raise RuntimeError("no memory")


def test_the_trainers_log_probs_are_those_of_its_forward(loaded: LoadedModel) -> None:
    tokens = probe_tokens(loaded.tokenizer, 40, 128)
    ids = torch.as_tensor(tokens, dtype=torch.long)[None]
    with torch.no_grad():
        rows = loaded.model(ids).logits[0, CONTEXT - 1 : -1].log_softmax(-1)
    expected = rows.gather(1, ids[0, CONTEXT:, None])[:, 0]
    training, attention = loaded.model.training, loaded.model.config._attn_implementation
    np.testing.assert_allclose(trainer_log_prob(loaded.model, tokens), expected.numpy(), atol=1e-5)
    assert (loaded.model.training, loaded.model.config._attn_implementation) == (training, attention)
    with torch.no_grad():
        loaded.model.get_input_embeddings().weight[int(tokens[3])] = torch.nan
    with pytest.raises(NotFiniteError):
        trainer_log_prob(loaded.model, tokens)


def test_nan_is_beyond_every_bound() -> None:
    with pytest.raises(UserError, match="nan nats"):
        values = np.zeros(4)
        check_distance("a", "version 1", values, values + np.nan, Bound(1.0, 1.0))


@pytest.mark.parametrize(
    ("away", "proven"),
    [
        ([0.5, 0.5, 0.5, 0.5], True),  # the mean is on its bound, and then the largest on its own
        ([0.0, 2.0, 0.0, 0.0], True),
        ([0.75, 0.75, 0.5, 0.5], False),  # the mean alone is beyond
        ([0.0, 0.0, 0.0, -2.25], False),  # the largest alone; a distance has no sign
        ([1.0, -1.0, 1.0, -1.0], False),
    ],
)
def test_both_the_mean_and_the_largest_distance_have_a_bound(away: list[float], proven: bool) -> None:
    expected = np.array([-1.0, -2.0, -3.0, -4.0], np.float32)
    reported = expected + np.array(away, np.float32)
    if proven:
        figures = check_distance("a", "version 1", expected, reported, Bound(0.5, 2.0))
        assert figures["probe_mean"] == np.abs(away).mean() and figures["probe_max"] == np.abs(away).max()
    else:
        with pytest.raises(UserError, match="a does not compute with the weights of version 1"):
            check_distance("a", "version 1", expected, reported, Bound(0.5, 2.0))


def test_bounds_are_of_the_servers_dtype() -> None:
    exact, coarse = bound_of(FACTS, None), bound_of(replace(FACTS, dtype="bfloat16"), None)
    assert exact.mean < coarse.mean / 10
    assert bound_of(replace(FACTS, quantization="fp8"), None) == weight_probe.QUANTISED
    assert bound_of(FACTS, 0.3) == Bound(0.3, 3.0)
    assert bound_of(FACTS, None, torch.bfloat16) == coarse  # the trainer's own rounding is as large
    rounds = Bound(0.1, 0.5)
    assert copy_bound(FACTS, 0.3, rounds=rounds).mean > 0.3
    assert copy_bound(FACTS, None, rounds=rounds) == Bound(2 * exact.mean, 2 * exact.largest)
    served = replace(FACTS, dtype="bfloat16")
    bound = copy_bound(served, None, rounds=rounds)
    assert 0.1 < bound.mean < 0.2 and 0.5 < bound.largest < 2
    assert copy_bound(served, None, rounds=None) == Bound(2 * coarse.mean, 2 * coarse.largest)


def test_what_rounding_does_is_measured(llama: LoadedModel) -> None:
    tokens = probe_tokens(llama.tokenizer, 64, 128)
    expected = trainer_log_prob(llama.model, tokens)
    coarse = copy.deepcopy(llama.model)
    for weight in coarse.parameters():
        weight.data = weight.data.bfloat16()
    away = np.abs(trainer_log_prob(coarse, tokens) - expected)
    log_probs = weight_probe.rounding(llama.model, tokens, expected)
    np.testing.assert_allclose([log_probs.mean, log_probs.largest], [away.mean(), away.max()], rtol=1e-5)
    assert log_probs.mean > 1e-4 and next(llama.model.parameters()).dtype == torch.float32
    other = weight_probe.rounding(coarse, tokens, trainer_log_prob(coarse, tokens))
    assert 1 < other.mean / log_probs.mean < 2


@pytest.mark.slow
async def test_a_server_that_was_started_again_is_proven_before_it_serves(llama: LoadedModel) -> None:
    """By the perturbed copy of the first sync, whatever the trainer's weights are by now."""
    server = ModelServer(llama)
    start = copy.deepcopy(server.model.state_dict())
    async with syncing(llama) as sync:
        await push(sync, server, llama.model)
        assert sync._perturbed is not None and sync.transport is not None
        folder = sync._perturbed.handover.folder
        grow(llama, 1.1)
        await push(sync, server, llama.model, 1)
        for stays in ([], ["model.layers.0.mlp.up_proj.weight"]):
            server.model.load_state_dict(start)
            server.label, server.ignores = "default", stays  # its process is another
            server.calls.clear()
            if stays:
                with pytest.raises(UserError, match="the perturbed copy"):
                    await sync.push(server)
            else:
                metrics = await sync.push(server)
                assert metrics["perturbed_max"] < 1e-4 and metrics["probe_max"] < 1e-4
            assert [call for call in server.calls if "load" in call] == ["load v0-perturbed", "load v1"]
        assert folder.is_dir()
    assert not folder.exists()


async def test_a_server_that_failed_its_probe_returns_with_the_perturbed_copy(llama: LoadedModel) -> None:
    server = ModelServer(llama)
    async with syncing(llama) as sync:
        await push(sync, server, llama.model)
        server.ignores = names_of(llama)
        grow(llama, 1.5)
        with pytest.raises(UserError, match="weights of version 1"):
            await push(sync, server, llama.model, 1)
        with pytest.raises(UserError, match="the perturbed copy"):
            await sync.push(server)
        server.ignores = ()
        server.calls.clear()
        assert (await sync.push(server))["probe_max"] < 1e-4
        assert [call for call in server.calls if "load" in call] == ["load v0-perturbed", "load v1"]


@pytest.mark.slow
async def test_an_adapter_is_proven_merged(llama: LoadedModel, tiny_model: Callable[[str], Path]) -> None:
    """The server asserts that it is handed the weights of a model without one."""
    server, adapted = ModelServer(llama), with_adapter(tiny_model("llama"), Lora(rank=2))
    async with syncing(adapted) as sync:
        assert (await push(sync, server, adapted.model))["probe_max"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("interrupt", "keeps_kv", "calls"),
    [
        ("recompute", True, ["forget True"]),
        ("finish", True, ["forget False"]),
        ("keep", True, []),
        ("keep", False, ["forget False"]),
    ],
)
async def test_what_is_forgotten_depends_on_what_runs(
    interrupt: str, keeps_kv: bool, calls: list[str], llama: LoadedModel
) -> None:
    facts = replace(FACTS, keeps_kv=keeps_kv)
    server = ModelServer(llama, facts=facts)
    async with syncing(llama, interrupt=interrupt) as sync:
        await push(sync, server, llama.model, push_round=PushRound([server]))
    assert [call for call in server.calls if call.startswith("forget")] == calls * 2


@pytest.mark.slow
async def test_a_server_that_returns_forgets_what_others_may_have_computed(llama: LoadedModel) -> None:
    """It was given these weights before, and then another run's; requests in between named these as their salt."""
    server = ModelServer(llama, facts=replace(FACTS, keeps_kv=True))
    async with syncing(llama, interrupt="keep") as sync:
        await push(sync, server, llama.model, push_round=PushRound([server]))
        assert "forget True" not in server.calls
        await sync.push(server)
    assert server.calls.count("forget True") == 1
