"""What every rank does in `test_tensor`: passes and updates with matrices split over ranks, against one process."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as hf

from proxima.model import LoadedModel, PackedModel, save
from proxima.model.parallel.norm import clip_gradients, total_norm
from proxima.model.parallel.sharding import Sharding
from proxima.train.optimizer import AdamW
from tests.model.parallel.loads import same_copy, same_weights
from tests.model.parallel.passes import gradients, loss, policies, resharded, scalars, source
from tests.model.rows import MIXED, rows
from tests.tiny import VOCABULARY, tiny_tokenizer

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
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**SMALL, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)),
    "experts": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=16)),
}


def write_models(folder: Path) -> None:
    """Folders of the models, with norms and biases drawn too."""
    for name, (kind, config) in MODELS.items():
        torch.manual_seed(3)
        model = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.2 * torch.randn_like(parameter)
            model.get_input_embeddings().weight[70] = 0.1
        save(model.eval(), tiny_tokenizer(), folder / name)


def own_share(sharding: Sharding, busy: int | None = None):
    """This rank's sequences, those of its share; ranks of shares from `busy` on have none."""
    sequences = rows(*MIXED, temperature=(0.7, 1.3))
    share, shares = dist.get_rank() // sharding.together, dist.get_world_size() // sharding.together
    return sequences[share :: busy or shares] if share < (busy or shares) else []


def backward(model: PackedModel, sharding: Sharding, needs, parts: int, busy: int | None) -> torch.Tensor:
    """One update's gradient; its loss, over all shares."""
    own, total = own_share(sharding, busy), torch.zeros(())
    for part in range(parts):
        model.sync_gradients(part == parts - 1)
        if mine := own[part::parts]:
            value = loss(model, model.pack(mine), needs)
            value.backward()
            total += value.detach()
        else:
            model.idle_pass(needs, backward=True)
    if dist.get_rank() % sharding.together:
        total.zero_()
    dist.all_reduce(total)
    return total


def same_updates(name: str, plain: PackedModel, many: PackedModel, *, needs=NEEDS, updates=3, **how) -> None:
    sharding = many.loaded.sharding
    sequences = rows(*MIXED, temperature=(0.7, 1.3))
    trained = [[p for _, p in model.named_parameters()] for model in (plain, many)]
    optimizers = [AdamW(lr=3e-3, eps=1e-4).build(parameters) for parameters in trained]
    for step in range(updates):
        expected = loss(plain, plain.pack(sequences), needs)
        expected.backward()
        got = backward(many, sharding, needs, how.get("parts", 1), how.get("busy"))
        torch.testing.assert_close(got, expected.detach(), rtol=1e-5, atol=1e-6, msg=f"{name} {step} {got} {expected}")
        ours, theirs = gradients(many), gradients(plain)
        size = max(float(g.abs().max()) for g in theirs.values())
        for key, gradient in theirs.items():
            worst = float((ours[key] - gradient).abs().max()) / size
            assert worst < 1e-5 * (step + 1), (name, step, key, worst)
        norm = total_norm(p.grad for p in trained[1])
        wanted = torch.nn.utils.get_total_norm(list(theirs.values()))
        torch.testing.assert_close(norm.float(), wanted, rtol=1e-5, atol=0, msg=f"{name} {step}: {norm} {wanted}")
        clip_gradients(trained[1], 1.0, norm)
        torch.nn.utils.clip_grads_with_norm_(trained[0], 1.0, wanted)
        resharded(many)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def first(rank: int, folder: Path) -> None:
    size = dist.get_world_size()
    for tensor in (2, 4):
        if tensor > size: continue
        for name in MODELS:
            sharding = Sharding(tensor_parallel=tensor)
            plain, many = policies(folder / name, sharding)
            same_weights(many.loaded, plain.loaded)
            same_updates(f"{name} {tensor}", plain, many)
            if rank == 0: print(name, tensor, "ok", flush=True)
