"""What ranks that split matrices do beside `passes.compare`, against one process, and their models."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from proxima.model.load import save
from proxima.model.log_prob import log_sum_square, token_log_prob, top_k_log_prob
from proxima.model.parallel import shard
from proxima.model.parallel.mesh import meshes_of
from proxima.model.parallel.sharding import Sharding
from proxima.model.parallel.tensor import VocabularyPart, split_tensors
from tests.model.families import DENSE
from tests.model.parallel.passes import both_of, compare
from tests.model.test_log_prob import Head, V
from tests.tiny import drawn, tiny_tokenizer

TENSOR = 1e-4  # of gradients: sums of parts round otherwise
SMALL: dict[str, Any] = DENSE | {"pad_token_id": 70, "num_attention_heads": 8, "num_key_value_heads": 4}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig(**SMALL, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    ),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)),
    "experts": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16)),
    "sparse": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**SMALL, **EXPERTS | {"decoder_sparse_step": 1}, head_dim=16)),
    # 3 query heads a tensor rank, which read one key head, over 2 ranks
    "heads": (
        hf.Qwen3ForCausalLM,
        hf.Qwen3Config(**SMALL | {"num_attention_heads": 6, "num_key_value_heads": 2}, head_dim=16),
    ),
    "windows": (hf.MistralForCausalLM, hf.MistralConfig(**SMALL, sliding_window=6, tie_word_embeddings=True)),
}


def write_models(folder: Path) -> None:
    """Folders of the models, with norms and biases drawn too."""
    for name, (kind, config) in MODELS.items():
        model = drawn(kind, deepcopy(config), 3)
        with torch.no_grad():
            model.get_input_embeddings().weight[70] = 0.1  # of the padding token, zeros
        save(model, tiny_tokenizer(), folder / name)


def same_head(rank: int, folder: Path) -> None:
    """Every function of `log_prob` over a head of which each rank has some rows."""
    mesh = meshes_of(Sharding(tensor_parallel=dist.get_world_size()), torch.device("cpu")).tensor
    for dtype, atol in ((torch.float64, 1e-10), (torch.bfloat16, 2e-2)):
        close = partial(torch.testing.assert_close, rtol=atol, atol=atol)
        heads = [Head.drawn(dtype, count=23, **sets) for sets in SETS]
        others = torch.randint(0, V, (23, 3), generator=torch.Generator().manual_seed(5))
        for head, how in product(heads, HOW):
            given = how if how.keys() <= {"entropy"} else how | {"others": others}
            close(head_results(head, mesh, given), head_results(head, None, given))
        head = heads[0]
        own, part = own_rows(mesh, head.leaves[1:])
        for vocabulary, chunk in ((None, 5), (None, 512), (15, 5), (11, 512), (5, 5)):
            settings = {"vocabulary": vocabulary, "chunk": chunk}
            expected, got = (
                top_k_log_prob(head.hidden, weight, head.target, head.temperature, 5, bias=bias, **settings, **where)
                for (weight, bias), where in ((head.leaves[1:], {}), (own, {"part": part}))
            )
            torch.testing.assert_close(
                (got.top, got.log_prob), (expected.top, expected.log_prob), rtol=min(atol, 1e-5), atol=min(atol, 6e-6)
            )
            assert dtype == torch.bfloat16 or torch.equal(got.ids, expected.ids)  # which rounds some to the same value


#: each position's set, none, and some positions without one
SETS: tuple[dict[str, Any], ...] = ({}, {"with_sets": True}, {"with_sets": True, "empty": range(0, 23, 3)})
HOW: tuple[dict[str, bool], ...] = ({}, {"entropy": True}, {"entropy_gradient": True}, {"others_gradient": True})


def own_rows(mesh, whole: list[torch.Tensor]):
    """This rank's rows of weight and bias, with gradient, and which these are."""
    split = [distribute_tensor(tensor.detach(), mesh, [Shard(0)], src_data_rank=None) for tensor in whole]
    return [tensor.to_local().detach().requires_grad_() for tensor in split], VocabularyPart.of(split[0])


def head_results(head: Head, mesh, how: dict[str, Any]) -> list[torch.Tensor]:
    """Outputs, and the gradients of hidden states, weight and bias; those of a part put together."""
    given = head.leaves[1:]
    own, part = (given, None) if mesh is None else own_rows(mesh, given)
    head = replace(head, weight=own[0], bias=own[1])
    where = {"mask": head.sets(), "part": part, "chunk": 5}
    outputs = token_log_prob(head.hidden, head.weight, head.target, head.temperature, bias=head.bias, **where, **how)
    sums = log_sum_square(head.hidden, head.weight, head.temperature, bias=head.bias, **where)
    every = [tensor for tensor in outputs if tensor is not None]
    total = [(x * torch.sin(torch.arange(x.numel())).view_as(x)).sum() for x in every if x.requires_grad]
    of_hidden, *slices = torch.autograd.grad(sum(total), head.leaves)
    if mesh is not None:
        slices = [
            DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=w.shape, stride=w.stride()).full_tensor()
            for x, w in zip(slices, given, strict=True)
        ]
    return [*(tensor.detach() for tensor in every), sums, of_hidden, *slices]


def whole_biases(rank: int, folder: Path) -> None:
    """As if FSDP could not split the parts of biases evenly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "split_tensors", lambda model, mesh, _: split_tensors(model, mesh, 64))
        compare(*both_of(folder / "qwen2", {"tensor_parallel": 2}), tolerance=TENSOR)
