"""The vLLM dialect over a fake of its protocol."""

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from proxima.data import FieldError, UserError
from proxima.data.columns import SamplingMask
from proxima.engine.http.answer_values import RouteShape
from proxima.engine.http.dialect import Chunk, ServerFacts, TokenRequest, WeightsInFolder, WrittenTokens
from proxima.engine.http.server_checks import capabilities_of
from proxima.engine.http.vllm import GENERATE, Vllm, VllmDialect, find_vllm_facts
from proxima.engine.protocol import EngineRequirements, Sampling, ServerError
from proxima.engine.serve.launch import TRANSFER, WORKER, Serve
from tests.engine.helpers import unloaded
from tests.engine.http.fake_vllm import FakeVllm, experts_of, log_softmax, logits_after

DIALECT = VllmDialect()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def facts_of(fake: FakeVllm) -> ServerFacts:
    return run(find_vllm_facts(fake.client()))


def probed(**options: Any) -> tuple[FakeVllm, ServerFacts]:
    fake = FakeVllm(**options)
    return fake, facts_of(fake)


async def chunks(fake: FakeVllm, facts: ServerFacts, **more: Any) -> list[Chunk]:
    request = TokenRequest(id="one", tokens=[5, 6], **({"sampling": Sampling(max_tokens=4), "seed": 3} | more))
    return [chunk async for chunk in DIALECT.stream(fake.client(), facts, request)]


@pytest.mark.parametrize("processed", [True, False])
def test_facts_say_what_the_server_does_and_not_what_it_claims(processed: bool) -> None:
    facts = facts_of(FakeVllm(processed=processed))
    assert facts.log_probs == ("processed" if processed else "raw")
    assert facts.version_spans
    assert (facts.dtype, facts.max_length) == ("bfloat16", 64)
    assert facts.seeds and facts.takes_weights


def test_a_server_without_the_call_is_refused_with_the_flag() -> None:
    with pytest.raises(UserError, match="gives no token ids: .*Route not enabled.*--enable-scale-out"):
        facts_of(FakeVllm(generate=False))


def test_without_control_calls_or_our_backend_there_are_no_weights() -> None:
    assert facts_of(FakeVllm(control=False)).dtype is None
    assert not any(facts_of(fake).takes_weights for fake in (FakeVllm(control=False), FakeVllm(backend="nccl")))


def test_log_probs_of_no_known_distribution_count_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeVllm()
    draw = fake._draw

    def logits(prompt: list[int], sampling: dict[str, Any]) -> Any:
        tokens, values, top = draw(prompt, sampling)
        return tokens, [v + 3 for v in values], [[(o, p + 3) for o, p in row] for row in top]

    monkeypatch.setattr(fake, "_draw", logits)
    facts = facts_of(fake)
    assert facts.log_probs is None and "no known" in facts.more["log-probs"]


def test_a_stream_gives_tokens_with_their_log_probs() -> None:
    fake = FakeVllm()
    (chunk,) = run(chunks(fake, facts_of(fake)))
    before = [6, *chunk.tokens[:-1]]
    expected = [log_softmax(logits_after(int(a), "default"))[b] for a, b in zip(before, chunk.tokens, strict=True)]
    np.testing.assert_allclose(chunk.log_prob, expected, atol=1e-6)
    assert chunk.finish_reason == "length" and list(chunk.prompt_tokens) == [5, 6]
    assert chunk.version_spans == (("default", 0, 4),)


def test_every_field_that_decides_a_draw_is_sent() -> None:
    fake, facts = probed()
    sampling = Sampling(temperature=0.7, max_tokens=3, stop=("###",))
    run(chunks(fake, facts, sampling=sampling, seed=11, stop_tokens=(2, 9), cache_salt="v4"))
    path, body = fake.calls[-1]
    sent = body["sampling_params"]
    wanted = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 3, "stop": ["###"], "seed": 11}
    wanted |= {"stop_token_ids": [2, 9], "ignore_eos": True, "repetition_penalty": 1.0, "n": 1, "logprobs": 0}
    assert {name: sent[name] for name in wanted} == wanted
    assert path == GENERATE and body["cache_salt"] == "v4" and body["request_id"] == "one"


SCHEMA = '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}}'


def test_a_grammar_is_sent_where_a_request_has_one() -> None:
    fake, facts = probed()
    run(chunks(fake, facts))
    _, free = fake.calls[-1]
    run(chunks(fake, facts, grammar=SCHEMA))
    _, body = fake.calls[-1]
    assert "structured_outputs" not in free["sampling_params"] and "reasoning_ended" not in free
    assert body["sampling_params"]["structured_outputs"] == {"json": SCHEMA}
    assert body["reasoning_ended"] is True  # it holds from the first token


def test_a_refusal_within_a_stream_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, facts = probed()
    refusal = {"error": {"message": "Grammar error", "type": "BadRequestError", "param": None, "code": 400}}
    text = f"data: {json.dumps(refusal)}\n\ndata: [DONE]\n\n"
    monkeypatch.setattr(fake, "_complete", lambda *_: httpx.Response(200, text=text))
    with pytest.raises(ServerError, match="Grammar error") as raised:
        run(chunks(fake, facts, grammar=SCHEMA))
    assert raised.value.status == 400


def test_that_a_kind_has_grammars_is_known_before_a_server_is_up() -> None:
    assert Vllm(url="http://127.0.0.1:9").grammars and Vllm(serve=Serve()).grammars
    assert capabilities_of(Vllm(), probed()[1]).grammars


def test_the_tokens_that_could_be_sampled_come_with_the_chunk() -> None:
    fake, facts = probed()
    (plain,) = run(chunks(fake, facts))
    sets = [[token + 2, token] for token in plain.tokens.tolist()]
    fake.change = {"sampling_mask": sets}
    (chunk,) = run(chunks(fake, facts))
    assert plain.sampling_mask is None and chunk.sampling_mask == SamplingMask.of_sets(sets)
    fake.change = {"sampling_mask": [[token, token] for token in plain.tokens.tolist()]}
    with pytest.raises(ServerError, match="without duplicates"):
        run(chunks(fake, facts))


def test_a_temperature_that_vllm_would_raise_is_refused() -> None:
    fake = FakeVllm()
    with pytest.raises(UserError, match=r"0\.005.*samples at 0\.01"):
        run(chunks(fake, facts_of(fake), sampling=Sampling(temperature=0.005)))


def test_scores_are_of_softmax_of_the_logits() -> None:
    fake, facts = probed()
    scores = run(DIALECT.score(fake.client(), facts, WrittenTokens.of(np.int32([5, 6, 7, 8, 9]), None), 2))
    expected = [log_softmax(logits_after(a, "default"))[b] for a, b in ((6, 7), (7, 8), (8, 9))]
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    with pytest.raises(UserError, match="--max-model-len 65"):
        run(DIALECT.score(fake.client(), facts, WrittenTokens.of(np.arange(64, dtype=np.int32), None), 1))


def test_the_pause_mode_is_always_sent() -> None:
    fake, facts = probed()
    for mode in ("keep", "abort"):
        run(DIALECT.pause(fake.client(), facts, mode))
        assert fake.calls[-1] == ("/pause", {"mode": mode, "clear_cache": "false"})
    assert fake.paused
    run(DIALECT.resume(fake.client(), facts))
    assert not fake.paused


def test_a_prefix_cache_that_was_not_emptied_is_an_error() -> None:
    fake, facts = probed()
    fake.busy = True
    with pytest.raises(ServerError, match="not emptied"):
        run(DIALECT.reset_prefix_cache(fake.client(), facts, running=False))
    run(DIALECT.reset_prefix_cache(fake.client(), facts, running=True))


def test_weight_calls_share_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn closes that of a call that failed, and the next one, which finishes the open update, would be lost."""
    fake, facts = probed()
    fake.updating, answer = True, fake.answer
    (tmp_path / "a.safetensors").touch()
    seen: list[tuple[str, str]] = []

    def noted(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, request.headers["connection"]))
        return answer(request)

    monkeypatch.setattr(fake, "answer", noted)
    run(DIALECT.load_folder(fake.client(), facts, WeightsInFolder(version=1, label="run-1", folder=tmp_path)))
    update = ["start_weight_update", "finish_weight_update", "start_weight_update", "update_weights"]
    for name in [*update, "finish_weight_update"]:
        assert (f"/{name}", "close") in seen
    called = [path for path, _ in seen if path.endswith(("weights", "weight_update"))]
    assert called == [f"/{name}" for name in [*update, "finish_weight_update"]]


def test_weights_go_file_by_file_and_carry_their_label(tmp_path: Path) -> None:
    files = [tmp_path / f"model-{name}.safetensors" for name in "abc"]
    for file in reversed(files):
        file.touch()
    fake, facts = probed()
    before = len(fake.calls)
    weights = WeightsInFolder(version=3, label="run-3", folder=tmp_path)
    run(DIALECT.load_folder(fake.client(), facts, weights))
    start, label, begin, same, *buckets, info, finish = fake.calls[before:]
    assert (start[0], begin[0], info[0]) == ("/init_weight_transfer_engine", "/start_weight_update", "/weight_info")
    assert label == same == ("/update_weight_version", {"new_version": "incomplete run-3"})
    assert [body["update_info"] for _, body in buckets] == [
        {"kind": "file", "content": {"file": str(file)}, "last": file is files[-1], "label": "run-3"} for file in files
    ]
    assert finish == ("/finish_weight_update", {"weight_version": "run-3"})
    assert run(DIALECT.health(fake.client(), facts)).weight_version == "run-3"


def test_a_load_that_was_broken_off_is_finished_without_a_label(tmp_path: Path) -> None:
    fake, facts = probed()
    weights = WeightsInFolder(version=3, label="run-3", folder=tmp_path)
    with pytest.raises(ServerError, match="the weights are gone from"):
        run(DIALECT.load_folder(fake.client(), facts, weights))
    assert fake.version == "default" and not fake.updating
    (tmp_path / "model.safetensors").touch()
    run(fake.client().post("/start_weight_update"))
    run(DIALECT.load_folder(fake.client(), facts, weights))
    assert ("/finish_weight_update", {}) in fake.calls and fake.version == "run-3" and not fake.updating


def test_the_worker_and_the_dialect_name_the_same_backend() -> None:
    assert f'BACKEND = "{TRANSFER}"' in WORKER.read_text()
    assert isinstance(Vllm().dialect(), VllmDialect)


SHAPE = RouteShape(layers=3, mixtures=(0, 2), experts=8, per_token=2)


def test_experts_are_read_where_a_stream_has_them() -> None:
    fake, facts = probed(routes=True)
    (chunk,) = run(chunks(fake, facts, routes=SHAPE))
    assert facts.routed_experts and not facts.latest_routes
    assert np.array_equal(chunk.routes, experts_of([5, 6, *chunk.tokens[:-1].tolist()])[:, [0, 2]])
    assert not facts_of(FakeVllm()).routed_experts


def test_experts_that_nobody_asked_for_are_kept_short_and_not_read() -> None:
    fake, facts = probed(routes=True)
    (chunk,) = run(chunks(fake, facts))
    assert chunk.routes is None and fake.calls[-1][1]["sampling_params"]["routed_experts_prompt_start"] == 2


def test_the_length_of_servers_that_are_yet_to_start_bounds_the_run() -> None:
    """Otherwise they load the model, and then the run refuses them."""
    spec = Vllm(serve=Serve(max_length=256))
    assert spec.longest_sequence() == 256 and Vllm(serve=Serve()).longest_sequence() is None
    with pytest.raises(FieldError, match="less than the 512 tokens"):
        spec.check(EngineRequirements(model=unloaded(context=512)))
