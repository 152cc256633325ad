"""A fake of what vLLM is to `in_server/proxima_vllm_worker.py`: its modules, the loading layer by layer, and a worker.

As in vLLM, a layer whose load has begun has its weights on the meta device until all of them have come; a start skips
such a layer; and a worker forgets an update of which a bucket failed.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from proxima.engine.serve.launch import WORKER


@dataclass
class Loading:
    """What has come of a layer; `total` is None of one that is not being loaded."""

    kernel: dict[str, nn.Parameter] = field(default_factory=dict)
    loaded_weights: list[tuple[str, Any, int]] = field(default_factory=list)
    load_numel: int = 0
    total: int | None = None

    def can_load(self) -> bool:
        return self.total is not None


INFO: WeakKeyDictionary[nn.Module, Loading] = WeakKeyDictionary()


def get_layerwise_info(layer: nn.Module) -> Loading:
    return INFO.setdefault(layer, Loading())


class FakeModel(nn.Module):
    """Layers of several weights each; the last is a tied head, with a packed copy."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.failure: Exception | None = None  # is raised, once, in the next bucket
        self.embed = nn.Embedding(4, width)
        self.layers = nn.ModuleList(nn.Module() for _ in range(layers))
        for layer in self.layers:
            for name in "qkv":
                layer.register_parameter(name, nn.Parameter(torch.zeros(width)))
        self.requires_grad_(False)
        self.head = _Head()
        self.head.weight, self.head.quant_method = self.embed.weight, _HeadMethod()
        self.head.quant_method.process_weights_after_loading(self.head)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        taken = set()
        for name, value in weights:
            if (failure := self.failure) is not None:
                self.failure = None
                raise failure
            place, _, last = name.rpartition(".")
            self.get_submodule(place)._parameters[last].weight_loader(value)  # type: ignore[union-attr]
            taken.add(name)
        return taken

    @property
    def computes(self) -> bool:
        return not any(weight.is_meta for weight in self.parameters())

    def weights(self) -> dict[str, torch.Tensor]:
        return {**dict(self.named_parameters()), "packed": self.head.packed}


def initialize_layerwise_reload(model: FakeModel) -> None:
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            continue
        info.kernel = dict(layer._parameters)  # type: ignore[arg-type]
        info.total = sum(weight.numel() for weight in info.kernel.values())
        for name, weight in info.kernel.items():
            layer._parameters[name] = meta = nn.Parameter(weight.to("meta"), requires_grad=False)
            meta.weight_loader = _loader(layer, name, info)  # type: ignore[attr-defined]


def _loader(layer: nn.Module, name: str, info: Loading) -> Callable[..., None]:
    def load(value: torch.Tensor, first: int = 0) -> None:
        info.loaded_weights.append((name, value, first))
        info.load_numel += value.numel()
        if info.load_numel >= (info.total or 0):
            _process(layer, info)

    return load


def _process(layer: nn.Module, info: Loading) -> None:
    """What did not come is as memory was."""
    values = {name: torch.full_like(weight, torch.nan) for name, weight in info.kernel.items()}
    for name, value, first in info.loaded_weights:
        place = values[name][first : first + len(value)]
        if value.shape != place.shape:
            raise ValueError(f"{name} has another shape")
        place.copy_(value)
    for name, weight in info.kernel.items():
        weight.copy_(values[name])
    _restore(layer, info)


def _restore(layer: nn.Module, info: Loading) -> None:
    layer._parameters.update(info.kernel)
    info.__init__()  # type: ignore[misc]


def finalize_layerwise_reload(model: FakeModel, config: Any) -> None:
    for layer in model.modules():
        if (info := get_layerwise_info(layer)).can_load():
            (_process if 0 < info.load_numel < (info.total or 0) else _restore)(layer, info)


class FakeWorker:
    """A worker of a server, the `rank`th of `size`."""

    def __init__(
        self, module: ModuleType, layers: int = 3, width: int = 8, *, model: Any = None, rank: int = 0, size: int = 1
    ) -> None:
        self.model = FakeModel(layers, width) if model is None else model
        self.engine = module.ProximaEngine(self.model)
        self.engine.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=size, rank=rank)
        self.engine.device = torch.device("cpu", rank)
        self.module, self.active = module, False

    def call(self, path: str, body: Any) -> None:
        if path == "/init_weight_transfer_engine":
            self.engine.init_transfer_engine(self.module.InitInfo(**(body or {}).get("init_info", {})))
        elif path == "/start_weight_update":
            if self.active:
                raise RuntimeError("already active. Call finish_weight_update first")
            self.engine.start_weight_update()
            self.active = True
        elif not self.active:
            raise RuntimeError("no update is active")
        elif path == "/update_weights":
            try:
                self.engine.update_weights(body["update_info"])
            except BaseException:
                self.active = False
                raise
        else:
            self.engine.finish_weight_update()
            self.active = False


class _Engine:
    """What the worker's engine inherits."""

    def __init__(self, model: FakeModel) -> None:
        self.model, self.model_config = model, SimpleNamespace(quantization=None)
        self.device = torch.device("cpu")
        self.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        return self.update_info_cls(**info)  # type: ignore[attr-defined]


class _Head(nn.Module):
    packed: torch.Tensor
    quant_method: Any


class _HeadMethod:
    def process_weights_after_loading(self, head: _Head) -> None:
        head.packed = head.weight.clone()  # type: ignore[operator]


def _modules() -> Mapping[str, dict[str, Any]]:
    layerwise = {"initialize_layerwise_reload": initialize_layerwise_reload}
    layerwise |= {"finalize_layerwise_reload": finalize_layerwise_reload, "get_layerwise_info": get_layerwise_info}
    return {
        "vllm.distributed.weight_transfer.base": {"WeightTransferEngine": _Engine},
        "vllm.distributed.weight_transfer.factory": {
            "WeightTransferEngineFactory": SimpleNamespace(register_engine=lambda name, engine: None)
        },
        "vllm.model_executor.model_loader.reload.layerwise": layerwise,
        "vllm.model_executor.layers.vocab_parallel_embedding": {
            "ParallelLMHead": _Head,
            "UnquantizedEmbeddingMethod": _HeadMethod,
        },
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
    }


def worker_module(monkeypatch: Any) -> ModuleType:
    """The module that runs in a server's workers, with this vLLM around it."""
    for name, values in _modules().items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            place = ".".join(parts[:end])
            if place not in sys.modules or not hasattr(sys.modules[place], "__fake__"):
                fake = ModuleType(place)
                fake.__fake__ = True  # type: ignore[attr-defined]
                fake.__path__ = []
                monkeypatch.setitem(sys.modules, place, fake)
        vars(sys.modules[name]).update(values)
    spec = importlib.util.spec_from_file_location(WORKER.stem, WORKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, WORKER.stem, module)  # for its dataclasses
    spec.loader.exec_module(module)
    return module
