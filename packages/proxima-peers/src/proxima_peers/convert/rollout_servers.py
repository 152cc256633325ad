"""`engine` from the peers' options for the servers that generate. A server is configured only if the file mentions one;
otherwise the engine runs in the trainer's process."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from proxima_peers.convert.draft import Draft
from proxima_peers.convert.options import Options

SERVED = (
    "Started from its own environment, which `proxima engine install` makes; {kind: local} generates in this "
    "process instead."
)
PARALLEL = {"vllm": "--tensor-parallel-size", "sglang": "--tp-size"}  # the servers' options
DTYPES = {
    **dict.fromkeys(("float16", "fp16", "half"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float32", "fp32", "float"), "float32"),
    "auto": "auto",
}


@dataclass(frozen=True)
class ServerNames:
    """A peer's names for the settings of a server that it starts; empty if it lacks a setting."""

    gpu_memory: str = ""
    parallel: str = ""
    eager: str = ""
    dtype: str = ""
    quantization: str = ""


VERL = ServerNames(
    *(f"actor_rollout_ref.rollout.{name}" for name in ("gpu_memory_utilization", "tensor_model_parallel_size")),
    *(f"actor_rollout_ref.rollout.{name}" for name in ("enforce_eager", "dtype", "quantization")),
)
TRL = ServerNames("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")
AREAL = {
    "vllm": ServerNames("vllm.gpu_memory_utilization", "vllm.tensor_parallel_size", "vllm.enforce_eager"),
    "sglang": ServerNames("sglang.mem_fraction_static", "sglang.tp_size", "sglang.disable_cuda_graph"),
}


def verl_engine(d: Draft, o: Options) -> None:
    """`rollout.name`: verl always generates with a separate engine."""
    name = "actor_rollout_ref.rollout.name"
    if not o.given(name):
        return
    kind = str(o.get(name, default=""))
    if kind in ("vllm", "vllm_rollout", "sglang"):
        _served(d, o, VERL, o.origin(name), kind=kind.removesuffix("_rollout"))
    else:
        d.drops(name, f"{kind}: engine local generates, in the trainer's process")


HOST = r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])"  # a name, an IPv4 address, an IPv6 address in brackets


def trl_engine(d: Draft, o: Options) -> None:
    """`use_vllm`: a server that is already running, or vLLM in the trainer's process, which here is a separate one."""
    places = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port")
    if not o.flag("use_vllm"):
        d.drops_given(o, "use_vllm is false", "vllm_mode", *places, TRL.gpu_memory, TRL.parallel)
        return
    usual = "server" if o.given(*places) else "colocate"
    mode = o.choice(("server", "colocate"), "vllm_mode", default=usual)
    origin = o.origin("vllm_mode") if o.given("vllm_mode") else "from use_vllm"
    if mode == "colocate":
        d.drops_given(o, "vllm_mode is colocate: there is no server", *places)
        _served(d, o, TRL, origin)
        return
    d.drops_given(o, "the server runs already, with its own settings", TRL.gpu_memory, TRL.parallel)
    host = o.get(places[1], default="0.0.0.0")
    port = o.whole(places[2], default=8000)
    if not (isinstance(host, str) and re.fullmatch(HOST, host)):
        host = o.refuse("must be the name or address of a machine", places[1], default="0.0.0.0")
    local = f"http://{host.replace('0.0.0.0', '127.0.0.1')}:{port}"
    written = o.get(places[0], default=local)
    if not (isinstance(written, str) and re.fullmatch(rf"https?://{HOST}(:[0-9]+)?(/.*)?", written)):
        written = o.refuse("must be an http:// address", places[0], default=local)
    parts = urlsplit(written)
    d.put("engine.kind", "vllm", origin)
    note = "A plain `vllm serve`, which `proxima engine serve` starts; `trl vllm-serve` speaks a protocol of TRL's own."
    where = o.origin(places[0]) if o.given(places[0]) else o.origin(*places[1:])
    d.put("engine.url", f"{parts.scheme}://{parts.netloc}", where, note)


def areal_engine(d: Draft, o: Options) -> None:
    """`allocation_mode`, or since 1.0 `rollout.backend`: `sglang:d4t2+…`, and before `sglang.d4t2+…`, means 4 servers
    with 2 devices each."""
    names = ("rollout.backend", "allocation_mode")
    if not o.given(*names):
        return
    servers, _, trainer = str(o.get(*names, default="")).partition("+")
    kind, *layout = re.split("[:.]", servers, maxsplit=1)
    if trainer:
        given = next(name for name in names if o.given(name))
        d.drops(f"{given}: {trainer}", "the devices of the trainer: `placement` here")
    if kind in AREAL:
        sizes = {letter: int(count) for letter, count in re.findall(r"([A-Za-z])(\d+)(?![^A-Za-z])", "".join(layout))}
        replicas = sizes.get("d", 1)
        parallel = sizes.get("t", 1)
        _served(d, o, AREAL[kind], o.origin(*names), kind=kind, replicas=replicas, parallel=parallel)


SKYRL = "generator."
SKYRL_ENGINE = "generator.inference_engine."


def skyrl_engine(d: Draft, o: Options) -> None:
    """`backend`: SkyRL starts its servers, or takes those that run; up to 0.4 the options were `generator`'s."""

    def given(*names: str) -> str:
        of_engine = [SKYRL_ENGINE + name for name in names]
        return _written(o, of_engine + [SKYRL + name for name in names])

    backend = given("backend")
    count = given("num_engines", "num_inference_engines")
    remote = given("run_engines_locally")
    if o.given(remote) and not o.flag(remote, default=True):
        places = [f"{SKYRL}remote_inference_engine_urls", f"{SKYRL_ENGINE}external_server_urls"]
        where = ", ".join(str(o.get(place)) for place in places if o.given(place))
        d.wait("engine", remote, f"false: servers that run already: engine.url; the file has {where or 'no address'}")
        return
    if not o.given(backend):
        o.given(count)
        return
    names = ServerNames(
        gpu_memory=given("gpu_memory_utilization"),
        parallel=given("tensor_parallel_size", "inference_engine_tensor_parallel_size"),
        eager=given("enforce_eager"),
        dtype=given("model_dtype"),
    )
    kind = o.choice(tuple(PARALLEL), backend, default="vllm")
    _served(d, o, names, o.origin(backend), kind=kind, replicas=o.whole(count, default=1, least=1))
    if o.given(count):
        d.put("engine.serve.replicas", o.whole(count, default=1, least=1), o.origin(count))


UNIRL = "rollout.config."
ENGINES_OF_UNIRL = {"SGLangRolloutEngine": "sglang", "SGLangLLMRolloutEngine": "sglang", "VLLMRolloutEngine": "vllm"}


def unirl_engine(d: Draft, o: Options) -> None:
    """`rollout._target_`, the class of the engine: each engine of UniRL is a server on `tp_size` devices."""
    name = "rollout._target_"
    package, _, written = str(o.flat.get(name, "")).rpartition(".")
    if package.partition(".")[0] != "unirl":
        return
    o.given(name)
    kind = ENGINES_OF_UNIRL.get(written)
    if kind is None:
        d.drops(name, f"{written}: engine local generates, in the trainer's process")
        return
    every = "one server with all weights; UniRL starts one on every tp_size of its num_devices"
    _served(d, o, _names_of_unirl(o, kind), o.origin(name), kind=kind, one=every)


def _names_of_unirl(o: Options, kind: str) -> ServerNames:
    """The settings, which may be fields of UniRL's config or arguments of the engine."""

    def given(*names: str) -> str:
        places = []
        for name in names:
            places += [f"{UNIRL}{name}", f"{UNIRL}engine_kwargs.{name}"]
        return _written(o, places)

    memory = "gpu_memory_utilization"
    eager = "enforce_eager"
    if kind == "sglang":
        memory = "mem_fraction_static"
        eager = "disable_cuda_graph"
    return ServerNames(
        gpu_memory=given(memory),
        parallel=given("tp_size"),
        eager=given(eager),
        dtype=given("dtype"),
        quantization=given("quantization"),
    )


def _written(o: Options, places: list[str]) -> str:
    """The first of these places that the file has, else the first."""
    return next((place for place in places if o.given(place)), places[0])


def _served(
    d: Draft,
    o: Options,
    names: ServerNames,
    origin: str,
    *,
    kind: str = "vllm",
    replicas: int = 1,
    parallel: int | None = None,
    one: str = "one server with all weights",
) -> None:
    """`engine: {kind: KIND, serve: …}`."""
    path = "engine.serve"
    d.put("engine.kind", kind, origin, SERVED)
    why = origin if replicas > 1 else one
    d.put(f"{path}.replicas", replicas, why)
    share = o.number(names.gpu_memory, least=0, most=1)
    if share:
        d.put(f"{path}.gpu_memory", share, o.origin(names.gpu_memory))
    if names.eager and o.given(names.eager):
        d.put(f"{path}.eager", o.flag(names.eager), o.origin(names.eager))
    if names.dtype and o.given(names.dtype):
        dtype = o.choice(DTYPES, names.dtype, default="auto")
        d.put(f"{path}.dtype", DTYPES[dtype], o.origin(names.dtype))
    if names.quantization and o.given(names.quantization):
        d.put("engine.quantization", str(o.get(names.quantization)), o.origin(names.quantization))
    if parallel is not None and parallel > 1:
        devices = parallel
    else:
        devices = o.whole(names.parallel, default=1, least=1)
    if devices > 1:
        if o.given(names.parallel):
            source = o.origin(names.parallel)
        else:
            source = origin
        d.put(f"{path}.arguments", [PARALLEL[kind], str(devices)], source)
