"""The commands that only show something: explain, list, doctor, schema."""

import json
import re
from pathlib import Path

import pytest

from proxima.config.describe import kinds_of
from proxima.config.json_schema import catalogue
from proxima.config.presets import ALGORITHMS
from proxima.core.surrogate import SURROGATES
from proxima.data.kinds import Slot
from proxima.engine.protocol import Sampling
from proxima.system.user_files import shipped_layouts, shipped_recipes


@pytest.fixture(scope="module")
def slots():
    """What `proxima list --json` prints."""
    return catalogue()


@pytest.mark.slow
def test_explain(done, proxima, recipe):
    code, out, err = proxima("explain", recipe(), "algorithm.surrogate.delta=0.2")
    assert (code, err) == (0, "")
    value = "algorithm.surrogate.delta 0.2 command line, over 0.15 of the preset"
    assert value in " ".join(out.split()) and "algorithm.surrogate.kind cppo preset cppo, chosen in tiny.yaml:4" in (
        " ".join(out.split())
    )
    assert "\nseed " not in out and re.search(r"\n\d+ more values have their defaults; --all .*\n$", out)
    everything = done("explain", recipe(), "algorithm.surrogate.delta=0.2", "--all")
    assert "\nseed " in everything
    assert f"{value} threshold of one token, a probability, > 0" in " ".join(everything.split())
    assert "2 prompts × 2 completions = 4 sequences → ≤ 1 micro-batch of ≤ 4,096 tokens → 1 update" in out
    assert "\nplan     proxima plan tiny.yaml: memory, time, and what binds\n" in out and "GiB" not in out


@pytest.mark.slow
def test_explain_needs_no_data(done, proxima, refusal, recipe):
    """What is still to be made is a warning of explain, and a refusal of train."""
    said = "task.path=data/gsm8k (command line): no such folder; make it: proxima data prepare gsm8k"
    words = (recipe(), "task={kind: prepared, path: data/gsm8k}")
    code, out, err = proxima("explain", *words)
    assert (code, err) == (0, "") and f"\nwarning  {said}" in out
    out = done("explain", *words, "--json")
    assert json.loads(out)["warnings"] == [said]
    assert proxima("explain", *words, "--yaml")[::2] == (0, f"WARNING {said}\n")
    assert said in refusal("train", *words)
    code, out, err = proxima("explain", *words, "sampling.temperature=0")
    assert code == 2 and "sampling.temperature=0" in err and "data prepare" not in err and said in out


@pytest.mark.slow
def test_explain_json(proxima, recipe):
    code, out, _ = proxima("explain", recipe(), "--json")
    output = json.loads(out)
    assert code == 0
    assert output["batch"]["sequences"] == 4
    assert {"path": "train.steps", "value": 2, "source": "tiny.yaml:7"}.items() <= {
        k: v for e in output["values"] if e["path"] == "train.steps" for k, v in e.items()
    }.items()


def test_list_names_every_kind_on_one_screen(done, slots):
    lines = done("list").splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 100
    found = dict[str, list[str]]()
    for line in lines[:-2]:
        if not line.startswith(" "):
            name, _, line = line.partition(" ")
            found[name] = []
        found[name] += filter(None, re.split(r"[ ,]+", line))
    assert found == {slot: [*facts["kinds"]] for slot, facts in slots.items()}


def test_the_fields_of_a_section_of_a_kind_are_listed(slots):
    """`engine.serve` is at no other place of a recipe; the fields of `sampling` are, and are not listed twice."""
    served = slots["engine"]["kinds"]["sglang"]["fields"]
    assert served["serve"]["default"] is None and served["serve.replicas"]["default"] == 1
    assert all(fact["help"] for fact in served.values())
    critic = slots["critic"]["kinds"]["head"]["fields"]
    assert "loss" not in critic and critic["loss.epsilon"]["default"] == 0.2
    assert not any("." in name for name in slots["sets"]["kinds"]["set"]["fields"])


def test_list_shows_every_kind_of_every_slot(done):
    out = done("list", "--all")
    for kind in [
        *SURROGATES,
        *ALGORITHMS,
        *kinds_of(Slot("proxima.reward:REWARDS")),
        *kinds_of(Slot("proxima.task:TASKS")),
    ]:
        assert f"\n  {kind} " in out
    assert "delta=0.15, w_min=0.8, delta_b=0.02" in " ".join(out.split())


@pytest.mark.parametrize(
    ("other", "slot"), [("engines", "engine"), ("surrogates", "surrogate"), ("presets", "algorithm")]
)
def test_list_takes_the_plural_of_a_slot(done, proxima, other, slot):
    out = done("list", other)
    assert out == proxima("list", slot)[1]


def test_list_of_a_kind_shows_it_in_each_slot_that_has_it(done, proxima):
    found = json.loads(done("list", "cppo", "--json"))
    assert {slot: [*facts["kinds"]] for slot, facts in found.items()} == {"algorithm": ["cppo"], "surrogate": ["cppo"]}
    assert "threshold of one token" in done("list", "cppo")
    assert "critic" in proxima("list", "critic")[1]  # a slot comes before a kind


@pytest.mark.slow
def test_list_fits_a_hundred_columns(proxima, slots, monkeypatch):
    monkeypatch.setattr("proxima.config.json_schema.catalogue", lambda: slots)
    for words in [(), ("--all",), ("recipes",), *((slot,) for slot in slots)]:
        code, out, _ = proxima("list", *words)
        assert code == 0 and max(map(len, out.splitlines())) <= 100, words


def test_the_two_methods_called_cppo_are_told_apart(proxima):
    """Wherever both are listed."""
    from proxima.config.presets import NOTES

    root = Path(__file__).resolve().parents[2]
    pages = ("docs/reference.md", "docs/glossary.md", "docs/algorithms/README.md", "recipes/README.md")
    for text in (proxima("list", "algorithm")[1], *((root / page).read_text() for page in pages)):
        assert all(NOTES[name] in " ".join(text.split()) for name in ("cppo", "cppo_prune"))


def test_list_has_no_fragment(slots):
    """What a field means is said where it stands, not in the docstring of another class."""
    texts = [text for slot in slots.values() for kind in slot["kinds"].values() for text in words_of(kind)]
    assert len(texts) > 150 and "" not in texts
    assert [
        text for text in texts if re.match(r"(`\w+` )?as (for|above|in)\b", text) or re.search(r"\bas for `", text)
    ] == []


def words_of(kind):
    return [kind["summary"], *(field["help"] for field in kind["fields"].values())]


def test_list_of_recipes(proxima, here):
    code, out, err = proxima("list", "recipes")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert any(re.match(r"quickstart +A first run: SmolLM2-135M-Instruct learns to add", line) for line in lines)
    assert [line.split()[0] for line in lines if line[0] != " "] == [
        *shipped_recipes(),
        *(f"@{x}" for x in shipped_layouts()),
    ]
    assert json.loads(proxima("list", "recipes", "--json")[1])["cpu/grpo"].startswith("GRPO on two cores")


def test_list_json(done, slots):
    output = json.loads(done("list", "--json"))
    assert output == slots
    names = "task reward algorithm advantage surrogate aggregate correction critic divergence preference selection"
    names += " reference_kl penalty engine reference_engine loss optimizer sets monitor placement sharding"
    assert set(output) == set(names.split())
    assert output["task"]["paths"] == ["task", "eval.task"]
    assert output["surrogate"]["kinds"]["cppo"]["fields"]["delta"]["default"] == 0.15


@pytest.mark.slow
def test_doctor(done, proxima):
    code, out, _ = proxima("doctor", "--json")
    output = json.loads(out)
    assert code == 0
    assert output["packages"]["torch"].startswith("2.")
    assert output["threads"] >= 1
    assert output["gemm_gflops"]["float32"] > 0
    assert output["disk_free_bytes"] > 0
    assert output["kernels"].startswith(("compiled by ", "eager torch ("))
    out = done("doctor")
    heads = "proxima packages optional cores devices memory disk kernels gemm auto"
    assert " ".join(line.split()[0] for line in out.splitlines() if line[:1] != " ") == heads


@pytest.mark.slow
def test_doctor_says_what_auto_becomes(done, monkeypatch):
    monkeypatch.setattr("proxima.model.precision.speed_ratio", lambda: 0.25)
    (line,) = [line for line in done("doctor").splitlines() if line.startswith("auto ")]
    reason = "bfloat16 products are 0.25 × as fast on this processor"
    basis = "(the products of a layer, forward and backward, on one core; this decides, not gemm)"
    assert line == f"auto      float32 for every dtype that is auto: {reason} {basis}"


@pytest.mark.slow
def test_schema(done, proxima):
    text = done("list", "schema")
    assert json.loads(text)["title"] == "proxima recipe"


def test_generate_offers_every_field_of_sampling():
    import argparse
    from dataclasses import fields

    from proxima.cli.generate import complete_prompts
    from proxima.cli.parameters import add_parameters

    parser = argparse.ArgumentParser()
    add_parameters(parser, complete_prompts)
    offered = vars(parser.parse_args(["m", "p"]))
    assert {field.name for field in fields(Sampling)} <= set(offered)
