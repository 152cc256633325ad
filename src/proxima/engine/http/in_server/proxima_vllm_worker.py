"""Runs inside the workers of a vLLM server, not in proxima: loads weights from a folder, in buckets, under the server's
weight-transfer API.

Imports nothing from proxima, because the server has its own environment. The folder of this file, which contains
nothing else, is on the server's PYTHONPATH, and the server is started with
`--worker-extension-cls proxima_vllm_worker.ProximaWorker --weight-transfer-config '{"backend": "proxima_folder"}'`.
`VllmDialect.load_weights` is the client side.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "proxima_folder"


class ProximaWorker:
    """The worker extension for `--worker-extension-cls`. Naming it makes the server import this file, which registers
    the backend."""


def _forget_packed_experts(model: Any) -> list[tuple[Any, Any]]:
    """Must be called before a load. On a CPU, experts are packed for their kernel when it is created; a load that finds
    a kernel leaves the new weights in the order of the files, which the kernel then misreads. Without a kernel, the
    load creates one. Returns what was forgotten: each layer's method, and its kernel."""
    from vllm.platforms import current_platform

    forgotten = list[tuple[Any, Any]]()
    for module in model.modules() if current_platform.is_cpu() else ():
        method: Any = getattr(module, "quant_method", None)
        if (kernel := getattr(method, "moe_kernel", None)) is not None:
            forgotten.append((method, kernel))
            method.moe_kernel = None
    return forgotten


def _pack_tied_heads(model: Any) -> None:
    """On a CPU a linear layer computes with a packed copy of its weight. A load renews the copies of the layers that
    the files name; a tied head is in no file, and would keep using the copy of the first weights."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    owners = dict[int, int]()
    for module in model.modules():
        if (weight := module._parameters.get("weight")) is not None:
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    for module in model.modules():
        if not isinstance(module, ParallelLMHead) or not isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            continue
        if owners.get(id(module.weight), 0) > 1:
            module.quant_method.process_weights_after_loading(module)


@dataclass
class FolderInit:
    """Empty: the backend needs no initialisation."""


@dataclass
class FolderBucket:
    """A bucket of weights: those in `file`; with `last` the update is complete."""

    file: str
    last: bool = False


class FolderEngine(WeightTransferEngine):  # type: ignore[misc]  # it has no types here
    """Reads buckets of weights from safetensors files. Each worker reads what it needs by itself."""

    init_info_cls = FolderInit
    update_info_cls = FolderBucket
    wanted: set[str] | None = None
    # of an update that is open: the kernels of experts that it has to create anew; None: no update is open
    kernels: list[tuple[Any, Any]] | None = None
    whole = False  # the update that is open has received its last bucket

    def init_transfer_engine(self, init_info: FolderInit) -> None:
        """Record the parameters of a complete update: all of them, tied ones once. There is no connection."""
        if self.wanted is None:  # later the model may be in the middle of a failed update
            self.wanted = {name for name, _ in self.model.named_parameters()}

    def start_weight_update(self) -> None:
        """Start an update. One that was broken off and could not be closed is closed first: vLLM forgets it, and would
        add the new weights to those that half-loaded layers have."""
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        if self.kernels is not None:
            self._close()
        self.loaded, self.whole = set[str](), False
        self.kernels = _forget_packed_experts(self.model)
        with self._closed_on_error():
            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FolderBucket) -> None:
        """Load one bucket. If that fails, the update is over: every layer has weights again, see `_close`.

        Raises:
            RuntimeError: after the last bucket, some parameters have received no weights.
        """
        with self._closed_on_error():
            taken = self.model.load_weights(_read(update_info.file))
            self.loaded |= set(taken or ())
            if update_info.last and taken is not None and self.model_config.quantization is None:
                missing = sorted((self.wanted or set()) - self.loaded)
                if missing:
                    raise RuntimeError(f"{len(missing)} parameters got no weights, such as {missing[0]}")
            self.whole = update_info.last

    def finish_weight_update(self) -> None:
        """Move the new weights to where the kernels read them, including packed copies; of an update without its last
        bucket, those of whole layers."""
        self._close()

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        """End an update, whole or not. A layer that has received only a part of its weights gets its former ones back:
        until then its weights are on the meta device, and a request would end the server."""
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, get_layerwise_info

        if not self.whole:
            for layer in self.model.modules():
                info = get_layerwise_info(layer)
                if info.can_load():  # not every weight of it has come
                    info.load_numel = 0
                    info.loaded_weights.clear()
        finalize_layerwise_reload(self.model, self.model_config)
        for method, kernel in self.kernels or ():
            if method.moe_kernel is None:  # of a layer that has its former weights
                method.moe_kernel = kernel
        _pack_tied_heads(self.model)
        self.kernels = None

    def shutdown(self) -> None:
        """Do nothing: there is nothing to shut down."""


def _read(file: str) -> Iterator[tuple[str, Any]]:
    """Yield the weights one by one from the memory-mapped file."""
    with safe_open(file, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118  not a mapping
            yield name, weights.get_tensor(name)


WeightTransferEngineFactory.register_engine(BACKEND, FolderEngine)
# Linux grants AMX tiles to a process on request. The bfloat16 experts kernel uses them without a request, and dies of
# an illegal instruction if no other kernel has requested them before.
getattr(torch.cpu, "_init_amx", bool)()
