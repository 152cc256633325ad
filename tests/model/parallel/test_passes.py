"""Passes and updates of ranks that split weights, matrices, tokens or experts are those of one process."""

from functools import partial

import pytest

from proxima.model.adapters.lora import Lora
from tests.campaigns import campaign
from tests.model.parallel.context_passes import outputs, scores, short
from tests.model.parallel.expert_passes import few_chosen, gathers_ahead, same_loop
from tests.model.parallel.loads import NO_DORA, same_files
from tests.model.parallel.passes import LORA, Case, forward_only, holds_gradients, passes_of, rounded, without_adapter
from tests.model.parallel.ranks import run_ranks
from tests.model.parallel.splits import TENSOR, same_head, whole_biases

pytestmark = pytest.mark.slow

AGAIN = {"gradient_checkpointing": True}
COMPILED = {"compile": True}
VARLEN, FLASH3 = ({"attention": path} for path in ("varlen", "flash3"))
HYBRID = {"kind": "hybrid"}
REPLICATE = {"kind": "replicate"}
C2, C3, C4 = ({"context_parallel": size} for size in (2, 3, 4))
T2, T4 = ({"tensor_parallel": size} for size in (2, 4))
E2, E4 = ({"expert_parallel": size} for size in (2, 4))
ONE_IDLE, IN_PARTS, BOTH = {"busy": -1}, {"parts": 3}, {"parts": 2, "busy": -1}
SUM_LATER = {"sum_gradients": "update"}
NOT_DORA = Lora(rank=4, alpha=8, targets=("q_proj", "o_proj"))

CASES = [
    Case(model="llama", ranks=2, passes=(BOTH,), then=(forward_only, holds_gradients)),
    Case(model="llama", layout=HYBRID, trains="head", passes=(BOTH,), then=(forward_only, holds_gradients)),
    Case(
        model="qwen2", layout=REPLICATE | SUM_LATER, ranks=2, passes=(IN_PARTS,), then=(forward_only, holds_gradients)
    ),
    Case(model="qwen2", ranks=2, settings=AGAIN | {"lora": LORA}, passes=({"parts": 2},), then=(without_adapter,)),
    Case(model="llama", layout=C4, passes=(IN_PARTS,), then=(same_files,)),
    Case(model="gpt2", layout=C2, passes=(BOTH,), then=(forward_only,)),
    Case(model="qwen2", layout=C2, ranks=2, settings=AGAIN | FLASH3, passes=(IN_PARTS,), then=(outputs, short)),
    Case(model="llama", layout=C2, ranks=2, trains="scalar", then=(scores,)),
    Case(model="qwen3_moe", layout=E2, settings=AGAIN, passes=({}, {"parts": 2, "busy": 1}), then=(gathers_ahead,)),
]
BREADTH = [
    Case(model="qwen2", layout={"reshard_after_forward": False}, trains="head", settings=AGAIN, passes=(BOTH,)),
    Case(model="qwen3", layout=C4, settings=AGAIN, passes=(IN_PARTS,), then=(forward_only, outputs, short)),
    Case(model="windows", layout=C4, passes=(IN_PARTS,), then=(outputs,)),
    Case(model="qwen3", ranks=2, settings=COMPILED | AGAIN | {"lora": LORA}, passes=({"parts": 2},)),
    Case(model="windows", layout=C2, settings=COMPILED | VARLEN, passes=(IN_PARTS,), then=(forward_only,)),
    Case(model="qwen2", layout=HYBRID, trains="head", settings=COMPILED, passes=(BOTH,), then=(forward_only,)),
    Case(model="windows", layout=C4, settings=VARLEN, passes=(IN_PARTS,), then=(forward_only, outputs)),
    Case(model="qwen3_moe", layout=E4, passes=(BOTH,), then=(forward_only, few_chosen, same_loop)),
    Case(model="qwen3_moe", layout=E2, settings=COMPILED | AGAIN, passes=({"parts": 2, "busy": 1},)),
    Case(model="six", layout=E2, passes=({"parts": 2},)),
    Case(model="qwen2", layout={"offload": True}, trains="head", passes=(BOTH,), then=(forward_only,)),
    Case(model="llama", ranks=1, passes=(IN_PARTS,), then=(forward_only,)),
    Case(model="llama", layout=C2 | HYBRID, trains="head", settings=AGAIN, passes=(BOTH,)),
    # 4 query heads that read 2 key heads
    Case(model="qwen3", layout=C3, ranks=3, settings=AGAIN, passes=({"parts": 2},)),
    Case(model="qwen3_moe", layout=E2 | HYBRID, passes=(BOTH,)),
    Case(model="mixtral", layout=E2, trains="head", passes=(ONE_IDLE,)),
    Case(model="experts", passes=(BOTH,)),
    Case(model="qwen2", trains="scalar", passes=(ONE_IDLE,)),
    Case(model="qwen2", layout=SUM_LATER, passes=(IN_PARTS,), then=(holds_gradients,)),
    Case(model="qwen2", layout=HYBRID | SUM_LATER, passes=(IN_PARTS,), then=(holds_gradients,)),
    Case(model="qwen2", layout=REPLICATE, settings=AGAIN | {"lora": NO_DORA}, then=(without_adapter,)),
    Case(model="qwen2", layout=C4, settings={"share_prompt": False}, passes=(IN_PARTS,)),
    Case(model="experts", layout=C4, passes=(IN_PARTS,), then=(outputs,)),
    Case(model="qwen3", layout=C2 | REPLICATE, trains="head", settings=AGAIN, passes=(BOTH,), then=(forward_only,)),
    Case(model="qwen2", layout=C2 | HYBRID, settings=AGAIN | {"lora": LORA}, passes=({"parts": 2},)),
    Case(model="qwen3_moe", layout=E4 | {"offload": True}, passes=(BOTH,)),
    Case(model="qwen3_moe", layout=E2 | SUM_LATER, passes=(IN_PARTS,)),
    Case(model="qwen3_moe", layout=E2, settings=AGAIN | {"lora": NOT_DORA}, passes=({"parts": 2},)),
    Case(model="qwen3_moe", layout=E2, trains="scalar", passes=({"busy": 1},)),
]


def tensor(model: str, layout: dict, ranks: int = 4, trains: str = "policy", then=(), **how) -> Case:
    passes = ({"tolerance": TENSOR} | how.pop("passes", {}),)
    return Case(model=f"split/{model}", layout=layout, ranks=ranks, trains=trains, passes=passes, then=then, **how)


nearly = partial(forward_only, tolerance=TENSOR)
KEEPS = T2 | {"reshard_after_forward": False}
CASES += [tensor("qwen2", KEEPS, 2, trains="head", settings=AGAIN, then=(nearly,))]
BREADTH += [
    tensor("llama", T4, passes={"parts": 2}, first=(same_files,)),
    tensor("experts", KEEPS, 2, trains="head", first=(same_files,), then=(nearly,)),
    tensor("qwen2", T2 | HYBRID, trains="head", passes=BOTH, first=(same_files,)),
    tensor("qwen3", T2 | {"offload": True}, 2),
    tensor("llama", T2, 2, trains="scalar"),
    *(tensor(model, T4) for model in ("qwen2", "qwen3", "experts")),
    tensor("qwen2", T2 | REPLICATE | SUM_LATER, trains="head", passes=BOTH),
    tensor("qwen3", T2 | SUM_LATER, trains="head", passes=BOTH),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *campaign("tests/model/parallel/test_passes.py::test_passes_are_those_of_one_process", BREADTH, 1)],
    ids=str,
)
def test_passes_are_those_of_one_process(case, models):
    run_ranks(passes_of, case.ranks, models, case)


HALF = {"param_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("model", "size", "layout", "lora"),
    [
        ("qwen2", 2, HALF, NOT_DORA),
        ("qwen3_moe", 4, HALF | E2, None),
        ("split/qwen2", 2, T2 | HALF, None),
        *campaign(
            "tests/model/parallel/test_passes.py::test_bfloat16_is_that_of_one_process_but_for_rounding",
            [
                ("qwen2", 4, HALF, None),
                ("qwen3", 4, C4, None),
                ("split/experts", 2, T2, None),
                ("split/qwen2", 4, T2 | C2 | HALF, None),
                ("split/sparse", 4, T2 | C2 | HALF, None),
                ("split/sparse", 4, C2 | E2 | HALF, None),
            ],
        ),
    ],
)
def test_bfloat16_is_that_of_one_process_but_for_rounding(model, size, layout, lora, models):
    run_ranks(rounded, size, models, model, layout, lora)


@pytest.mark.parametrize(
    "size", [4, *campaign("tests/model/parallel/test_passes.py::test_the_head_of_a_vocabulary_that_is_split", [2])]
)
def test_the_head_of_a_vocabulary_that_is_split(size, models):
    run_ranks(same_head, size, models)


def test_biases_that_stay_whole(models):
    run_ranks(whole_biases, 2, models / "split")
