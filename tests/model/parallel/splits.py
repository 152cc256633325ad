"""What every rank does in `test_tensor`: passes and updates with matrices split over ranks, against one process."""

from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from proxima.model import PackedModel, save
from proxima.model.distribution_figures import log_sum_square, top_k_log_prob
from proxima.model.kept_tokens import KeptTokens
from proxima.model.log_prob import token_log_prob
from proxima.model.parallel import tensor
from proxima.model.parallel.mesh import meshes_of
from proxima.model.parallel.sharding import Sharding
from proxima.model.parallel.tensor import split_tensors
from proxima.model.parallel.vocabulary import VocabularyPart
from proxima.train.teacher_stage import top_tokens
from tests.model.families import DENSE, drawn
from tests.model.parallel.passes import both_of, compare, resharded
from tests.model.rows import MIXED, rows
from tests.tiny import VOCABULARY, tiny_tokenizer

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
        model = drawn(kind, config)
        with torch.no_grad():
            model.get_input_embeddings().weight[70] = 0.1  # of the padding token, zeros
        save(model, tiny_tokenizer(), folder / name)


def same_head(rank: int, folder: Path) -> None:
    """Every function of `log_prob` over a head of which each rank has some rows."""
    mesh = meshes_of(Sharding(tensor_parallel=dist.get_world_size()), torch.device("cpu")).tensor
    draw = torch.Generator().manual_seed(5)
    count, width, k = 23, 8, 3
    hidden, weight, bias = (
        torch.randn(n, generator=draw) for n in ((count, width), (VOCABULARY, width), (VOCABULARY,))
    )
    target, others = (torch.randint(0, VOCABULARY, n, generator=draw) for n in ((count,), (count, k)))
    target[:4] = torch.tensor([0, VOCABULARY - 1, 129, 130])
    temperature = 0.5 + torch.rand(count, generator=draw)
    kept = kept_sets(target, draw)
    both = {"entropy_gradient": True, "others": others}, {"others": others, "others_gradient": True}
    kinds = product((None, *kept), ({}, {"entropy": True}, *both)), product((None, kept[1]), both)
    sizes = product((None, VOCABULARY - 30, 20, 5), (5, 512)), ((None, 5), (20, 512))
    for dtype, atol, kind, size in zip((torch.float32, torch.bfloat16), (3e-6, 2e-2), kinds, sizes, strict=True):
        given = [hidden.to(dtype), weight.to(dtype), bias.to(dtype)]
        for sets, how in kind:
            results = [head_results(given, part, target, temperature, sets, how, 5) for part in (None, mesh)]
            for ours, theirs in zip(*reversed(results), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=max(atol, 1e-5), atol=atol)
        for vocabulary, bound in size:
            own, part = own_rows(mesh, given[1:])
            settings = {"vocabulary": vocabulary, "chunk": bound}
            expected = top_k_log_prob(given[0], given[1], target, temperature, 5, bias=given[2], **settings)
            got = top_k_log_prob(given[0], own[0], target, temperature, 5, bias=own[1], part=part, **settings)
            torch.testing.assert_close(got.top, expected.top, rtol=1e-5, atol=3e-6)
            torch.testing.assert_close(got.log_prob, expected.log_prob, rtol=1e-5, atol=3e-6)
            assert dtype == torch.bfloat16 or torch.equal(got.ids, expected.ids)  # which rounds some to the same value


def kept_sets(target: torch.Tensor, draw: torch.Generator) -> list[KeptTokens]:
    """Sets for each position, and for some of them; small ones are of one rank's tokens."""
    sets = [torch.randperm(VOCABULARY, generator=draw)[: 1 + 7 * (i % 4)] for i in range(len(target))]
    sets = [torch.unique(torch.cat([ids, token[None]])) for ids, token in zip(sets, target, strict=True)]
    some = [ids if i % 3 else ids[:0] for i, ids in enumerate(sets)]
    edges = [torch.tensor([0, *accumulate(map(len, each))]) for each in (sets, some)]
    return [KeptTokens(torch.cat(each), cu) for each, cu in zip((sets, some), edges, strict=True)]


def own_rows(mesh, whole: list[torch.Tensor]):
    """This rank's rows of weight and bias, with gradient, and which these are."""
    split = [distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for tensor in whole]
    return [tensor.to_local().detach().requires_grad_() for tensor in split], VocabularyPart.of(split[0])


def head_results(given, mesh, target, temperature, kept, how, chunk: int) -> list[torch.Tensor]:
    """Outputs, and the gradients of hidden states, weight and bias; those of a part put together."""
    hidden = given[0].clone().requires_grad_()
    own, part = ([x.clone().requires_grad_() for x in given[1:]], None) if mesh is None else own_rows(mesh, given[1:])
    outputs = token_log_prob(hidden, own[0], target, temperature, bias=own[1], kept=kept, part=part, chunk=chunk, **how)
    sums = log_sum_square(hidden, own[0], temperature, bias=own[1], kept=kept, part=part, chunk=chunk)
    every = [tensor for tensor in outputs if tensor is not None]
    total = [(tensor * torch.sin(torch.arange(tensor.numel())).view_as(tensor)).sum() for tensor in every]
    sum(t for t, tensor in zip(total, every, strict=True) if tensor.requires_grad).backward()
    slices = [x.grad for x in own]
    if mesh is not None:
        place = {"run_check": False}
        slices = [
            DTensor.from_local(x, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride(), **place).full_tensor()
            for x, whole in zip(slices, given[1:], strict=True)
        ]
    return [*(tensor.detach() for tensor in every), sums, hidden.grad, *slices]


def whole_biases(rank: int, folder: Path) -> None:
    """As if FSDP could not split the parts of biases evenly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, "split_tensors", lambda model, mesh, _: split_tensors(model, mesh, 64))
        compare(*both_of(folder / "qwen2", {"tensor_parallel": 2}), updates=1, tolerance=TENSOR)


def same_tokens(plain: PackedModel, many: PackedModel) -> None:
    """Without gradient, and again after a weight has changed."""
    batch = plain.pack(rows(*MIXED))
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(many(batch).log_prob, plain(batch).log_prob, rtol=1e-4, atol=1e-4)
            ours, theirs = (top_tokens(model, batch, 3, 200) for model in (many, plain))
            torch.testing.assert_close(ours.top, theirs.top, rtol=1e-4, atol=1e-4)
            for model in (plain, many):
                next(p for _, p in model.named_parameters()).mul_(1.5)
            resharded(many)
