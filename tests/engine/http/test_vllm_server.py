"""Weights, caches and versions of a real vLLM server, which only one can show. PROXIMA_VLLM names the executable."""

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from proxima.data import UserError
from proxima.engine.http.client import Address, ServerClient
from proxima.engine.http.dialect import INCOMPLETE, TokenRequest, WeightsInFolder, WrittenTokens
from proxima.engine.http.vllm import VllmDialect
from proxima.engine.http.weights.sync import WeightSync
from proxima.engine.http.weights.weight_folders import WeightFolders
from proxima.engine.protocol import Sampling, ServerError, WeightUpdate
from proxima.model.load import load
from proxima.model.pretrained import LoadedModel
from tests.engine.http.live_vllm import MODEL, live_server, needs_vllm
from tests.engine.http.test_weight_probe import syncing
from tests.tiny import tiny_tokenizer

pytestmark = [pytest.mark.slow, needs_vllm]
DIALECT = VllmDialect()
CLOSE = 5e-3  # nats, float32 against float32; other weights are farther off by two orders of magnitude


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with live_server(tmp_path_factory.mktemp("vllm")) as url:
        yield url


@pytest.fixture(scope="module")
def trained() -> LoadedModel:
    torch.set_num_threads(1)
    return load(str(MODEL), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def moved(trained: LoadedModel) -> LoadedModel:
    return moving(trained)


def moving(loaded: LoadedModel) -> LoadedModel:
    """The model after some training: every weight is another."""
    model = copy.deepcopy(loaded.model)
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.05 * torch.randn(weight.shape, generator=draws))
    return replace(loaded, model=model)


@asynccontextmanager
async def replica(url: str) -> AsyncIterator[Any]:
    client = ServerClient(Address(url), seconds=300)
    try:
        facts = await DIALECT.probe(client)
        yield SimpleNamespace(url=url, client=client, dialect=DIALECT, facts=facts, take_cache=nothing)
    finally:
        await client.close()


async def nothing() -> None:
    """A server that never sleeps has its cache."""


async def hand_over(server: Any, loaded: LoadedModel, folders: WeightFolders, label: str) -> None:
    folder = folders.write(loaded.model, loaded.tokenizer, label)
    weights = WeightsInFolder(version=1, label=label, folder=folder, seconds=300)
    await DIALECT.load_folder(server.client, server.facts, weights)


async def push(sync: WeightSync, server: Any, module: torch.nn.Module, label: str, version: int = 0) -> dict[str, Any]:
    sync.newest = await sync.prepare(WeightUpdate(version=version, module=module), label, server.facts.dtype)
    await DIALECT.pause(server.client, server.facts, "keep")
    return await sync.push(server)


def teacher_forced(model: Any, prompt: list[int], tokens: np.ndarray) -> np.ndarray:
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    with torch.no_grad():
        rows = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


async def test_a_tied_head_does_not_stay_behind(url: str, trained: LoadedModel) -> None:
    async with replica(url) as server, syncing(trained, 128) as sync:
        metrics = await push(sync, server, trained.model, "tied-0")
        assert metrics["probe_mean"] < 1e-3 and metrics["perturbed_max"] < CLOSE
        assert (await DIALECT.health(server.client, server.facts)).weight_version == "tied-0"


def small_model(kind: str, folder: Path) -> LoadedModel:
    """A Llama with a tied head; or a mixture whose experts are 48 wide, which the kernel of a CPU pads to 64."""
    sizes = {"vocab_size": 1024, "hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 3, "intermediate_size": 64, "initializer_range": 0.1, "eos_token_id": 0}
    torch.manual_seed(0)
    if kind == "mixture":
        sizes |= {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    loaded = LoadedModel(model=model, tokenizer=tiny_tokenizer(), path=str(folder))
    for part in (loaded.model, loaded.tokenizer):
        part.save_pretrained(folder)
    return loaded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_experts_of_a_mixture_are_packed_again(dtype: str, tmp_path: Path) -> None:
    loaded = small_model("mixture", tmp_path / "model")
    with live_server(tmp_path, dtype=dtype, model=tmp_path / "model") as url:
        async with replica(url) as server, syncing(loaded, 128) as sync:
            metrics = await push(sync, server, loaded.model, "mixture-0")
            assert metrics["probe_mean"] < (1e-3 if dtype == "float32" else 0.1)


def put_weights(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Put weights into a written folder, in place of those that it has."""
    for file in folder.glob("*.safetensors"):
        content = load_file(file)
        content |= {name: weights[name].detach().to(content[name].dtype).clone() for name in content if name in weights}
        save_file(content, file)


STALE = ["norm.weight", "layers.7.input_layernorm.weight", "layers.28.self_attn.q_proj.weight"]
STALE += ["layers.14.self_attn.v_proj.weight", "layers.21.mlp.down_proj.weight", "embed_tokens.weight"]


@pytest.mark.parametrize("name", STALE)
async def test_a_tensor_that_stays_behind_is_found_at_the_first_sync(url: str, trained: LoadedModel, name: str) -> None:
    async with replica(url) as server, syncing(trained, 128) as sync:
        sync.newest = await sync.prepare(
            WeightUpdate(version=0, module=trained.model), f"stale-{name}", server.facts.dtype
        )
        assert sync._perturbed is not None
        name = f"model.{name}"
        put_weights(sync._perturbed.handover.folder, {name: trained.model.get_parameter(name)})
        with pytest.raises(UserError, match="perturbed copy"):
            await sync.push(server)


async def test_many_syncs_at_usual_learning_rates_are_no_alarm(url: str, trained: LoadedModel) -> None:
    loaded = replace(trained, model=copy.deepcopy(trained.model))
    draws = torch.Generator().manual_seed(2)
    async with replica(url) as server, syncing(loaded, 128) as sync:
        for version in range(8):
            metrics = await push(sync, server, loaded.model, f"many-{version}", version)
            assert metrics["probe_mean"] < 1e-3
            rate = (1e-6, 1e-5)[version % 2]
            with torch.no_grad():  # what a step of AdamW does at its start: the rate, up or down
                for weight in loaded.model.parameters():
                    weight.add_(rate * torch.randn(weight.shape, generator=draws).sign())


async def test_the_prefix_cache_of_other_weights_is_never_read(
    url: str, trained: LoadedModel, moved: LoadedModel, tmp_path: Path
) -> None:
    prompt = trained.tokenizer("The tower of Hanoi has three rods and any number of disks. " * 30).input_ids[:400]
    folders = WeightFolders(tmp_path)
    async with replica(url) as server:

        async def away(model: Any, name: str, salt: str | None) -> float:
            """Largest distance of a completion's log-probs from those of the model."""
            fields = {"sampling": Sampling(max_tokens=8), "seed": 5, "cache_salt": salt}
            parts = DIALECT.stream(server.client, server.facts, TokenRequest(id=name, tokens=prompt, **fields))
            tokens, log_probs, _ = joined([chunk async for chunk in parts])
            return float(np.abs(log_probs - teacher_forced(model, prompt, tokens)).max())

        await DIALECT.pause(server.client, server.facts, "keep")
        await hand_over(server, trained, folders, "cache-1")
        await DIALECT.reset_prefix_cache(server.client, server.facts, running=False)
        await DIALECT.resume(server.client, server.facts)
        assert await away(trained.model, "a", None) < CLOSE  # and now its blocks are in the cache
        await DIALECT.pause(server.client, server.facts, "keep")
        await hand_over(server, moved, folders, "cache-2")
        await DIALECT.resume(server.client, server.facts)
        assert await away(moved.model, "b", None) > 10 * CLOSE  # not forgotten: the test can fail
        assert await away(moved.model, "c", "cache-2") < CLOSE  # a salt of one's own keeps away from it
        await DIALECT.reset_prefix_cache(server.client, server.facts, running=False)
        assert await away(moved.model, "d", None) < CLOSE


def joined(chunks: list[Any]) -> tuple[np.ndarray, np.ndarray, Any]:
    """Tokens, their log-probs, and the spans of versions."""
    tokens, log_probs = (np.concatenate([getattr(c, name) for c in chunks]) for name in ("tokens", "log_prob"))
    return tokens, log_probs, chunks[-1].version_spans


@pytest.mark.parametrize("interrupt", ["recompute", "keep"])
async def test_versions_of_tokens_across_a_sync(
    interrupt: str, url: str, trained: LoadedModel, moved: LoadedModel, tmp_path: Path
) -> None:
    """Completions run while weights change; each token's log-prob is that of the version that it names."""
    prompt = trained.tokenizer("Once upon a time").input_ids
    folders = WeightFolders(tmp_path)
    async with replica(url) as server:
        await hand_over(server, trained, folders, "first")
        await DIALECT.reset_prefix_cache(server.client, server.facts, running=False)
        begun = [asyncio.Event() for _ in range(2)]

        async def complete(number: int) -> tuple[np.ndarray, np.ndarray, Any]:
            fields = {"sampling": Sampling(max_tokens=60), "seed": number}
            request = TokenRequest(id=f"{interrupt}-{number}", tokens=prompt, **fields)
            chunks = []
            async for chunk in DIALECT.stream(server.client, server.facts, request):
                chunks.append(chunk)
                if len(chunks) == 10:
                    begun[number].set()
            return joined(chunks)

        running = [asyncio.create_task(complete(number)) for number in range(2)]
        for event in begun:
            await event.wait()
        await DIALECT.pause(server.client, server.facts, "keep")
        await hand_over(server, moved, folders, "second")
        if interrupt == "recompute":
            await DIALECT.reset_prefix_cache(server.client, server.facts, running=True)
        await DIALECT.resume(server.client, server.facts)
        completions = [await task for task in running]
    for tokens, log_probs, spans in completions:
        assert len(tokens) == 60 and spans[0][0] == "first" and spans[-1][2] == 60
        (_, start, seam), (label, again, end) = spans
        assert (start, label, again, end) == (0, "second", seam, 60) and 10 <= seam < 60
        np.testing.assert_allclose(log_probs[:seam], teacher_forced(trained.model, prompt, tokens)[:seam], atol=CLOSE)
        fresh = teacher_forced(moved.model, prompt, tokens)[seam:]
        if interrupt == "recompute":
            np.testing.assert_allclose(log_probs[seam:], fresh, atol=CLOSE)
        else:
            mixed = over_kept_cache(trained.model, moved.model, [*prompt, *tokens[:seam].tolist()], tokens[seam:])
            np.testing.assert_allclose(log_probs[seam:], mixed, atol=CLOSE)
            assert np.abs(log_probs[seam:] - fresh).max() > 10 * CLOSE


def over_kept_cache(before: Any, after: Any, prefix: list[int], tokens: np.ndarray) -> np.ndarray:
    """Log-probs of tokens after a prefix whose KV, but for the last token's, is of weights before."""
    with torch.no_grad():
        cache = before(torch.tensor([prefix[:-1]]), use_cache=True).past_key_values
        ids = torch.tensor([[prefix[-1], *tokens.tolist()]])
        rows = after(ids[:, :-1], past_key_values=cache, use_cache=True).logits[0].log_softmax(-1)
    return rows.gather(1, ids[0, 1:, None])[:, 0].numpy()


def in_buckets(folder: Path, count: int) -> list[Path]:
    """Write the weights of a folder as so many files, which end in the middle of layers."""
    content = {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}
    for file in folder.glob("*.safetensors"):
        file.unlink()
    files, names = [folder / f"model-{number:05}.safetensors" for number in range(1, count + 1)], list(content)
    for number, file in enumerate(files):
        part = names[number * len(names) // count : (number + 1) * len(names) // count]
        save_file({name: content[name] for name in part}, file, {"format": "pt"})
    return files


def gone(file: Path) -> None:
    """It is listed, and gone when it is read."""
    file.unlink()
    file.symlink_to("nowhere")


def torn(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def of_another_model(file: Path) -> None:
    """The last of its weights has another shape, which vLLM notices unless they are experts; of them it is gone."""
    content = load_file(file)
    if names := [name for name in content if "experts" not in name]:
        save_file(content | {names[-1]: torch.zeros(3, 5, 7)}, file)
    else:
        gone(file)


SMALL_UPDATE = "tests/engine/http/test_broken_updates.py::test_after_a_bucket_that_failed_the_next_update_is_whole"


@pytest.mark.campaign(SMALL_UPDATE)
@pytest.mark.parametrize("kind", ["llama", "mixture"])
async def test_every_bucket_of_an_update_cut_once(kind: str, tmp_path: Path) -> None:
    """After each cut the server computes, and the next update is whole: its scores are those of an unbroken one."""
    loaded = small_model(kind, tmp_path / "model")
    given = WrittenTokens.of(np.arange(100, 164, dtype=np.int32), None)
    folders = WeightFolders(tmp_path / "weights")
    with live_server(tmp_path, model=tmp_path / "model") as url:
        async with replica(url) as server:

            async def handed_over(folder: Path, label: str) -> np.ndarray:
                await DIALECT.pause(server.client, server.facts, "keep")
                weights = WeightsInFolder(version=1, label=label, folder=folder, seconds=300)
                await DIALECT.load_folder(server.client, server.facts, weights)
                await DIALECT.resume(server.client, server.facts)
                return await DIALECT.score(server.client, server.facts, given, 1)

            models = [
                folders.write(one.model, one.tokenizer, name) for name, one in (("a", loaded), ("b", moving(loaded)))
            ]
            buckets = [in_buckets(folder, 15) for folder in models]
            expected = [await handed_over(folder, folder.name) for folder in models]
            assert np.abs(expected[0] - teacher_forced(loaded.model, [100], given.read[1:])).max() < CLOSE
            assert np.abs(expected[0] - expected[1]).max() > 10 * CLOSE
            cuts = [*itertools.product(range(15), (of_another_model, None)), (7, gone), (7, torn)]
            for number, cut in cuts:
                file = buckets[1][number]
                before = file.read_bytes()
                if cut is None:  # the client leaves after this bucket
                    await begin(server, buckets[1][: number + 1])
                else:
                    cut(file)
                    with pytest.raises(ServerError, match="/update_weights"):
                        await handed_over(models[1], "broken")
                    file.unlink()
                    file.write_bytes(before)
                facts = await DIALECT.probe(server.client)  # draws tokens
                assert facts.more["weights"].startswith("incomplete")
                whole = number % 2
                np.testing.assert_array_equal(await handed_over(models[whole], f"{number}-{cut}"), expected[whole])


async def begin(server: Any, files: list[Path]) -> None:
    """An update that ends after these files."""
    await DIALECT.pause(server.client, server.facts, "keep")
    await server.client.post("/update_weight_version", {"new_version": f"{INCOMPLETE}begun"})
    await server.client.post("/start_weight_update", alone=True)
    for file in files:
        await server.client.post("/update_weights", {"update_info": {"kind": "file", "content": {"file": str(file)}}})
