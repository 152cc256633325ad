"""What is refused before a run begins, with the line that says it."""

from dataclasses import replace

import pytest

from proxima.data import FieldError, UserError
from proxima.engine.http.server_checks import check_servers_of
from proxima.engine.http.sglang import Sglang
from proxima.engine.http.vllm import Vllm
from proxima.engine.protocol import EngineRequirements, Sampling
from proxima.engine.serve.launch import Serve
from proxima.system.atomic_files import check_writable
from tests.engine.helpers import unloaded
from tests.engine.http.fake_model import LetterTokenizer
from tests.engine.http.plain_servers import Plain, fakes

PLAIN = Sampling(max_tokens=16)
NEEDS = EngineRequirements(
    model=unloaded("model", LetterTokenizer(), 100),
    training=PLAIN,
    samplings=(PLAIN,),
    log_probs=frozenset({"sampled"}),
    publishes=True,
)


def notes(servers, needs=NEEDS, **settings):
    return check_servers_of(Plain(url=tuple(server.url for server in servers), **settings), needs)


@pytest.mark.parametrize(
    ("facts", "needs", "settings", "line"),
    [
        ({"max_length": 64}, {}, {}, "takes sequences of 64 tokens, and the run has 100"),
        ({"log_probs": None}, {}, {}, "returns no log-probs of completions"),
        ({"takes_weights": False}, {}, {}, "can't load new weights"),
        ({"quantization": "fp8"}, {}, {}, "quantization=None is not what .* has: quantization=fp8"),
        ({"log_probs": "raw"}, {"samplings": (Sampling(temperature=0.7),)}, {}, "reports log-probs of temperature 1"),
        ({"version_spans": False}, {"overlaps": True}, {"interrupt": "keep"}, "interrupt='keep' needs a server that"),
        ({}, {"sampling_mask": True}, {}, "does not report which tokens could be sampled"),
        ({}, {}, {"transfer": "group"}, "transfer='group' is not offered by every server; use folder or auto"),
        (
            {},
            {"training": Sampling(top_k=3), "log_probs": frozenset({"untruncated"})},
            {"untruncated": "absent"},
            "the loss reads untruncated_log_prob",
        ),
    ],
)
def test_a_server_that_lacks_something_is_refused_in_one_line(facts, needs, settings, line):
    with pytest.raises(UserError, match=line) as caught:
        notes(fakes(facts=facts), replace(NEEDS, **needs), **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"model": "another"}, "its model is another, and that of the others is formula"),
        ({"letters": "gfedcba"}, "it has another tokenizer"),
        ({"log_probs": "raw"}, "its log-prob mode is raw"),
        ({"max_length": 64}, "its longest sequence has 64 tokens"),
        ({"takes_weights": False}, "it can't load new weights"),
    ],
)
def test_servers_that_differ_are_refused(facts, reason):
    good, bad = fakes(2), fakes(2, facts=facts)
    with pytest.raises(FieldError, match=f"differs: {bad[0].url}: {reason}") as caught:
        notes([*good, *bad])
    assert (caught.value.field, caught.value.value) == ("url", bad[0].url)


def test_a_way_that_sglang_lacks_is_refused_before_it_starts():
    spec = Sglang(serve=Serve(), transfer="ipc")
    with pytest.raises(FieldError, match="transfer='ipc' is not offered by every server; use folder, group or auto"):
        spec.check(NEEDS)


def test_an_unwritable_weight_folder_is_refused_before_servers_are_asked(tmp_path):
    (tmp_path / "file").touch()
    spec = Plain(url="http://127.0.0.1:1", weight_folder=str(tmp_path / "file" / "below"))
    with pytest.raises(FieldError, match="weight_folder=.* can't be written: Not a directory; give a folder"):
        spec.check(NEEDS)
    with pytest.raises(FieldError, match="File name too long"):
        check_writable("weight_folder", str(tmp_path / "new" / ("x" * 300)), "")
    check_writable("weight_folder", str(tmp_path / "new" / "one"), "")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("samplings", "line"),
    [
        ((Sampling(top_k=3), Sampling(temperature=0.0)), "at temperature 0, .*; set eval.sampling.temperature=1 eval"),
        ((Sampling(top_k=3), Sampling(top_p=0.9)), "without a top_k, .*; set sampling.top_k=512"),
    ],
)
def test_samplings_that_vllm_refuses_beside_sampling_masks(samplings, line):
    spec, needs = Vllm(url="http://127.0.0.1:1", sampling_mask=True), replace(NEEDS, samplings=samplings)
    with pytest.raises(FieldError, match=f"sampling_mask=True is refused by vLLM {line}"):
        spec.check(needs)
    with pytest.raises(FieldError, match="can't be reached"):  # the rest is asked of the server
        spec.check(replace(needs, samplings=samplings[:1], training=samplings[0]))


def test_incomplete_weights_are_refused_where_no_new_ones_come():
    servers = fakes(1)
    servers[0].label = "incomplete run-3"
    assert notes(servers) == []
    with pytest.raises(FieldError, match="has incomplete weights: their last update was interrupted; start the server"):
        notes(servers, replace(NEEDS, publishes=False))


def test_different_weights_are_refused_where_no_new_ones_come():
    servers = fakes(2)
    servers[1].label = "other"
    assert notes(servers) == []
    with pytest.raises(FieldError, match="have different weights, 'other' and 'start'"):
        notes(servers, replace(NEEDS, publishes=False))


def test_a_server_that_is_away_is_a_warning_and_all_of_them_an_error():
    servers = fakes(2)
    servers[0].die()
    (line,) = notes(servers)
    assert line == f"{servers[0].url} is out of service: can't be reached; the run begins without it"
    servers[1].die()
    with pytest.raises(FieldError, match="' can't be reached; start the server"):
        notes(servers)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"url": "ftp://127.0.0.1"}, "must be http://HOST:PORT"),
        ({"url": "http://127.0.0.1:99999"}, "the port in 1..65535"),
        ({"url": "http://127.0.0.1:0"}, "must be http://HOST:PORT, the port in 1..65535"),
        ({"url": "http://127.0.0.1:8001", "serve": Serve()}, "is not used where `serve` starts the servers; leave one"),
        ({"url": ("http://127.0.0.1:1", "")}, "must name a server; give its address"),
        ({"url": "http://example.com:8000"}, "is on another machine"),
        ({"url": ("http://127.0.0.1:1", "http://127.0.0.1:1/")}, "must name each server once"),
        ({"idle_seconds": 0}, "must be > 0 seconds"),
        ({"retries": -1}, "must be >= 0"),
        ({"probe_bound": 0.0}, "must be > 0 nats"),
    ],
)
def test_settings_are_checked(settings, line):
    with pytest.raises(FieldError, match=line):
        Plain(**settings)
