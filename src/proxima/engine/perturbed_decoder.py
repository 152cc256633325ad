"""Decoders whose policy differs from the trainer's on purpose, as that of a quantised server does.

    weights     fake quantisation: rounded to integers with one scale per output channel, and scaled back
    noise       a constant bias of the logits, one normal draw for each entry of the vocabulary

As in the usual int8 and int4 formats (GPTQ, AWQ, compressed-tensors), the linear layers of the blocks are quantised;
embeddings, output layer, norms, biases, routers of a mixture, activations and KV cache are not. Differs: those formats
have a scale for each group of 32 to 128 inputs where they have 4 bits, so at 4 bits they are closer to the original.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from proxima.data.random import LOGIT_BIAS, normals
from proxima.engine.local.decoder import Matrix
from proxima.engine.local.fast_decoder import FastDecoder
from proxima.engine.local.general_decoder import GeneralDecoder, ModelCopy, RecomputeDecoder
from proxima.model.lora import weight_of
from proxima.model.model_parts import parts

ROUTERS = ("gate", "router", "shared_expert_gate")  # last parts of the names of linear layers that route


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


def perturbation(model: nn.Module, weights: str | None, noise: float, seed: int) -> dict[str, Any]:
    """What a decoder of `PERTURBED` is given: weights are rounded to `int8`, `int4` or `int3` unless None, and `noise`
    times a normal draw is added to each logit; `seed` determines the draws."""
    head: Any = parts(model)[1].weight
    bias = noise * torch.from_numpy(normals(len(head), LOGIT_BIAS, seed)).to(head.device) if noise else None
    return {"bits": None if weights is None else int(weights.removeprefix("int")), "bias": bias}


class _Perturbed:
    """What perturbed decoders share: `bits` of their weights, and the `bias` [V] float32 of their logits; None for
    neither."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, *, bits: int | None, bias: Tensor | None, **given: Any
    ) -> None:
        self.bits, self.bias = bits, bias
        super().__init__(model, dtype, **given)  # type: ignore[call-arg]

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, V], with a bias in float32: bfloat16 would lose a small one in the rounding of large logits."""
        logits: Tensor = super().logits(hidden)  # type: ignore[misc]
        return logits if self.bias is None else logits.float() + self.bias


class PerturbedFastDecoder(_Perturbed, FastDecoder):
    """`FastDecoder` with `_Perturbed`; one layer's rounded weight at a time is in memory beside the engine's copy."""

    def _matrix(self, name: str, *modules: Any, rotary: int = 0) -> Matrix:
        bits = None if name == "head" else self.bits
        rounded = [SimpleNamespace(weight=fake_quantized(weight_of(m), bits), bias=m.bias) for m in modules]
        return super()._matrix(name, *rounded, rotary=rotary)


class _PerturbedCopy(_Perturbed, ModelCopy):
    def __init__(self, model: nn.Module, dtype: torch.dtype, **given: Any) -> None:
        super().__init__(model, dtype, **given)
        self.axes = _input_axes(self.model, self.head_module)
        self.load(model)

    def loaded(self, name: str, weight: Tensor) -> Tensor:
        return fake_quantized(weight, self.bits, self.axes[name]) if name in self.axes else weight


class PerturbedGeneralDecoder(_PerturbedCopy, GeneralDecoder):
    """`GeneralDecoder` with `_Perturbed`."""


class PerturbedRecomputeDecoder(_PerturbedCopy, RecomputeDecoder):
    """`RecomputeDecoder` with `_Perturbed`."""


PERTURBED: dict[type, type] = {
    FastDecoder: PerturbedFastDecoder,
    GeneralDecoder: PerturbedGeneralDecoder,
    RecomputeDecoder: PerturbedRecomputeDecoder,
}


def _input_axes(model: nn.Module, head: nn.Module) -> dict[str, int]:
    """The axis of the inputs of each weight that is quantised, by the name of the parameter."""
    axes: dict[str, int] = {}
    for name, module in model.named_modules():
        kind, routes = type(module).__name__, name.rpartition(".")[2] in ROUTERS
        if kind == "Conv1D" or (isinstance(module, nn.Linear) and module is not head and not routes):
            axes[f"{name}.weight"] = 0 if kind == "Conv1D" else 1
        elif isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):  # the experts of a layer
            axis = 1 if getattr(module, "is_transposed", False) else 2
            axes |= {f"{name}.{part}_proj": axis for part in ("gate_up", "down")}
    return axes
