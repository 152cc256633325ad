"""What memory and speed of an engine depend on: fields of the recipe, its servers' arguments, and their defaults."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, NoReturn
from urllib.parse import urlsplit

from proxima.data import FieldError
from proxima.data.errors import within
from proxima.engine import ENGINES
from proxima.engine.http.vllm import Vllm
from proxima.engine.serve.launch import SIZES, Serve

VLLM_SHARE = 0.9  # of a device, of servers that somebody else starts without an option, as the next
SGLANG_SHARE = 0.88
SERVED_CACHE = 4  # GiB, of vLLM on a CPU that somebody else starts
GPU_MEMORY = "engine.serve.gpu_memory"
CACHE_GIB = "engine.serve.cache_gib"
ARGUMENTS = "engine.serve.arguments"
EIGHT_BIT = ("fp8", "int8", "experts_int8", "modelopt", "ptpc")  # beginnings of the names of quantised weights
FOUR_BIT = ("awq", "gptq", "bitsandbytes", "mxfp4", "nvfp4", "modelopt_fp4")


@dataclass(frozen=True)
class EngineSettings:
    """Settings of an engine.

    Args:
        kind: `vllm` or `sglang` for servers, `local_process` for an engine in another process, else `local`.
        share: of a device's memory that a server takes; None: the plan chooses it.
        source: what sets the share, as the user would write it.
        static: activations and CUDA graphs come on top of the share, as in SGLang.
        split, copies: devices that one copy of the weights is split over, and copies of a server; split 0: all of its.
        weight_bytes, layer_bytes: bytes of a weight, and of one in the layers, which can be quantised.
        key_bytes: bytes of an element of the cache. cache: bytes of a server's cache, if fixed.
        cpu_cache: bytes of its cache on a CPU.
        slots: most completions at once, if it is set.
        max_length: tokens for which a server must have room when it starts; 0: those of the longest sequence.
        batched: most tokens of a server's step, if set.
        eager: without CUDA graphs.
        remote: the servers are on other machines.
        transfer: `engine.transfer`.
        weight_folder: `engine.weight_folder`.
        adapters_only: adapters are sent alone, if there are any.
        unread: arguments of the servers that are not modelled.
    """

    kind: str = "vllm"
    share: float | None = None
    source: str = GPU_MEMORY
    static: bool = False
    split: int = 0
    copies: int = 1
    weight_bytes: float = 2
    layer_bytes: float = 2
    key_bytes: float = 2
    cache: int | None = None
    cpu_cache: int = 2**30
    slots: int | None = None
    max_length: int = 0
    batched: int | None = None
    eager: bool = False
    remote: bool = False
    transfer: str = "auto"
    weight_folder: str | None = None
    adapters_only: bool = False
    unread: tuple[str, ...] = ()

    @property
    def served(self) -> bool:
        """True for servers, which take their memory when they start."""
        return self.kind in ("vllm", "sglang")

    def way(self, *, adapters: bool, colocated: bool, cpu: bool) -> str:
        """How new weights get to servers: a kind of `TRANSPORTS`, as a run chooses it.

        Raises:
            FieldError: the way that the recipe names does not reach them, or there is none.
        """
        fields = {name: getattr(self, name) for name in ("transfer", "weight_folder", "adapters_only")}
        server = ENGINES[self.kind] if self.served else Vllm
        shared = colocated and not (cpu or self.remote)
        with within("engine"):
            way: tuple[str, str] = server(**fields).way_of_weights(
                on_gpus=not cpu, shared=shared, adapter_rank=int(adapters), elsewhere=self.remote
            )
        return way[0]

    def notes(self, *, cpu: bool) -> list[str]:
        """What the plan assumes of the engine, on a CPU or elsewhere."""
        notes = []
        if self.unread:
            notes.append(f"{ARGUMENTS}: {' '.join(self.unread)} not in the plan")
        if self.remote:
            notes.append("engine.url is another machine: its servers are planned as a device of this kind each")
        if self.served and not self.source.startswith("engine."):
            default = f"{self.source}={self.share:g}"
            if cpu:
                default = f"a cache of {self.cpu_cache // 2**30} GiB"
            notes.append(f"the servers at engine.url are taken to run with {default}, the default")
        return notes


class _Words(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FieldError("arguments", message, "must be options of the server with their values")


def _parser(options: Mapping[str, Any]) -> argparse.ArgumentParser:
    """The parser of options by their names, a short one after a space."""
    parser = _Words(add_help=False, allow_abbrev=False)
    for names, read in options.items():
        how: dict[str, Any]
        if read is bool:
            how = {"action": argparse.BooleanOptionalAction}
        else:
            how = {"type": read}
        parser.add_argument(*names.split(), default=None, **how)
    return parser


def _size(text: str) -> int:
    """A number of vLLM's options: 8192, 16k (thousands), 16K (1,024s); -1 and auto are 0, the server's own choice."""
    if text in ("-1", "auto"):
        return 0
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
    if text[-1] in units:
        return round(float(text[:-1]) * units[text[-1]])
    return int(text)


CHOSEN = {  # what `--propose` sets
    **{" ".join(names): int for names in SIZES.values()},
    "--gpu-memory-utilization": float,
    "--kv-cache-memory-bytes": _size,
}
OPTIONS = CHOSEN | {
    "--max-model-len": _size,
    "--max-num-seqs": int,
    "--max-num-batched-tokens": _size,
    "--kv-cache-dtype": str,
    "--dtype": str,
    "--quantization -q": str,
    "--enforce-eager": bool,
}
NO_MEMORY = {"--enable-sleep-mode": bool, "--host": str, "--seed": int}


def _plain(words: Sequence[str]) -> list[str]:
    """The words with the names of options as `--max-num-seqs`; vLLM reads underscores, too."""
    plain = []
    for word in words:
        name, sign, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        plain.append(f"{name}{sign}{value}")
    return plain


def kept_arguments(words: Sequence[str]) -> list[str]:
    """The arguments of a server without those that `--propose` sets."""
    return _parser(CHOSEN).parse_known_args(_plain(words))[1]


def engine_settings(config: Any, longest: int = 0) -> EngineSettings:
    """Read the engine of a recipe. `longest`: tokens of the model's context, if known.

    Raises:
        FieldError: the servers' arguments can't be parsed.
    """
    engine = config.engine
    if not hasattr(engine, "urls"):
        size = {"float32": 4, "bfloat16": 2, "float16": 2}.get(getattr(engine, "dtype", ""), 2)
        kind = "local_process" if hasattr(engine, "restarts") else "local"
        slots = getattr(engine, "slots", None)
        return EngineSettings(kind=kind, weight_bytes=size, layer_bytes=size, key_bytes=size, slots=slots)
    started = engine.serve is not None or bool(getattr(config.placement, "engines", 0))
    serve = engine.serve or Serve()
    arguments = serve.arguments if started else ()
    try:
        given, rest = _parser(OPTIONS).parse_known_args(_plain(arguments))
        unread = tuple(word for word in _parser(NO_MEMORY).parse_known_args(rest)[1] if word.startswith("-"))
    except FieldError as error:
        raise FieldError(ARGUMENTS, list(serve.arguments), f"{error.value}: {error.requirement}") from error
    if started:
        dtype = given.dtype or serve.dtype
        limit = given.max_model_len or serve.max_length
        split = (given.tensor_parallel_size or 1) * (given.pipeline_parallel_size or 1)
        cpu_cache = serve.cache_gib
    else:
        dtype = given.dtype or "auto"
        limit = given.max_model_len
        split = 0
        cpu_cache = SERVED_CACHE
    if not limit:
        limit = min(filter(None, (config.model.max_length, longest)), default=0)
    size = 4 if dtype in ("float32", "float") else 2
    eager = serve.eager if given.enforce_eager is None else given.enforce_eager
    common = {
        "split": split,
        "copies": given.data_parallel_size or 1,
        "weight_bytes": size,
        "layer_bytes": _quantised(given.quantization or engine.quantization, size),
        "key_bytes": _cached(given.kv_cache_dtype or "auto", size),
        "cache": given.kv_cache_memory_bytes,
        "cpu_cache": 2**30 * cpu_cache,
        "slots": min(filter(None, (given.max_num_seqs, engine.max_running)), default=None),
        "max_length": int(limit),
        "batched": given.max_num_batched_tokens,
        "eager": bool(eager),
        "unread": unread,
        "kind": engine.dialect().kind,
        "transfer": engine.transfer,
        "weight_folder": engine.weight_folder,
        "adapters_only": engine.adapters_only,
    }
    if started and given.gpu_memory_utilization is not None:
        option = f"{ARGUMENTS} --gpu-memory-utilization"
        return EngineSettings(share=given.gpu_memory_utilization, source=option, **common)
    if started:
        return EngineSettings(share=serve.gpu_memory, **common)
    with within("engine"):  # it may be a file
        remote = not any(_is_here(url) for url in engine.urls)
    if common["kind"] == "sglang":
        option = "--mem-fraction-static"
        return EngineSettings(share=SGLANG_SHARE, source=option, static=True, remote=remote, **common)
    return EngineSettings(share=VLLM_SHARE, source="--gpu-memory-utilization", remote=remote, **common)


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _quantised(name: str | None, size: float) -> float:
    """Bytes of a weight of the layers, by the server's name for the quantisation."""
    if name is None:
        return size
    if name.startswith(FOUR_BIT):
        return 0.5
    if name.startswith(EIGHT_BIT) or name in ("compressed-tensors", "online"):
        return 1
    return size


def _cached(name: str, size: float) -> float:
    """Bytes of an element of keys and values, by vLLM's name for their dtype."""
    if name == "auto":
        return size
    if "4bit" in name or "4over6" in name or name.startswith(("nvfp4", "int4")):
        return 0.5
    if name.startswith(("fp8", "int8")):
        return 1
    return 2
