"""Two runs send their weights to one server: the one that came later leaves it to the other, with one line, and no
token counts that the weights of another run have sampled."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from proxima.data import UserError
from proxima.engine.http.client import Address, ServerClient
from proxima.engine.http.dialect import ServerHealth, is_incomplete
from proxima.engine.http.engine import HttpEngine
from proxima.engine.http.run_labels import came_before, new_run, run_of, sends_whole_weights
from proxima.engine.http.version_proof import VersionProof
from proxima.engine.http.weights import to_vllm
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import ServerError
from tests.engine.http.fake_model import sequence_log_probs
from tests.engine.http.fake_vllm import FakeVllm, unread
from tests.engine.http.fake_vllm_worker import FakeWorker
from tests.engine.http.plain_servers import (
    ELSEWHERE,
    IN_PLACE,
    WEIGHTS,
    PlainServer,
    begun,
    check,
    engine_over,
    fakes,
    go_on,
    held,
    requests,
    update,
)
from tests.engine.http.test_broken_updates import DIALECT, FACTS, LAYERS, WIDTH, everywhere, write
from tests.engine.http.test_broken_updates import module as module
from tests.processes import until

OTHER = "ffff0a1b2c3d.1.v1"  # the label of a run that came later than any
FIRST, SECOND = WEIGHTS | {3: 1.7, 4: 1.9}, {0: WEIGHTS[0], 1: 2.1, 2: 2.7, 3: 3.3, 4: 3.9}  # of two runs


def shared(count: int = 1, **settings: Any) -> list[PlainServer]:
    servers = fakes(count, **settings)
    for server in servers:
        server.shared = True
    return servers


def wrong(weights: dict[int, float], asked: Sequence[Any], given: Sequence[Any]) -> int:
    """How many completions have tokens of other weights than those that they name."""
    count = 0
    for request, completion in zip(asked, given, strict=True):
        each = [weights[version] for version in completion.policy_version.tolist()]
        expected = sequence_log_probs(each, request.prompt.tokens, completion.tokens)
        count += not np.allclose(expected, completion.sampled_log_prob, atol=1e-6)
    return count


# ---- which of them leaves --------------------------------------------------------------------------------------------


async def lines(engine: HttpEngine, text: str) -> int:
    return sum(text in line for line in (await engine.health()).detail["events"])


@pytest.mark.parametrize("facts", [IN_PLACE, ELSEWHERE, {}], ids=["spans", "silent", "repeatable"])
async def test_the_run_that_came_later_leaves_the_server(facts):
    servers, asked = shared(facts=facts), requests(2, 2)
    with engine_over(servers) as first:
        await first.publish(update(1))
        with engine_over(servers) as second:
            with pytest.raises(UserError) as told:
                await second.publish(update(1, SECOND[1]))
                while True:
                    await collect(second, asked)
            assert "another run trains with it, which came before this one: it has weights '0001" in str(told.value)
            assert "wait until the other run has ended, or give each run servers of its own" in str(told.value)
        check(asked, await collect(first, asked), 1)
        await first.publish(update(2))
        check(asked, await collect(first, asked), 2)
        assert await lines(first, "another run, which came after this one, has sent it weights, '0002") <= 1


async def test_a_server_of_a_run_that_has_ended_is_taken():
    servers, asked = shared(facts=IN_PLACE), requests(2, 2)
    with engine_over(servers) as first:
        await first.publish(update(1))
    with engine_over(servers) as second:
        await second.publish(update(1))
        check(asked, await collect(second, asked), 1)
        await until(lambda: servers[0].calls["/load"] > 20)
        assert (await second.health()).detail["events"] == []
    assert servers[0].label.startswith("0002")


async def test_the_run_that_leaves_goes_on_with_its_own_servers():
    (common,), (own,) = shared(facts=IN_PLACE), fakes(facts=IN_PLACE)
    with engine_over([common]) as first, ExitStack() as opened:
        await first.publish(update(1))
        second = opened.enter_context(engine_over([common, own]))
        await second.publish(update(1))
        await until(lambda: len(second._pool.serving) == 1 and not second._pool.replicas[0].status.may_return)
        asked = requests(2, 2)
        check(asked, await collect(second, asked), 1)
        assert await lines(second, f"{common.url} ") >= 1
        check(asked, await collect(first, asked), 1)


def test_both_runs_find_the_same_one_of_them():
    first = new_run(["default", None])
    later = new_run(["default", f"{first}.3.v3", f"incomplete {first}.4.v4-perturbed"])
    assert came_before(first, later) and not came_before(later, first)
    old = "0a1b2c3d"  # of an earlier version
    assert came_before(old, first) and came_before(old, new_run([f"{old}.1.v1"]))
    assert run_of(f"incomplete {later}.1.v0.adapters") == later and run_of("v1") is run_of(None) is None
    assert sends_whole_weights(f"{later}.1.v0-perturbed") and not sends_whole_weights(f"{later}.1.v0.adapters")
    assert came_before(first, new_run([f"ffff{old}.1.v1"]))  # there is no later place


@pytest.mark.parametrize(
    ("seen", "rival"),
    [
        (["ffff00000000.1.v1"] * 3, None),  # a run that has ended
        (["default", "ffff00000000.1.v1"], "ffff00000000.1.v1"),
        (["ffff00000000.1.v1", "000100000000.1.v1", "ffff00000000.1.v1"], "ffff00000000.1.v1"),
        (["default", "ffff00000000.1.v1", "000100000000.2.v2"], None),  # it has our weights again
        (["000100000000.1.v1", None, "default"], None),  # it was started again
    ],
)
def test_another_run_is_one_whose_label_comes_while_ours_goes_on(seen, rival):
    async def health() -> ServerHealth:
        return ServerHealth()

    proof = VersionProof(health)
    proof.run = "000100000000"
    for label in seen:
        proof.saw(label)
    assert proof.rival == rival


# ---- what does not count ---------------------------------------------------------------------------------------------


def taken_over(server: PlainServer) -> None:
    """Another run has given it weights: nothing breaks, and what it runs goes on with them."""
    server.weights, server.label = SECOND[1], OTHER


async def test_tokens_that_another_run_has_sampled_do_not_count(fleet):
    """They come after the server has confirmed those before, and before it is asked again."""
    asked = requests(2, 2, first=3)
    engine, (server,) = fleet(facts=ELSEWHERE, published=True)
    server.shared = True
    task = await begun(engine, [server], asked)
    (replica,) = engine._pool.replicas
    await until(lambda: all(segment.confirmed for segment in list(replica.proof.attempts)))
    taken_over(server)
    go_on([server])
    check(asked, await task, 1)
    assert engine._pool.counts["lost"] > 0


async def test_what_is_sampled_before_weights_come_again_is_confirmed_before(fleet):
    """By the time that the server is asked, it has the weights again that it was given before."""
    asked = requests(2, 1, first=3)
    engine, (server,) = fleet(facts=ELSEWHERE, published=True, health_seconds=3600.0)
    task = await begun(engine, [server], asked)
    (replica,) = engine._pool.replicas
    taken_over(server)
    server.stop_after = 3
    await until(lambda: held(server, 3))

    def given_again() -> None:
        replica.proof.set_version(1, replica.proof.label)
        server.weights, server.label = WEIGHTS[1], replica.proof.label

    engine._loop.submit(given_again)
    await until(lambda: server.label != OTHER)
    go_on([server])
    check(asked, await task, 1)


# ---- updates that interleave -----------------------------------------------------------------------------------------


async def interleaved(module: Any, folder: Path, seed: int) -> Counter[str]:
    """Two runs load weights into one vLLM, and the calls of both come in an order that a seed decides."""
    draws, seen = random.Random(seed), Counter[str]()
    worker = FakeWorker(module, LAYERS, WIDTH)
    fake = FakeVllm(workers=[worker])

    async def handler(request: httpx.Request) -> httpx.Response:
        for _ in range(draws.randrange(6)):
            await asyncio.sleep(0)
        return unread(fake.answer(request))

    async def one(value: float, later: int) -> None:
        for _ in range(later):
            await asyncio.sleep(0)
        client = ServerClient(Address("http://127.0.0.1:1"), seconds=5)
        client._http = httpx.AsyncClient(base_url=client.url, transport=httpx.MockTransport(handler))
        try:
            await DIALECT.load_folder(client, FACTS, write(folder / f"{value:g}", value))
        except ServerError:
            seen["refused"] += 1
        else:
            seen["loaded"] += 1

    await asyncio.gather(one(1.0, draws.randrange(60)), one(2.0, draws.randrange(60)))
    assert worker.model.computes
    if fake.version.startswith("run-"):
        assert everywhere(worker) == {float(fake.version.removeprefix("run-"))}, fake.version
    return seen


FELL = (48, 97, 286, 2231)  # orders of calls that were wrong at first, or while a part of the mend was absent


@pytest.mark.slow
@pytest.mark.parametrize("seed", FELL)
async def test_a_label_names_the_weights_that_the_server_has(seed, module, tmp_path):
    await interleaved(module, tmp_path, seed)


@pytest.mark.campaign("tests/engine/http/test_two_trainers.py::test_a_label_names_the_weights_that_the_server_has")
async def test_updates_of_two_runs_in_400_orders(module, tmp_path):
    seen = Counter[str]()
    for seed in range(400):
        seen += await interleaved(module, tmp_path, 1000 + seed)
    assert seen["loaded"] > 100 and seen["refused"] > 100, seen


async def test_an_update_is_not_ended_after_another_has_begun(module, tmp_path):
    """It would end that one in the middle, under the label of this one."""
    worker = FakeWorker(module, LAYERS, WIDTH)
    fake = FakeVllm(workers=[worker])
    mine, other = (write(tmp_path / f"{value:g}", value) for value in (1.0, 2.0))
    client = fake.client()

    async def updates() -> Any:
        async for bucket in to_vllm.files_of(client.url, mine):
            yield bucket
        label = {"new_version": f"incomplete {other.label}"}
        for path, body in (
            ("finish_weight_update", {}),
            ("start_weight_update", None),
            ("update_weight_version", label),
        ):
            await client.post(f"/{path}", body)
        file = min(other.folder.iterdir())
        info = {"kind": "file", "content": {"file": str(file)}, "label": other.label}
        await client.post("/update_weights", {"update_info": info})

    with pytest.raises(ServerError, match="another run is changing its weights: 'incomplete run-2'"):
        await to_vllm.transfer_weights(client, mine, updates())
    assert is_incomplete(fake.version) and worker.model.computes


def test_buckets_of_another_update_are_refused(module, tmp_path):
    """The update is over, and no layer has weights of both."""
    worker = FakeWorker(module, LAYERS, WIDTH)
    fake = FakeVllm(workers=[worker])
    files = {value: sorted(write(tmp_path / f"{value:g}", value).folder.iterdir()) for value in (1.0, 2.0)}
    client = fake.client()

    def sent(value: float, number: int) -> Any:
        info = {"kind": "file", "content": {"file": str(files[value][number])}, "label": f"run-{value:g}"}
        return client.post("/update_weights", {"update_info": info})

    async def both() -> None:
        await client.post("/start_weight_update")
        await sent(1.0, 0)
        with pytest.raises(ServerError, match="another run is updating these weights, to run-1"):
            await sent(2.0, 1)

    asyncio.run(both())
    assert worker.model.computes and 2.0 not in everywhere(worker)


# ---- the long form ---------------------------------------------------------------------------------------------------


async def trained(engine: HttpEngine, weights: dict[int, float], seed: int) -> Any:
    """Train four steps. Returns the number of completions that have tokens of others, or the error that ends it."""
    draws, count = random.Random(seed), 0
    try:
        for version in range(1, 5):
            await engine.publish(update(version, weights[version]))
            asked = requests(3, 3, first=version, seed=seed)
            count += wrong(weights, asked, await collect(engine, asked))
            await asyncio.sleep(draws.random() * 0.1)
    except UserError as error:
        return error
    return count


async def both_train(facts: dict[str, Any], seed: int) -> None:
    """At once: one trains to its end, unless the other has told it to leave and then ended."""
    servers = shared(facts=facts, slow=0.002)
    with engine_over(servers) as first, engine_over(servers) as second:
        ends = await asyncio.gather(trained(first, FIRST, seed), trained(second, SECOND, seed + 1))
        events = [(await engine.health()).detail["events"] for engine in (first, second)]
    errors = [end for end in ends if isinstance(end, UserError)]
    assert len(errors) <= 1 and all(end == 0 for end in ends if not isinstance(end, UserError)), ends
    for error in errors:
        assert "another run trains with it, which came before this one" in str(error)
    assert all(len(told) <= 12 for told in events), events


KINDS = {"spans": IN_PLACE, "silent": ELSEWHERE, "repeatable": {}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_two_that_begin_at_once(kind):
    await both_train(KINDS[kind], 1)


@pytest.mark.campaign("tests/engine/http/test_two_trainers.py::test_two_that_begin_at_once")
@pytest.mark.parametrize("kind", KINDS)
async def test_thirty_pairs_that_begin_at_once(kind):
    for seed in range(30):
        await both_train(KINDS[kind], 2 * seed)
