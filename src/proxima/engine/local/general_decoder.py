"""Any Hugging Face decoder, through its own forward.

`GeneralDecoder` runs the model's modules with our cache behind their attention interface, so it batches and refills
like the fast path. `RecomputeDecoder` is for architectures without that interface (state-space models): it runs the
full sequence again for every token.
"""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from proxima.data.columns import Ints
from proxima.data.image_tokens import image_starts
from proxima.engine.local.decoder import Attend, CachingDecoder, Decoder, Matrix, in_rows, row_limits
from proxima.engine.local.kv_cache import KVCache
from proxima.model.adapters.lora import merge_adapter, plain_weights
from proxima.model.architecture import parts
from proxima.model.attention import hugging_face_name
from proxima.model.images.image_inputs import ImageReader
from proxima.model.images.image_store import ImageStore
from proxima.model.moe import RoutingPass, connect_routers


class ModelCopy(Decoder):
    """A copy of a model: linear weights in the engine's dtype, the rest as in the original, run under autocast; in
    float32, everything, which then needs none.

    This is the trainer's arithmetic, so log-probs agree up to rounding.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.device = next(model.parameters()).device
        self.model: Any = copy.deepcopy(model)
        merge_adapter(self.model)
        self.model.requires_grad_(False).eval()
        self.backbone, self.head_module = parts(self.model)
        if dtype == torch.float32:
            self.model.to(dtype)
        for module in self.backbone.modules():
            if isinstance(module, nn.Linear) or has_stacked_experts(module):
                module.to(dtype)
        untyped: Any = self.model
        if self.device.type == "cpu" and hasattr(untyped, "set_experts_implementation"):
            # linear layers, which `SteadyRows` covers; a single product over all experts is not
            untyped.set_experts_implementation("eager")
        self.head = Matrix(self.head_module.weight, self.head_module.bias, dtype)

    @torch.no_grad()
    def load(self, model: nn.Module) -> None:
        parameters = dict(self.model.named_parameters())
        for name, weight in plain_weights(model):
            if name in parameters:
                parameters[name].copy_(self.loaded(name, weight))
        self.head = Matrix(self.head_module.weight, self.head_module.bias, self.dtype)

    def loaded(self, name: str, weight: Tensor) -> Tensor:
        """The tensor to load for a weight of the model."""
        return weight

    def autocast(self) -> AbstractContextManager[None]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


def has_stacked_experts(module: nn.Module) -> bool:
    """True for the experts of a layer, whose weights are parameters of three axes."""
    return module._parameters.get("gate_up_proj") is not None


class GeneralDecoder(CachingDecoder, ModelCopy):
    """For architectures that call their attention through Hugging Face's attention interface."""

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, *, routes: bool = False, images: ImageStore | None = None
    ) -> None:
        ModelCopy.__init__(self, model, dtype)
        CachingDecoder.__init__(self, self.model.config.get_text_config(), dtype, self.device)
        self.records_routes = routes
        self.takes_past = not routes  # routes are needed for all tokens
        self.images: Any = None  # an `ImageReader`
        if images is not None:
            self.images = ImageReader(self.model, images)
        packed_module = self.model if images is None else self.backbone
        packed_module.set_attn_implementation(hugging_face_name("packed"))

    def load(self, model: nn.Module) -> None:
        super().load(model)
        if self.images is not None:
            self.images.forget()

    def shift(self, tokens: Ints) -> int:
        if self.images is None:
            return 0
        return int(self.images.shift(tokens))

    def _images(self, tokens: Ints) -> Tensor | None:
        if self.images is None or not self.images.joined or (tokens >= 0).all():
            return None
        return torch.from_numpy(image_starts(tokens)).to(self.device)

    def _positions(self, prompts: Sequence[Ints], begin: Sequence[int], position: Tensor) -> Tensor:
        if self.images is None or not self.images.three_axes:
            return position
        parts = list[Tensor]()
        for prompt, first in zip(prompts, begin, strict=True):
            rows = torch.from_numpy(self.images.position(prompt)[:, first:])
            parts.append(rows.to(self.device))
        padding = position[sum(rows.shape[1] for rows in parts) :]
        return torch.cat([*parts, padding.expand(3, -1)], 1)

    def _run(self, tokens: Tensor, position: Tensor, longest: int, attend: Attend) -> Tensor:
        def attend_to(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None, window: int | None) -> Tensor:
            return attend(layer, q, torch.stack([k, v], dim=1), scale, window)

        inputs: dict[str, Any] = {"input_ids": tokens[None], "position_ids": position[..., None, :]}
        routing = None
        if self.records_routes:
            connect_routers(self.backbone)
            routing = RoutingPass()
        with SteadyRows(self.dtype), self.autocast():
            if self.images is not None:
                inputs = self.images.inputs(tokens, position)
            if routing is not None:
                inputs["routing"] = routing
            answer = self.backbone(**inputs, use_cache=False, attend=attend_to)
        self.routes = None if routing is None else routing.chosen()
        hidden: Tensor = answer.last_hidden_state[0]
        return hidden


class RecomputeDecoder(ModelCopy):
    """Works for every causal model; each token costs a forward pass over its full sequence. The cache stores token
    ids."""

    takes_past = False

    def new_cache(self, slots: int) -> KVCache:
        return KVCache(1, slots, (1, 1, 1), torch.long, self.device)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Ints], past: Sequence[Tensor | None] = ()) -> tuple[Tensor, list[Tensor]]:
        sequences = self._tensors(prompts)
        return self._last(sequences), [ids.view(1, 1, 1, -1, 1) for ids in sequences]

    @torch.no_grad()
    def hidden(self, sequences: Sequence[Ints]) -> list[Tensor]:
        return [self._forward(ids) for ids in self._tensors(sequences)]

    def _tensors(self, sequences: Sequence[Ints]) -> list[Tensor]:
        return [torch.tensor(ids, dtype=torch.long, device=self.device) for ids in sequences]

    @torch.no_grad()
    def step(self, tokens: Tensor, position: Tensor, cache: KVCache, longest: int) -> Tensor:
        rows = torch.arange(len(tokens), device=self.device)
        cache.write(0, rows, position, tokens.view(-1, 1, 1, 1))
        held = cache.layers[0][0, : len(tokens), 0, :, 0]
        return self._last([row[: at + 1] for row, at in zip(held, position.tolist(), strict=True)])

    def _last(self, sequences: Sequence[Tensor]) -> Tensor:
        """The last hidden state of each sequence, one sequence at a time: with padding to the longest, a row's last
        bits would depend on its neighbours. Equal ones, such as the rows of a step that are not in use, run once."""
        keys = [tuple(ids.tolist()) for ids in sequences]
        different = dict(zip(keys, sequences, strict=True))
        last = {key: self._forward(ids)[-1] for key, ids in different.items()}
        return torch.stack([last[key] for key in keys])

    def _forward(self, tokens: Tensor) -> Tensor:
        with self.autocast():
            answer = self.backbone(input_ids=tokens[None], use_cache=False)
        hidden: Tensor = answer.last_hidden_state[0]
        return hidden


class SteadyRows(TorchFunctionMode):
    """While active, keeps the linear layers of any model within `row_limits`: `nn.Linear`, and GPT-2's `Conv1D`, which
    calls `torch.addmm`. Affects CPU tensors only."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and args[0].device.type == "cpu":
            x, weight, *rest = args
            limits = row_limits(*weight.shape, self.dtype, False, torch.get_num_threads())
            flat = in_rows(lambda rows: func(rows, weight, *rest, **kwargs), x.flatten(0, -2), limits)
            return flat.view(*x.shape[:-1], -1)
        if func is torch.addmm and args[1].device.type == "cpu":
            bias, x, weight = args
            limits = row_limits(*weight.T.shape, self.dtype, False, torch.get_num_threads(), transposed=True)
            return in_rows(lambda rows: func(bias, rows, weight, **kwargs), x, limits)
        return func(*args, **kwargs)
