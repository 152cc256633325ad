"""The experts of each token in the answers of servers: read, checked, and joined over attempts."""

import base64
import io

import numpy as np
import pytest
import torch
import transformers as hf

from proxima.engine.http.answer_values import RouteShape, joined_routes
from proxima.model.moe import FAMILIES
from tests.engine.http.fake_vllm import experts_of

SHAPE = RouteShape(layers=3, mixtures=(0, 2), experts=8, per_token=2)
ROWS = experts_of([5, 6, 77])


def npy(rows):
    with io.BytesIO() as file:
        np.save(file, rows)
        return base64.b64encode(file.getvalue()).decode()


def flat(rows):
    return base64.b64encode(np.asarray(rows, "<i4").tobytes()).decode()


@pytest.mark.parametrize("read", [lambda: SHAPE.read_npy(npy(ROWS)), lambda: SHAPE.read_int32(flat(ROWS))])
def test_both_forms_give_the_mixtures(read):
    assert np.array_equal(read(), ROWS[:, [0, 2]]) and read().dtype == np.int8


def test_many_experts_take_two_bytes():
    wide = RouteShape(layers=1, mixtures=(0,), experts=300, per_token=2)
    rows = np.array([[[299, 4]]], np.uint16)
    assert wide.read_npy(npy(rows)).tolist() == wide.read_int32(flat(rows)).tolist() == rows.tolist()
    assert wide.read_npy(npy(rows)).dtype == wide.absent(2).dtype == np.int16


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (npy(ROWS[:, :2]), r"shape \[3, 2, 2\], and the model has 2 in each of 3 layers"),
        (npy(ROWS)[:-8], "15 routed experts|routed experts of shape"),
        (npy(ROWS.astype(np.float32)), "routed experts are float32"),
        (npy(np.asfortranarray(ROWS)), "routed experts are uint8"),
        (npy(np.where(ROWS == 6, 8, ROWS)), "0 to 8, and the model has 8|to 8, and the model has 8"),
        (npy(np.zeros_like(ROWS)), "name an expert twice"),
        (npy(np.array([ROWS], dtype=object)), "routed experts are object"),
        ("%%%", "not base64"),
        ("AAAA", "magic string"),
        (None, "not text"),
    ],
)
def test_what_is_no_answer_is_a_value_error(text, reason):
    with pytest.raises(ValueError, match=reason):
        SHAPE.read_npy(text)


def test_a_header_that_claims_terabytes_costs_nothing():
    with io.BytesIO() as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (1 << 40, 3, 2)})
        text = base64.b64encode(file.getvalue() + ROWS.tobytes()).decode()
    with pytest.raises(ValueError, match="18 routed experts of shape"):
        SHAPE.read_npy(text)


@pytest.mark.parametrize("text", ["AAA=", flat(range(7))])
def test_32_bit_integers_that_fill_no_row(text):
    with pytest.raises(ValueError, match="multiple of element size|7 routed experts of shape"):
        SHAPE.read_int32(text)


def test_attempts_are_joined_and_gaps_are_marked():
    fed = np.arange(100, 110)  # a prompt of 4 tokens, and 7 more in three attempts, the second without routes
    ids = experts_of(fed.tolist())[:, [0, 2]].astype(np.int8)
    all_, none = np.full(2, True), np.full(3, False)
    routes, of_prompt = joined_routes(SHAPE, 4, [(ids[:5], all_), (None, none | True), (ids + 1, all_)])
    assert np.array_equal(of_prompt, ids[:4])
    expected = np.concatenate([ids[3:5], SHAPE.absent(3), ids[8:10] + 1])
    assert np.array_equal(routes, expected)
    routes, of_prompt = joined_routes(SHAPE, 4, [(None, all_), (ids, np.array([False, True, True]))])
    assert np.array_equal(of_prompt, ids[:4])
    assert np.array_equal(routes, np.concatenate([SHAPE.absent(3), ids[6:8]]))
    routes, of_prompt = joined_routes(
        SHAPE, 4, [(ids[:3], all_[:0]), (ids[:5], all_)]
    )  # aborted before its first token
    assert np.array_equal(of_prompt, ids[:4])
    assert np.array_equal(routes, ids[3:5])
    routes, of_prompt = joined_routes(SHAPE, 4, [(ids[:3], all_[:0])])
    assert np.array_equal(of_prompt, SHAPE.absent(4)) and not len(routes)
    routes, of_prompt = joined_routes(SHAPE, 4, [(None, none)])
    assert np.array_equal(of_prompt, SHAPE.absent(4)) and len(routes) == 3


COMMON = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 6, "num_attention_heads": 2, "vocab_size": 9}
COMMON |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "num_experts": 4, "pad_token_id": 0}
SPARSE = COMMON | {"moe_intermediate_size": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}


@pytest.mark.parametrize(
    ("config", "mixtures"),
    [
        (hf.Qwen3MoeConfig(**SPARSE), (1, 5)),
        (hf.Qwen2MoeConfig(**SPARSE, shared_expert_intermediate_size=8), (1, 5)),
        (hf.MixtralConfig(**COMMON), tuple(range(6))),
        (hf.OlmoeConfig(**COMMON), tuple(range(6))),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_the_shape_is_that_of_the_models_routers(config, mixtures):
    shape = RouteShape.of(config)
    with torch.device("meta"):
        layers = hf.AutoModelForCausalLM.from_config(config).model.layers
    assert shape.mixtures == mixtures == tuple(i for i, layer in enumerate(layers) if hasattr(layer.mlp, "gate"))
    assert (shape.layers, shape.experts, shape.per_token) == (6, len(layers[5].mlp.gate.weight), 2)
    assert config.model_type in FAMILIES
