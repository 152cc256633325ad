"""What every rank does in `test_tensor`: passes and updates with matrices split over ranks, against one process."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from proxima.model import PackedModel, save
from proxima.model.distribution_figures import log_sum_square, top_k_log_prob
from proxima.model.kept_tokens import KeptTokens
from proxima.model.log_prob import token_log_prob
from proxima.model.model_source import ModelSource
from proxima.model.parallel import tensor
from proxima.model.parallel.mesh import meshes_of
from proxima.model.parallel.norm import clip_gradients, total_norm
from proxima.model.parallel.sharding import Sharding
from proxima.model.parallel.tensor import split_tensors
from proxima.model.parallel.vocabulary import VocabularyPart
from proxima.model.scalar_model import make_value_head
from proxima.train import AdamW, TrainStack
from proxima.train.checkpoint import checkpoints, write_checkpoint
from proxima.train.checkpoint_restore import restore
from proxima.train.sharded_checkpoint import ShardedWriter
from tests.model.parallel.loads import same_copy, same_weights
from tests.model.parallel.passes import backward, gradients, loss, policies, resharded, scalars, source
from tests.model.rows import MIXED, rows
from tests.tiny import VOCABULARY, tiny_tokenizer
from tests.train.saves import whole_state

NEEDS = frozenset({"entropy", "entropy_gradient", "log_sum_square"})
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 70,
    "initializer_range": 0.25,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 2}
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig(**SMALL, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    ),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)),
    "experts": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16)),
}


def write_models(folder: Path, models: Mapping[str, tuple[Any, Any]] = MODELS) -> None:
    """Folders of the models, with norms and biases drawn too."""
    for name, (kind, config) in models.items():
        torch.manual_seed(3)
        model = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
            model.get_input_embeddings().weight[70] = 0.1
        save(model.eval(), tiny_tokenizer(), folder / name)


def same_updates(name: str, plain: PackedModel, many: PackedModel, *, needs=NEEDS, updates=3, **how) -> None:
    sequences = rows(*MIXED, temperature=(0.7, 1.3))
    trained = [[p for _, p in model.named_parameters()] for model in (plain, many)]
    optimizers = [AdamW(lr=3e-3, eps=1e-4).build(parameters) for parameters in trained]
    for step in range(updates):
        expected = loss(plain, plain.pack(sequences), needs)
        expected.backward()
        got = backward(many, needs, **how)
        torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-6, msg=f"{name} {step} {got} {expected}")
        ours, theirs = gradients(many), gradients(plain)
        size = max(float(g.abs().max()) for g in theirs.values())
        for key, gradient in theirs.items():
            worst = float((ours[key] - gradient).abs().max()) / size
            assert worst < 1e-4, (name, step, key, worst)
        norm = total_norm(p.grad for p in trained[1])
        wanted = torch.nn.utils.get_total_norm(list(theirs.values()))
        torch.testing.assert_close(norm.float(), wanted, rtol=1e-5, atol=0, msg=f"{name} {step}: {norm} {wanted}")
        clip_gradients(trained[1], 1.0, norm)
        torch.nn.utils.clip_grads_with_norm_(trained[0], 1.0, wanted)
        resharded(many)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same_head(mesh) -> None:
    """Every function of `log_prob` over a head of which each rank has some rows."""
    draw = torch.Generator().manual_seed(5)
    count, size, k = 23, 8, 3
    hidden, weight, bias = (torch.randn(n, generator=draw) for n in ((count, size), (VOCABULARY, size), (VOCABULARY,)))
    target, others = (torch.randint(0, VOCABULARY, n, generator=draw) for n in ((count,), (count, k)))
    target[:4] = torch.tensor([0, VOCABULARY - 1, 129, 130])
    temperature = 0.5 + torch.rand(count, generator=draw)
    kept = kept_sets(target, draw)
    for dtype in (torch.float32, torch.bfloat16):
        for sets, how in product(
            (None, *kept),
            (
                {},
                {"entropy": True},
                {"entropy_gradient": True, "others": others},
                {"others": others, "others_gradient": True},
            ),
        ):
            for chunk in (5,):
                given = [hidden.to(dtype), weight.to(dtype), bias.to(dtype)]
                results = [head_results(given, part, target, temperature, sets, how, chunk) for part in (None, mesh)]
                for ours, theirs in zip(*reversed(results), strict=True):
                    tolerance = (
                        {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 3e-6}
                    )
                    torch.testing.assert_close(ours, theirs, **tolerance)
        for vocabulary, bound in product((None, VOCABULARY - 30, 20, 5), (5, 512)):
            given = [hidden.to(dtype), weight.to(dtype), bias.to(dtype)]
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


def on_two(rank: int, folder: Path) -> None:
    """TP 2, and what it is combined with."""
    split = Sharding(tensor_parallel=2)
    same_head(meshes_of(split, torch.device("cpu")).tensor)
    for name in MODELS:
        plain, many = policies(folder / name, split)
        same_weights(many.loaded, plain.loaded)
        same_updates(name, plain, many, parts=2)
    for name in ("qwen2", "experts"):
        kept = replace(split, reshard_after_forward=False)
        plain, many = policies(folder / name, kept, head=True, gradient_checkpointing=True)
        same_copy(many.loaded, plain.loaded)
        same_updates(f"value head on {name}", plain, many, needs=NEEDS | {"value"}, updates=1)
        same_tokens(plain, many)
        rounded(folder / name, replace(split, param_dtype="bfloat16"))
        rounded(folder / name, split)
    with pytest.MonkeyPatch.context() as patch:  # as if FSDP could not split the parts of biases evenly
        patch.setattr(tensor, "split_tensors", lambda model, mesh, _: split_tensors(model, mesh, 64))
        same_updates("whole biases", *policies(folder / "qwen2", split), updates=1)
    same_updates("offload", *policies(folder / "qwen3", replace(split, offload=True)), updates=1)
    same_updates("scalar", *scalars(folder / "llama", split), needs=frozenset({"value"}), updates=1)


def on_four(rank: int, folder: Path) -> None:
    """TP 4, FSDP 2 x TP 2, copies of it, and checkpoints that change places."""
    same_head(meshes_of(Sharding(tensor_parallel=4), torch.device("cpu")).tensor)
    for name in MODELS:
        same_updates(f"{name} over 4", *policies(folder / name, Sharding(tensor_parallel=4)), updates=2)
        plain, many = policies(folder / name, Sharding(tensor_parallel=2))
        same_weights(many.loaded, plain.loaded)
        same_updates(f"{name} over 2 x 2", plain, many, parts=3, updates=2)
    same_tokens(plain, many)
    for kind, nearby, when in (("hybrid", 2, "micro_batch"), ("replicate", None, "update"), ("full", None, "update")):
        sharding = Sharding(kind=kind, ranks_per_node=nearby, tensor_parallel=2, sum_gradients=when)
        both = policies(folder / "qwen2", sharding, head=True)
        same_updates(kind, *both, needs=NEEDS | {"value"}, parts=2, busy=1, updates=1)
    for name in ("qwen2", "experts"):
        checkpoints_move(rank, folder, name)


def same_tokens(plain: PackedModel, many: PackedModel) -> None:
    """Without gradient, and again after a weight has changed."""
    batch = plain.pack(rows(*MIXED))
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(many(batch).log_prob, plain(batch).log_prob, rtol=1e-4, atol=1e-4)
            ours, theirs = (model.top_tokens(batch, 3, 200) for model in (many, plain))
            torch.testing.assert_close(ours.top, theirs.top, rtol=1e-4, atol=1e-4)
            for model in (plain, many):
                next(p for _, p in model.named_parameters()).mul_(1.5)
            resharded(many)


def rounded(folder: Path, sharding: Sharding) -> None:
    """bfloat16, by weights gathered in it or by autocast, is that of one process but for rounding."""
    settings = {"compute_dtype": "bfloat16", "device": "cpu"}
    unsharded, other = (ModelSource(path=str(folder), sharding=x, **settings) for x in (None, sharding))
    plain, many = unsharded.policy(unsharded.load()), other.policy(other.load())
    expected = loss(plain, plain.pack(rows(*MIXED, temperature=(0.7, 1.3))), NEEDS)
    expected.backward()
    torch.testing.assert_close(backward(many, NEEDS), expected.detach(), rtol=0.02, atol=0.02)
    theirs = gradients(plain)
    for name, gradient in gradients(many).items():
        assert gradient.dtype == torch.float32
        assert torch.cosine_similarity(gradient.flatten(), theirs[name].flatten(), dim=0) > 0.97, (folder.name, name)


MOVES = (Sharding(tensor_parallel=2), Sharding(), Sharding(tensor_parallel=4), None)


def checkpoints_move(rank: int, folder: Path, name: str, layouts: Sequence[Sharding | None] = MOVES) -> None:
    """Written with one layout and read with another, weights and optimizer state are the same bits."""
    place, writer = folder / f"saved {name}", ShardedWriter()
    if rank == 0:
        place.mkdir(exist_ok=True)
    dist.barrier()
    expected = dict[str, torch.Tensor]()
    for step, layout in enumerate(layouts, 1):
        many = source(folder / name, sharding=layout)
        before = None if step == 1 else place / f"{step - 1:06d}"
        loaded = many.load(None if before is None else str(before / "model"))
        head = make_value_head(loaded.model, 0.3, 5)
        if before is not None:
            head.load_state_dict(load_file(before / "value_head.safetensors"))
        stack = TrainStack(many.policy(loaded, head), optimizer=AdamW(lr=1e-3))
        if before is None:
            backward(stack.model, frozenset({"value"}))
            stack.optimizer.step()
        else:
            restore(checkpoints(place)[-1], stack)
        state = whole_state({name: stack})
        for key, value in expected.items():
            assert torch.equal(state[key], value), (step, key)
        assert not expected or state.keys() == expected.keys()
        expected = state
        if layout is not None:
            writer.write(place, step, loaded, stack, {})
        elif rank == 0:
            files = {"value_head.safetensors": lambda path, head=head: save_file(head.state_dict(), path)}
            write_checkpoint(place, step, loaded, stack, {}, files)
        dist.barrier()
