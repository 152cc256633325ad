"""Servers that sleep while the trainer computes, and are given its memory when they wake: a real, tiny model behind
vLLM's protocol."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proxima.data import UserError
from proxima.data.flow import Prompt
from proxima.engine.http.engine import HttpEngine
from proxima.engine.http.vllm import Vllm
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import EngineSetup, Request, Sampling, WeightUpdate
from proxima.model.load import load
from proxima.model.pretrained import LoadedModel
from tests.engine.http.model_server import ModelVllm
from tests.engine.http.raw_server import RawServer

STEPS = ("/sleep", "/wake_up", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume", "/score")


class Colocated:
    """Servers, and an engine over them."""

    def __init__(self, opened: ExitStack, folder: Path, count: int, health_seconds: float = 60) -> None:
        self.fakes = [ModelVllm(str(folder), sleeps=True, device="cpu") for _ in range(count)]
        urls = tuple(opened.enter_context(RawServer(fake)).url for fake in self.fakes)
        self.loaded = load(str(folder), dtype=torch.float32, device="cpu")
        spec = Vllm(url=urls, transfer="ipc", probe_tokens=32, health_seconds=health_seconds)
        self.engine: HttpEngine = opened.enter_context(closing(spec.build(EngineSetup.of(self.loaded, max_length=200))))

    async def publish(self, version: int) -> None:
        await self.engine.publish(WeightUpdate(version=version, module=self.loaded.model))

    def train(self) -> None:
        """The trainer's update. No server may have any of the devices."""
        assert all(fake.asleep == {"weights", "kv_cache"} for fake in self.fakes)
        with torch.no_grad():
            for weight in self.loaded.model.parameters():
                weight.mul_(1.02)

    def said(self, fake: ModelVllm) -> list[str]:
        """The calls about sleep and weights, and the requests that score."""
        calls = list[str]()
        for path, body in fake.calls:
            scores = path.endswith("generate") and "prompt_logprobs" in body["sampling_params"]
            name = f"{path} {body['tags']}" if path == "/wake_up" else "/score" if scores else path
            calls += [name] if name.split()[0] in STEPS else []
        fake.calls.clear()
        return calls


@pytest.fixture
def colocated(tiny_model: Callable[[str], Path]) -> Iterator[Callable[..., Colocated]]:
    with ExitStack() as opened:
        yield lambda count, **given: Colocated(opened, tiny_model("llama"), count, **given)


def asked(version: int) -> list[Request]:
    prompt = Prompt(uid=version, messages=(), tokens=[5, 6, 7])
    return [Request(prompt=prompt, sample=sample, sampling=Sampling(max_tokens=5)) for sample in range(4)]


def check(loaded: LoadedModel, completions: list[Any], version: int) -> None:
    """All are there, and from the trainer's weights."""
    assert len(completions) == 4
    for completion in completions:
        ids = torch.tensor([[5, 6, 7, *completion.tokens.tolist()]])
        with torch.no_grad():
            rows = loaded.model(ids, use_cache=False).logits[0, 2:-1].log_softmax(-1)
        expected = rows.gather(1, ids[0, 3:, None])[:, 0].numpy()
        np.testing.assert_allclose(completion.sampled_log_prob, expected, atol=1e-4)
        assert set(completion.policy_version.tolist()) == {version}


@pytest.mark.slow
async def test_weights_arrive_between_the_weights_and_the_cache(colocated: Callable[..., Colocated]) -> None:
    both = colocated(2)
    await both.publish(0)
    check(both.loaded, await collect(both.engine, asked(0)), 0)
    for fake in both.fakes:
        fake.calls.clear()
    for version in (1, 2):
        await both.engine.pause()
        await both.engine.sleep()
        both.train()
        waiting = asyncio.create_task(collect(both.engine, asked(version)))  # they are given to nobody yet
        await both.engine.wake()
        await both.publish(version)
        await both.engine.resume()
        update = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
        cycle = ["/sleep", "/wake_up weights", *update, "/wake_up kv_cache", "/resume", "/score"]
        check(both.loaded, await waiting, version)
        for fake in both.fakes:
            assert both.said(fake)[: len(cycle)] == cycle


async def test_a_step_without_new_weights_takes_the_cache_too(colocated: Callable[..., Colocated]) -> None:
    one = colocated(1)
    await one.publish(0)
    one.fakes[0].calls.clear()
    await one.engine.pause()
    await one.engine.sleep()
    await one.engine.wake()
    await one.engine.resume()
    assert one.said(one.fakes[0]) == ["/sleep", "/wake_up weights", "/wake_up kv_cache", "/resume"]
    check(one.loaded, await collect(one.engine, asked(0)), 0)


async def test_a_server_without_its_cache_is_ejected(colocated: Callable[..., Colocated]) -> None:
    """As where the trainer has left it too little memory; one line says so."""
    one = colocated(1, health_seconds=0.2)
    await one.publish(0)
    await one.engine.pause()
    await one.engine.sleep()
    await one.engine.wake()
    answer = one.fakes[0].answer

    def refuse(request: Any) -> Any:
        if request.url.path == "/wake_up":
            request = type(request)("GET", "http://x/no-such-call")
            one.fakes[0].control = False
        return answer(request)

    one.fakes[0].answer = refuse  # type: ignore[method-assign]
    one.engine._pool.spec = Vllm(away_seconds=0.05)
    with pytest.raises(UserError, match=r"out of service|new weights|status 404"):
        await one.publish(1)
        await collect(one.engine, asked(1))
