"""LoRA: small trained matrices alongside the frozen linear layers of a model, through the library peft.

attach          adapters for a loaded model; from here on they alone are trained
plain_weights   all weights of a model as if it had been trained in full: the input of an engine
adapter_off     the base, within a `with` block: the reference policy
merge_adapter   a model with adapters becomes an ordinary one

`adapter_files.py` reads and writes adapters. The model stays the Hugging Face model that it was: only its target layers
are replaced, by peft's, so attention, packing and decoders are not affected.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from proxima.data import FieldError, UserError, require
from proxima.data.random import ADAPTER_INIT, mix
from proxima.model.architecture import (
    ADAPTER,
    SCALAR_HEAD,
    base_layer,
    is_adapted,
    untie_config,
    vision_parameters,
    weight_of,
)
from proxima.model.parallel.lending import lender_of

ALL_LINEAR = "all-linear"
INIT: dict[str, bool | Literal["gaussian"]] = {"uniform": True, "gaussian": "gaussian"}  # of A, as peft calls them


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters: each target layer computes x (W + s B A)ᵀ, of which A [rank, in] and B [out, rank] alone are
    trained, in float32. B starts at 0: the policy starts as the base.

    With `dora` the result's rows are also scaled: m (W + s B A) / ‖W + s B A‖, with a trained m [out] and the norm as a
    constant in the backward pass.
    There is no dropout: a policy whose log-probs depend on a draw has no ratio to itself.

    Source: arXiv 2106.09685; rsLoRA 2312.03732; DoRA 2402.09353, section 4.3. Differs: peft and TRL train with the
    dropout of the adapter's config; here it is 0.
    """

    rank: Annotated[int, "r, rows of A and columns of B"] = 16
    alpha: Annotated[float, "s is alpha / rank; with rslora alpha / sqrt(rank)"] = 32.0
    targets: Annotated[
        Literal["all-linear"] | tuple[str, ...], "last parts of layer names; all-linear: every one but the output head"
    ] = "all-linear"
    rslora: Annotated[bool, "s = alpha / sqrt(rank), for large ranks"] = False
    dora: Annotated[bool, "train the norm of each row apart from its direction"] = False
    init: Annotated[Literal["uniform", "gaussian"], "draws of A; B is 0"] = "uniform"
    path: Annotated[str | None, "adapter to start from, made for this model; the reference stays the base"] = None

    def __post_init__(self) -> None:
        require(1 <= self.rank <= 1 << 16, "rank", self.rank, "must be in [1, 65536]")
        require(0 < self.alpha < math.inf, "alpha", self.alpha, "must be > 0 and finite")
        named = isinstance(self.targets, str) or (len(self.targets) > 0 and all(self.targets))
        require(named, "targets", self.targets, "must name a layer", remedy="all-linear names every one")


def attach(model: nn.Module, lora: Lora, seed: int) -> None:
    """Put new adapters on the target layers of a plain model and freeze everything else except a scalar head. The
    initial A depends on the seed alone; torch's random state is unchanged.

    Raises:
        FieldError: a target names no linear layer of this model.
        UserError: peft is not installed.
    """
    missing = missing_peft()
    if missing is not None:
        raise UserError("model.lora needs the package peft", remedy=missing)
    from peft import inject_adapter_in_model

    from proxima.model.adapters.merged_lora import MergedLora  # derives from a class of peft

    config = peft_config(model, lora)
    if not config.fan_in_fan_out:  # it is one setting for all layers: those of GPT-2, its head too, stay peft's
        config._register_custom_module({nn.Linear: MergedLora})
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied heads: `merge_adapter` unties them
        torch.default_generator.manual_seed(mix(ADAPTER_INIT, seed) >> 1)
        inject_adapter_in_model(config, model, ADAPTER)
    for name in trained_names(model):
        parameter = model.get_parameter(name).requires_grad_(True)
        if parameter.dtype == torch.bfloat16:  # that of the base: too coarse for the steps of an optimizer
            parameter.data = parameter.data.float()
            if "lora_magnitude_vector" in name:
                layer: Any = model.get_submodule(name.partition(".lora_magnitude_vector")[0])
                weight = layer.weight.detach().float()
                inputs = 0 if layer.fan_in_fan_out else 1
                parameter.data = torch.linalg.norm(weight, dim=inputs)


def adapter_names(model: nn.Module) -> list[str]:
    """The names of the adapter's own parameters; empty without an adapter."""
    return [name for name, _ in model.named_parameters() if f".{ADAPTER}." in name and ".lora_" in name]


def trained_names(model: nn.Module) -> list[str]:
    """The names of the parameters that a model with an adapter trains: `adapter_names`, and a scalar head."""
    head = f"{SCALAR_HEAD}.weight"
    return [*adapter_names(model), *(name for name, _ in model.named_parameters() if name == head)]


def target_layers(model: nn.Module, lora: Lora) -> dict[str, nn.Module]:
    """The layers that get an adapter, by name.

    Raises:
        FieldError: a target names no linear layer of this model.
    """
    untyped: Any = model
    head = untyped.get_output_embeddings()
    eyes = vision_parameters(model)
    linear = dict[str, nn.Module]()
    for name, module in model.named_modules():
        if _is_linear(module) and name != SCALAR_HEAD and f"{name}.weight" not in eyes:
            linear[name] = module
    if lora.targets == ALL_LINEAR:
        return {name: module for name, module in linear.items() if module is not head}
    adapted: dict[str, nn.Module] = {}
    for target in lora.targets:
        matching = {name: m for name, m in linear.items() if name == target or name.endswith(f".{target}")}
        if not matching:
            last = sorted({name.rpartition(".")[2] for name in linear})
            remedy = f"its linear layers are {', '.join(last)}"
            raise FieldError("model.lora.targets", target, "is not a linear layer of this model", remedy=remedy)
        adapted |= matching
    return {name: module for name, module in linear.items() if name in adapted}


def _is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    """True for GPT-2's linear layer, which has Wᵀ."""
    return type(module).__name__ == "Conv1D"


def adapter_parameters(model: nn.Module, lora: Lora) -> int:
    """Count the weights that an adapter of this model trains; the model may be without weights (on the meta device)."""
    count = 0
    for module in target_layers(model, lora).values():
        height, width = module.get_parameter("weight").shape
        count += lora.rank * int(height + width)
        if lora.dora:
            count += int(width if _is_transposed(module) else height)
    return count


def peft_config(model: nn.Module, lora: Lora) -> Any:
    """peft's own config of an adapter for this model."""
    from peft import LoraConfig

    layers = target_layers(model, lora)
    if isinstance(lora.targets, str):
        names = {name.rpartition(".")[2] for name in layers}
    else:
        names = set(lora.targets)
    endings = tuple(f".{target}" for target in names)
    eyes = sorted({name.removesuffix(".weight") for name in vision_parameters(model)})  # named alike in some models
    apart = [name for name in eyes if f".{name}".endswith(endings)]
    task = "SEQ_CLS" if hasattr(model, SCALAR_HEAD) else "CAUSAL_LM"
    alpha: Any = lora.alpha
    if alpha == int(alpha):
        alpha = int(alpha)  # as peft writes it
    return LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        target_modules=sorted(names),
        exclude_modules=apart or None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        init_lora_weights=INIT[lora.init],
        fan_in_fan_out=any(map(_is_transposed, layers.values())),
        task_type=task,
    )


def missing_peft() -> str | None:
    """The command that installs peft; None if it is installed."""
    return None if find_spec("peft") else "pip install 'proxima-rl[lora]'"


@torch.no_grad()
def plain_weights(model: nn.Module, *, shapes: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The parameters under the names that they have without adapters, tied ones under each name. Merged weights are
    computed lazily, so that only one at a time is in memory; a sharded model's (`lent`) are gathered by layers.

    Args:
        shapes: only names, dtypes and shapes are read: a sharded model's weights are not gathered.
    """
    adapted = {name: module for name, module in model.named_modules() if is_adapted(module)}
    lender = None if shapes else lender_of(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if lender is not None:
            lender.load_parameter(name)
        owner, _, suffix = name.partition(".base_layer.")
        if owner in adapted and suffix:
            if suffix == "weight":
                yield f"{owner}.{suffix}", weight_of(adapted[owner])
            else:
                yield f"{owner}.{suffix}", parameter
        elif not any(name.startswith(f"{layer}.") for layer in adapted):
            yield name, parameter


@torch.no_grad()
def merge_adapter(model: nn.Module) -> None:
    """Turn a model with adapters into an ordinary one: its original layers, with the weights of `weight_of` in the
    base's dtype, all of them trainable. An adapted head no longer shares its weight with the embedding."""
    for name, module in list(model.named_modules()):
        if is_adapted(module):
            layer: Any = base_layer(module)
            layer.weight = nn.Parameter(weight_of(module).to(layer.weight.dtype))
            model.set_submodule(name, layer)
    untie_config(model)
    model.requires_grad_(True)
    if hasattr(model, "peft_config"):
        del model.peft_config


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapter off within the block: the model then equals its base bit for bit.

    Raises:
        ValueError: the model has no adapter.
    """
    layers: list[Any] = [module for module in model.modules() if is_adapted(module)]
    if not layers:
        raise ValueError("the model has no adapter to switch off")
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
