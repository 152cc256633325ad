"""The processes of a run, as a user types them."""

import importlib.util

import pytest

from proxima.config import ConfigError, check, dump, load_recipe, resolve
from proxima.config.comparable import Purpose, differences, flat_values
from proxima.config.families import OFFLINE
from proxima.config.sections import PLACEMENTS, SHARDINGS
from proxima.config.sections.placement_section import LocalPlacement
from proxima.config.sections.ranks_section import FullSharding, RayPlacement, ReplicatedModel, TorchrunPlacement
from proxima.data import FieldError

ROWS = {"model": {"path": "org/model"}, "task": "arithmetic"}


@pytest.mark.parametrize(
    ("overrides", "placement"),
    [
        ([], LocalPlacement()),
        (["placement=local"], LocalPlacement()),
        (["placement=torchrun"], TorchrunPlacement()),
        (["placement=torchrun", "placement.timeout=60"], TorchrunPlacement(timeout=60.0)),
        (["placement=ray"], RayPlacement()),
        (["placement={kind: ray, ranks: 2}"], RayPlacement(ranks=2)),
        (
            ["placement=ray", "placement.ranks=4", "placement.env={A: '1'}", "placement.sharding=replicate"],
            RayPlacement(ranks=4, env={"A": "1"}, sharding=ReplicatedModel()),
        ),
        (
            ["placement={kind: ray, sharding: {offload: true, param_dtype: bfloat16}}"],
            RayPlacement(sharding=FullSharding(offload=True, param_dtype="bfloat16")),
        ),
    ],
)
def test_every_spelling(recipe, overrides, placement):
    resolved = resolve(recipe(), overrides)
    assert resolved.config.placement == placement
    assert resolve(recipe(dump(resolved), "again.yaml")).config.placement == placement


@pytest.mark.parametrize("family", OFFLINE, ids=lambda family: family.command)
def test_runs_on_fixed_data_have_it_too(family):
    config = resolve(
        ROWS | {family.own: {"loss": ["sigmoid"]} if family.command == "dpo" else {}},
        ["placement={kind: ray, ranks: 3}"],
        root=family.root,
    ).config
    assert config.placement == RayPlacement(ranks=3)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("placement=rai", "placement.kind=rai (command line): no placement 'rai'; did you mean 'ray'?"),
        ("placement.ranks=2", "'local' has no field 'ranks'; placement.kind=ray has it"),
        (
            "placement.tensor_parallel=2",
            "placement.tensor_parallel=2 (command line): 'local' has no field 'tensor_parallel'; "
            "placement.kind=ray or torchrun has it",
        ),
        ("placement={kind: torchrun, ranks: 2}", "'torchrun' has no field 'ranks'"),
        ("placement={kind: ray, ranks: 0}", "placement.ranks=0 (command line): must be >= 1"),
        ("placement={kind: ray, gpus_per_rank: 2}", "placement.gpus_per_rank=2 (command line): must be 0 or 1: a rank"),
        ("placement={kind: ray, cpus_per_rank: 0}", "placement.cpus_per_rank=0 (command line): must be finite and > 0"),
        ("placement={kind: ray, restarts: -1}", "placement.restarts=-1 (command line): must be >= 0; 0 ends the run"),
        (
            "placement={kind: ray, start_timeout: 0}",
            "placement.start_timeout=0 (command line): must be finite and >= 1",
        ),
        ("placement={kind: ray, strategy: pack}", "must be one of PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
        ("placement={kind: ray, env: {RANK: '1'}}", "placement.env.RANK=1 (command line): is set for each rank"),
        ("placement={kind: ray, env: {HF_TOKEN: abc}}", "placement.env.HF_TOKEN=… (command line): looks like a secret"),
        (
            "placement={kind: torchrun, timeout: 0}",
            "placement.timeout=0 (command line): must be finite and >= 1 second",
        ),
        (
            "placement={kind: ray, colocate: true}",
            "placement.colocate=true (command line): needs servers, and engines is 0; set placement.engines",
        ),
        (
            "placement={kind: ray, ranks: 3, engines: 2, colocate: true}",
            "placement.engines=2 (command line): must divide ranks=3 with colocate",
        ),
        (
            "placement={kind: ray, ranks: 4, engines: 2, gpus_per_engine: 4, colocate: true}",
            "placement.gpus_per_engine=4 (command line): is not read with colocate: a server has the 2 of its ranks",
        ),
        ("placement={kind: torchrun, timeout: 5}", "placement.heartbeat=10 (default): must be below timeout=5"),
        (
            "placement={kind: torchrun, sharding: {kind: replicate, offload: true}}",
            "placement.sharding.offload=true (command line): 'replicate' has no field 'offload'",
        ),
    ],
)
def test_refusals(recipe, override, line):
    with pytest.raises(ConfigError) as caught:
        resolve(recipe(), [override])
    assert line in str(caught.value) and len(caught.value.problems) == 1


def test_tokens_are_split_where_they_are_packed(recipe):
    split = "placement={kind: torchrun, context_parallel: 2}"
    (problem,) = check(resolve(recipe(), [split, "model.attention=padded"]))
    text = "placement.context_parallel=2 (command line): splits packed tokens, and model.attention=padded does not keep"
    assert str(problem).startswith(text) and str(problem).endswith("set it to 1, or model.attention to auto")
    assert (
        check(resolve(recipe(), [split]))
        == check(resolve(recipe(), ["placement=torchrun", "model.attention=mask"]))
        == []
    )


def test_gathered_weights_are_as_precise_as_the_products(recipe):
    rounded = ["placement={kind: torchrun, sharding: {param_dtype: bfloat16}}", "model.compute_dtype=float32"]
    (problem,) = check(resolve(recipe(), rounded))
    assert str(problem).startswith("placement.sharding.param_dtype=bfloat16 (command line): rounds the weights that")
    assert check(resolve(recipe(), [rounded[0], "model.compute_dtype=bfloat16"])) == []
    assert check(resolve(recipe(), ["placement=torchrun", rounded[1]])) == []


def test_ray_is_not_installed(recipe, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    problems = check(resolve(recipe(), ["placement=ray"]))
    line = "placement.kind=ray (command line): needs the package ray: pip install 'proxima-rl[ray]'"
    assert [str(problem) for problem in problems] == [line]
    assert load_recipe(recipe()).config.placement == LocalPlacement()


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "runtime.max_concurrent_rollouts=8",
            "placement.colocate=true (command line): lets servers and ranks take turns, and "
            "runtime.max_concurrent_rollouts has both compute at once; set that to null, or colocate to false",
        ),
        ("algorithm.proximal=next", "placement.colocate=true (command line): puts the servers to sleep during updates"),
    ],
)
def test_servers_that_sleep_are_asked_nothing(recipe, override, line):
    colocated = ["placement={kind: ray, engines: 1, colocate: true}", "engine=vllm"]
    assert not [problem for problem in check(resolve(recipe(), colocated)) if problem.path == "placement.colocate"]
    problems = [str(problem) for problem in check(resolve(recipe(), [*colocated, override]))]
    assert [text.startswith(line) for text in problems if text.startswith("placement")] == [True], problems


def test_a_run_may_be_resumed_in_other_processes(recipe):
    texts = ["placement=local", "placement=torchrun", "placement={kind: ray, ranks: 2, sharding: hybrid}"]
    first, *others = (flat_values(resolve(recipe(), [text]).config) for text in texts)
    assert [list(differences(first, other, Purpose.RESUME)) for other in others] == [[], []]
    stored = {name: value for name, value in first.items() if not name.startswith("placement")}  # before there was one
    assert list(differences(stored, first, Purpose.RESUME)) == list(differences(stored, first, Purpose.RERUN)) == []


def test_every_way_to_share_a_model_says_the_same_things():
    for kind, spec_class in SHARDINGS.items():
        spec = spec_class()
        assert (spec.kind, spec.param_dtype, spec.offload) == (kind, None, False)
        assert spec.sum_gradients == ("update" if kind == "replicate" else "micro_batch")
        assert spec.reshard_after_forward == (kind != "replicate")
    assert set(PLACEMENTS) == {"local", "torchrun", "ray"}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tensor_parallel": 3}, "tensor_parallel=3 must be a divisor of the 8 ranks; set it to 4"),
        ({"tensor_parallel": 4, "context_parallel": 4}, "context_parallel=4 must be a divisor of the 8 ranks over"),
        ({"expert_parallel": 16}, "expert_parallel=16 must be a divisor of the 8 ranks; set it to 8"),
        ({"expert_parallel": 2, "sharding": ReplicatedModel()}, "expert_parallel=2 splits experts, and sharding is"),
        ({"context_parallel": 0}, "context_parallel=0 must be >= 1"),
    ],
)
def test_groups_that_ranks_can_not_form(fields, message):
    with pytest.raises(FieldError) as error:
        RayPlacement(ranks=8, **fields)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("variables", "words", "line"),
    [
        (
            {"WORLD_SIZE": "6"},
            ["tensor_parallel=4"],
            "tensor_parallel=4 (command line): must be a divisor of the 6 ranks",
        ),
        (
            {"WORLD_SIZE": "1"},
            ["context_parallel=2"],
            "context_parallel=2 (command line): must be a divisor of the 1 rank;",
        ),
        (
            {"WORLD_SIZE": "6"},
            ["tensor_parallel=3"],
            "tensor_parallel=3 (command line): must divide the 4 attention heads",
        ),
        (
            {"WORLD_SIZE": "6"},
            ["tensor_parallel=3", "sharding=replicate"],
            "tensor_parallel=3 (command line): must divide",
        ),
        (
            {},
            ["tensor_parallel=8"],
            "tensor_parallel=8 (command line): must divide the 4 attention heads of model.path; se",
        ),
        (
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"},
            ["tensor_parallel=4", "sharding=hybrid"],
            "tensor_parallel=4 (command line): must be a divisor of the 2 ranks of a node; set it to 2",
        ),
        (
            {"WORLD_SIZE": "6"},
            ["tensor_parallel=2", "context_parallel=3", "sharding=replicate"],
            "context_parallel=3 (command line): must be at",
        ),
        ({"WORLD_SIZE": "4"}, ["tensor_parallel=2", "context_parallel=2"], None),
        ({}, ["tensor_parallel=2"], None),
    ],
)
def test_what_is_known_of_ranks_and_model_is_checked(recipe, tiny_model, monkeypatch, variables, words, line):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model = [f"model.path={tiny_model('llama')}", "sampling.max_tokens=8"]
    given = [*model, "placement.kind=torchrun", *(f"placement.{word}" for word in words)]
    problems = [str(problem) for problem in check(resolve(recipe(), given))]
    assert len(problems) == (line is not None)
    assert all(problem.startswith(f"placement.{line}") for problem in problems)
