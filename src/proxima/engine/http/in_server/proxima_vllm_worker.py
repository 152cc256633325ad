"""Runs inside the workers of a vLLM server, not in proxima: loads weights in buckets under the server's weight API.

The bytes of a bucket come from a file, from a process group with the trainer, or from memory of a GPU that both share.

Imports nothing from proxima, because the server has its own environment. The folder of this file, which contains
nothing else, is on the server's PYTHONPATH, and the server is started with
`--worker-extension-cls proxima_vllm_worker.ProximaWorker --weight-transfer-config '{"backend": "proxima"}'`.
`VllmDialect.load_weights` is the client side.
"""

import base64
import importlib
import math
import os
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

BACKEND = "proxima"
ALIGNED = 16  # bytes; `buckets.py` has the same
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"


class ProximaWorker:
    """The worker extension for `--worker-extension-cls`. Naming it makes the server import this file, which registers
    the backend."""

    def replace_adapter(self, folder: str) -> None:
        """Give the one adapter of this worker the weights in a folder, whole or not at all. The requests that it holds
        go on with them. vLLM's own `load_inplace` does not suit: each request that comes after it has the worker read
        the folder again at every token, and each that came before it, the former folder.

        Raises:
            ValueError: the server has no adapter, or several.
            Exception: vLLM does not load it; the former weights are in place.
        """
        from vllm.lora.request import LoRARequest

        worker: Any = self
        (number,) = worker.list_loras()
        worker.add_lora(LoRARequest("proxima", number, folder, load_inplace=True))

    def model_sizes(self, names: Sequence[str]) -> dict[str, Any]:
        """The family of the model and the settings of its part about text with these names, as far as it has them."""
        worker: Any = self
        config = worker.model_runner.model_config.hf_config
        text = config.get_text_config()
        found: dict[str, Any] = {"model_type": config.model_type}
        for name in names:
            size = getattr(text, name, None)
            if type(size) is int:
                found[name] = size
        return found

    def skip_head_adapter(self) -> None:
        """Compute no adapter of the output head: proxima's have none. On a CPU, vLLM's computation of it fails, and
        ends the server, where tokens of one request are scored and another is sampled in one forward pass."""
        worker: Any = self
        for module in worker.model_runner.model.modules():
            wrapper = getattr(module, "punica_wrapper", None)
            if wrapper is not None:
                wrapper.add_lora_logits = lambda logits, *_, **__: logits


def _forget_packed_experts(model: Any) -> list[tuple[Any, Any]]:
    """Must be called before a load. On a CPU, experts are packed for their kernel when it is created; a load that finds
    a kernel leaves the new weights in the order of the files, which the kernel then misreads. Without a kernel, the
    load creates one. Returns what was forgotten: each layer's method, and its kernel."""
    from vllm.platforms import current_platform

    forgotten = list[tuple[Any, Any]]()
    if not current_platform.is_cpu():
        return forgotten
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None:
            forgotten.append((method, kernel))
            method.moe_kernel = None
    return forgotten


def _pack_tied_heads(model: Any) -> None:
    """On a CPU a linear layer computes with a packed copy of its weight. A load renews the copies of the layers that
    the files name; a tied head is in no file, and would keep using the copy of the first weights."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    owners = dict[int, int]()
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None:
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    for module in model.modules():
        if not isinstance(module, ParallelLMHead) or not isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            continue
        if owners.get(id(module.weight), 0) > 1:
            module.quant_method.process_weights_after_loading(module)


@dataclass
class InitInfo:
    """Begins an update, or asks whether a way to send weights is open; an error is the answer no.

    question: of `QUESTIONS`; empty: none.
    content: what is asked about.
    """

    question: str = ""
    content: Any = None


@dataclass
class UpdateInfo:
    """Some of the weights; with `last` the update is complete.

    kind: how they come, of `SOURCES`, or `package.module:Class` of your own that this server can import; see `Source`.
    content: what this kind needs.
    label: of the weights. Those with another label belong to an update of another run.
    """

    kind: str
    content: dict[str, Any]
    last: bool = False
    label: str = ""


class ProximaEngine(WeightTransferEngine):  # type: ignore[misc]  # it has no types here
    """Loads buckets of weights. Each worker receives whole tensors, and takes what it needs."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    wanted: set[str] | None = None
    # of an update that is open: the kernels of experts that it has to create anew; None: no update is open
    kernels: list[tuple[Any, Any]] | None = None
    whole = False  # the update that is open has received its last bucket
    own_fault = False  # of the last update that failed: the cause is here, not in another member of the group
    label: str | None = None  # of what has come of the update that is open
    group: Any = None  # that of the last update, with its name

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Record the parameters of a complete update: all of them, tied ones once. There is no connection, unless one
        is asked for.

        Raises:
            RuntimeError: the answer to the question is no.
        """
        if self.wanted is None:  # later the model may be in the middle of a failed update
            self.wanted = {name for name, _ in self.model.named_parameters()}
        if init_info.question:
            ask = QUESTIONS[init_info.question]
            ask(self, init_info.content)

    def start_weight_update(self) -> None:
        """Start an update. One that was broken off and could not be closed is closed first: vLLM forgets it, and would
        add the new weights to those that half-loaded layers have."""
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        if self.kernels is not None:
            self._close()
        self.loaded = set[str]()
        self.whole = False
        self.own_fault = False
        self.label = None
        self.kernels = _forget_packed_experts(self.model)
        with self._closed_on_error():
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load an update; the stored weights are in place on return. Without an accelerator there is nothing to wait
        for, and torch has no call for it."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the buckets of an update. If that fails, the update is over: every layer has weights again.

        Raises:
            RuntimeError: after the last bucket, some parameters have received no weights; or the buckets before were of
                another update.
        """
        with self._closed_on_error():
            if self.label not in (None, update_info.label):
                raise RuntimeError(f"another run is updating these weights, to {self.label}")
            self.label = update_info.label
            taken: set[str] | None = set()
            source = _source_of(update_info.kind)
            with closing(source(self, update_info.content)) as buckets:
                for bucket in buckets:
                    taken = self.model.load_weights(bucket)
                    self.loaded |= set(taken or ())
            if update_info.last and taken is not None and self.model_config.quantization is None:
                wanted = self.wanted or set()
                missing = sorted(wanted - self.loaded)
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
        except BaseException as error:
            self.own_fault = not isinstance(error, GroupBrokeError)
            try:
                self._leave()  # ends the wait of the other members
            finally:
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
        """Leave the process group."""
        self._leave()

    def join(self, member: dict[str, Any]) -> Any:
        """Join the group of an update, and return it. It is one of its own over the trainer's store; the default group
        is not touched."""
        name = member["name"]
        if self.group is not None and self.group[0] == name:
            return self.group[1]
        self._leave()
        if member["reused"]:
            raise RuntimeError("this worker is not a member")
        distributed: Any = torch.distributed
        parallel = self.parallel_config
        deadline = timedelta(seconds=member["form_seconds"])
        rank = member["rank"] + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = distributed.TCPStore(member["host"], member["port"], is_master=False, timeout=deadline)
        prefix = distributed.PrefixStore(name, store)
        if member["backend"] == "nccl":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=member["seconds"])
            with _blocking_waits():
                group = distributed.ProcessGroupNCCL(prefix, rank, member["size"], options)
        else:
            own = _own_address(member["host"], member["port"])
            gloo = distributed.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = deadline
            options._devices = [gloo.create_device(hostname=own)]
            group = gloo(prefix, rank, member["size"], options)
        self.group = name, group
        return group

    def _leave(self) -> None:
        """End the group, if there is one, and every collective that is open in it. The connections of gloo are closed
        with the last reference to the group or to one of its collectives: the other members then fail at once."""
        group = self.group
        self.group = None
        if group is not None:
            group[1].abort()


def can_join(engine: ProximaEngine, member: dict[str, Any]) -> None:
    """group: can this worker join it? By the fields of `GroupMember`."""
    engine.join(member)


def is_on_one(engine: ProximaEngine, devices: Sequence[str]) -> None:
    """devices: is this worker on one of these GPUs? By their UUIDs."""
    device = device_name(engine.device)
    if device not in devices:
        raise RuntimeError(f"a worker is on GPU {device}")


def is_sound(engine: ProximaEngine, _: None) -> None:
    """sound: did the last update fail for a reason other than this worker's own?"""
    if engine.own_fault:
        raise RuntimeError("its last update failed here")


QUESTIONS: dict[str, Callable[[ProximaEngine, Any], None]] = {
    "group": can_join,
    "devices": is_on_one,
    "sound": is_sound,
}


class GroupBrokeError(RuntimeError):
    """The group broke while a bucket was received: another member may have failed."""


Bucket = Iterator[tuple[str, Any]]  # names and tensors
Source = Callable[[ProximaEngine, dict[str, Any]], Generator[Bucket, None, None]]


def from_file(engine: ProximaEngine, content: dict[str, Any]) -> Generator[Bucket, None, None]:
    """file: of safetensors."""
    yield _read(content["file"])


def from_group(engine: ProximaEngine, content: dict[str, Any]) -> Generator[Bucket, None, None]:
    """Yield the buckets that the trainer broadcasts. One is on its way while the one before it is loaded. A layer keeps
    its tensors until all have come, so each bucket has memory of its own.

    group: by the fields of `GroupMember`. tensors: of each bucket, [[name, dtype, shape, first byte], …].
    """
    member = content["group"]
    deadline = timedelta(seconds=member["seconds"])
    coming = deque[tuple[Any, Any, Any]]()
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    options.timeout = deadline
    group = None
    try:
        group = engine.join(member)
        for tensors in (*content["tensors"], None):
            if tensors is not None:
                buffer = torch.empty(_size(tensors), dtype=torch.uint8, device=engine.device)
                coming.append((group.broadcast([buffer], options), buffer, tensors))
            if tensors is None or len(coming) > 1:
                work, buffer, received = coming.popleft()
                try:
                    work.wait(deadline)
                finally:
                    del work  # see `_leave`
                yield _views(buffer, received)
    except RuntimeError as error:
        raise GroupBrokeError(str(error)) from error
    finally:
        coming.clear()
        group = None  # see `_leave`


def from_handles(engine: ProximaEngine, content: dict[str, Any]) -> Generator[Bucket, None, None]:
    """handles: of the memory that holds the bucket, by the device on which it is. tensors: as for `from_group`, of this
    bucket. The memory is filled anew when this update is loaded, so its bytes are copied."""
    handle = content["handles"][device_name(engine.device)]
    yield _views(_shared(handle, engine.device).clone(), content["tensors"])


SOURCES: dict[str, Source] = {"file": from_file, "group": from_group, "ipc": from_handles}


def _source_of(kind: str) -> Source:
    if kind in SOURCES:
        return SOURCES[kind]
    module, _, name = kind.partition(":")
    source: Source = getattr(importlib.import_module(module), name)
    return source


def device_name(device: Any) -> str:
    """The name of a device that is the same in every process: of a GPU its UUID."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def _blocking_waits() -> Iterator[None]:
    """An NCCL group that is made in this block raises when a deadline has passed or a member has gone. By default torch
    starts a thread for each group, which then ends the process; it starts none for a group whose waits block.

    A group has no option for this: its constructor reads the environment. Were the variable set for good, every wait of
    the server's own groups would block, too. A worker makes one group at a time, in one thread."""
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before


def _own_address(host: str, port: int) -> str:
    """This machine's address as that host sees it."""
    with socket.create_connection((host, port), timeout=10) as connection:
        return str(connection.getsockname()[0])


def _size(tensors: Sequence[Any]) -> int:
    """Bytes of a bucket."""
    end: int = max(start + _bytes(dtype, shape) for _, dtype, shape, start in tensors)
    return math.ceil(end / ALIGNED) * ALIGNED


def _views(memory: Any, tensors: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for name, dtype, shape, start in tensors:
        end = start + _bytes(dtype, shape)
        yield name, memory[start:end].view(getattr(torch, dtype)).view(shape)


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    """Of a tensor."""
    return math.prod(shape) * int(getattr(torch, dtype).itemsize)


def _shared(handle: dict[str, Any], device: Any) -> Any:
    """Memory of another process, by its handle: of this GPU, or a file."""
    if "file" in handle:
        return torch.from_file(handle["file"], shared=True, size=handle["size"], dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = {name: _decoded(value) for name, value in handle.items()}
    classes = {"tensor_cls": torch.Tensor, "storage_cls": torch.UntypedStorage, "dtype": torch.uint8}
    return rebuild_cuda_tensor(**classes, **arguments, storage_device=device.index or 0)


def _decoded(value: object) -> object:
    """A value of a handle: JSON carries bytes in base64, after an equals sign."""
    if isinstance(value, str) and value.startswith("="):
        return base64.b64decode(value[1:])
    return value


def _read(file: str) -> Iterator[tuple[str, Any]]:
    """Yield the weights one by one from the memory-mapped file."""
    with safe_open(file, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118  not a mapping
            yield name, weights.get_tensor(name)


WeightTransferEngineFactory.register_engine(BACKEND, ProximaEngine)
# Linux grants AMX tiles to a process on request. The bfloat16 experts kernel uses them without a request, and dies of
# an illegal instruction if no other kernel has requested them before.
getattr(torch.cpu, "_init_amx", bool)()
