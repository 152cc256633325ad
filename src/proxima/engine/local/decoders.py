"""The decoder that runs a model: the first whose log-probs are proven to be the model's own, and its perturbed form.

A perturbed decoder differs from the trainer's policy on purpose, as that of a quantised server does:

    weights     fake quantisation: rounded to integers with one scale per output channel, and scaled back
    noise       a constant bias of the logits, one normal draw for each entry of the vocabulary

As in the usual int8 and int4 formats (GPTQ, AWQ, compressed-tensors), the linear layers of the blocks are quantised;
embeddings, output layer, norms, biases, routers of a mixture, activations and KV cache are not. Differs: those formats
have a scale for each group of 32 to 128 inputs where they have 4 bits, so at 4 bits they are closer to the original.
"""

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from proxima.data.random import LOGIT_BIAS, normals
from proxima.engine.local.decoder import ROWS, Decoder, Matrix
from proxima.engine.local.fast_decoder import FastDecoder, supports
from proxima.engine.local.general_decoder import GeneralDecoder, ModelCopy, RecomputeDecoder, has_stacked_experts
from proxima.model.architecture import parts, weight_of
from proxima.model.faults import is_ours
from proxima.model.images.image_store import ImageStore
from proxima.model.parallel.sharding import plain_type
from proxima.model.proof import Proof, in_own_thread, off, proof_of, reason_of

CACHED = 3  # tokens of a prompt that are not run again
ROUTERS = ("gate", "router", "shared_expert_gate")  # last parts of the names of linear layers that route


def proven_decoder(model: nn.Module, *, fast: bool = True) -> Any:
    """The first class of decoders, `fast`, general and the one that runs the whole sequence for each token, whose
    log-probs are proven to be the model's own.

    Raises:
        UserError: none is; the message has the figures.
    """
    return first_proven(proof_of(model), fast=fast and supports(model) is None)


def first_proven(proof: Proof, *, fast: bool) -> Any:
    """`proven_decoder` of the model of a proof."""
    reasons = list[str]()
    if fast:
        reason = decoder_problem(FastDecoder, proof)
        if reason is None:
            return FastDecoder
        reasons.append(f"fast: {reason}")
    for name, decoder in (("general", GeneralDecoder), ("the whole sequence each token", RecomputeDecoder)):
        reason = decoder_problem(decoder, proof)
        if reason is None:
            return decoder
        reasons.append(f"{name}: {reason}")
    raise proof.refused(f"no decoder of the local engine gives its log-probs ({'; '.join(reasons)})")


def decoder_problem(kind: Any, proof: Proof) -> str | None:
    """Describe how the log-probs of a class of decoders differ from those of the model itself; None if they do not.

    The twin of the model (see `proxima.model.proof`) runs prompts in one prefill, longer ones after their cached
    beginning, then token by token through the cache; compared with the twin's own logits.
    """
    if kind not in proof.problems:
        try:
            proof.problems[kind] = in_own_thread(lambda: _problem(kind, proof))
        except Exception as error:
            if is_ours(error, plain_type(proof.twin)):
                raise
            proof.problems[kind] = reason_of(error)
    return proof.problems[kind]


@torch.no_grad()
def _problem(kind: Any, proof: Proof) -> str | None:
    decoder: Decoder = kind(copy.deepcopy(proof.twin), torch.float32)
    rows = proof.rows
    prompts = [row.prompt_tokens for row in rows]
    states, caches = decoder.prefill(prompts)
    if decoder.takes_past:
        past = list[Tensor | None]()
        for kv, prompt in zip(caches, prompts, strict=True):
            past.append(kv[:, :, :, :CACHED] if len(prompt) > CACHED else None)
        states, caches = decoder.prefill(prompts, past)
    cache = decoder.new_cache(ROWS)
    cache.reserve(max(map(len, rows)))
    for i, kv in enumerate(caches):
        cache.put(torch.tensor([i]), kv)
    outputs = [[decoder.logits(states)[i]] for i in range(len(rows))]
    for step in range(max(len(row.tokens) for row in rows) - 1):
        tokens = np.zeros(ROWS, np.int64)
        position = np.zeros(ROWS, np.int64)
        for i, row in enumerate(rows):
            at = min(step, len(row.tokens) - 1)  # a shorter row writes its last token again
            tokens[i] = row.tokens[at]
            position[i] = len(row.prompt_tokens) + at
        longest = int(position.max()) + 1
        states = decoder.step(torch.from_numpy(tokens), torch.from_numpy(position), cache, longest)
        for i, logits in enumerate(decoder.logits(states)[: len(rows)]):
            outputs[i].append(logits)
    computed = [torch.stack(logits_of[: len(row.tokens)]) for logits_of, row in zip(outputs, rows, strict=True)]
    return off(torch.cat(computed).float().log_softmax(-1), torch.cat(proof.expected))


@dataclass(frozen=True)
class Perturbation:
    """The deliberate differences of a decoder from the trainer's policy: the `bits` of its weights, and the `bias` [V]
    float32 on its logits; None: no difference."""

    bits: int | None = None
    bias: Tensor | None = None

    @classmethod
    def of(cls, model: nn.Module, weights: str | None, noise: float, seed: int) -> "Perturbation":
        """Weights are rounded to `int8`, `int4` or `int3` unless None, and `noise` times a normal draw is added to each
        logit; `seed` determines the draws."""
        head: Any = parts(model)[1].weight
        bias = None
        if noise:
            bias = noise * torch.from_numpy(normals(len(head), LOGIT_BIAS, seed)).to(head.device)
        bits = None if weights is None else int(weights.removeprefix("int"))
        return cls(bits, bias)


def fake_quantized(weight: Tensor, bits: int | None, axis: int = -1) -> Tensor:
    """Round a weight to integers, one scale per output channel, and scale it back.

        w' = s round(w / s)      s = max |w| over `axis` / (2^(bits - 1) - 1)

    Args:
        weight: a float tensor, of any shape.
        bits: of an integer, with its sign; None returns the weight itself.
        axis: of the inputs, which share a scale.

    Returns: the shape and dtype of `weight`, computed in float32. Halves are rounded to even; zeros stay zero.
    """
    if bits is None:
        return weight
    values = weight.detach().float()
    scale = values.abs().amax(axis, keepdim=True) / (2 ** (bits - 1) - 1)
    rounded: Tensor = (values / scale.where(scale > 0, 1.0)).round_().mul_(scale).to(weight.dtype)
    return rounded


class _Perturbed(Decoder):
    """The logits of perturbed decoders."""

    perturbation: Perturbation

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V], with a bias in float32: bfloat16 would lose a small one in the rounding of large logits."""
        logits = super().logits(hidden)
        if self.perturbation.bias is None:
            return logits
        return logits.float() + self.perturbation.bias


class PerturbedFastDecoder(_Perturbed, FastDecoder):
    """`FastDecoder` with a perturbation; one layer's rounded weight at a time is in memory beside the engine's copy."""

    def __init__(self, perturbation: Perturbation, model: nn.Module, dtype: torch.dtype, *, graphs: int = 0) -> None:
        self.perturbation = perturbation
        super().__init__(model, dtype, graphs=graphs)

    def _matrix(self, name: str, *modules: Any, rotary: int = 0) -> Matrix:
        bits = None if name == "head" else self.perturbation.bits
        rounded = [SimpleNamespace(weight=fake_quantized(weight_of(m), bits), bias=m.bias) for m in modules]
        return super()._matrix(name, *rounded, rotary=rotary)


class _PerturbedCopy(_Perturbed, ModelCopy):
    """The weights of perturbed decoders that compute with a copy of the model."""

    def perturb(self, perturbation: Perturbation, model: nn.Module) -> None:
        """Load the weights of `model`, rounded; the last act of a constructor."""
        self.perturbation = perturbation
        self.axes = _input_axes(self.model, self.head_module)
        self.load(model)

    def loaded(self, name: str, weight: Tensor) -> Tensor:
        if name in self.axes:
            return fake_quantized(weight, self.perturbation.bits, self.axes[name])
        return weight


class PerturbedGeneralDecoder(_PerturbedCopy, GeneralDecoder):
    """`GeneralDecoder` with a perturbation."""

    def __init__(
        self,
        perturbation: Perturbation,
        model: nn.Module,
        dtype: torch.dtype,
        *,
        routes: bool = False,
        images: ImageStore | None = None,
    ) -> None:
        super().__init__(model, dtype, routes=routes, images=images)
        self.perturb(perturbation, model)


class PerturbedRecomputeDecoder(_PerturbedCopy, RecomputeDecoder):
    """`RecomputeDecoder` with a perturbation."""

    def __init__(self, perturbation: Perturbation, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(model, dtype)
        self.perturb(perturbation, model)


PERTURBED: dict[type, type] = {
    FastDecoder: PerturbedFastDecoder,
    GeneralDecoder: PerturbedGeneralDecoder,
    RecomputeDecoder: PerturbedRecomputeDecoder,
}


def _input_axes(model: nn.Module, head: nn.Module) -> dict[str, int]:
    """The axis of the inputs of each weight that is quantised, by the name of the parameter."""
    axes: dict[str, int] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        routes = name.rpartition(".")[2] in ROUTERS
        if kind == "Conv1D":
            axes[f"{name}.weight"] = 0
        elif isinstance(module, nn.Linear) and module is not head and not routes:
            axes[f"{name}.weight"] = 1
        elif has_stacked_experts(module):
            axis = 1 if getattr(module, "is_transposed", False) else 2
            axes |= {f"{name}.{projection}_proj": axis for projection in ("gate_up", "down")}
    return axes
