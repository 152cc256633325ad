"""The section `engine.serve`: settings of the servers that proxima starts itself."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from proxima.data import require, require_threads
from proxima.system.secret_values import HIDDEN, is_secret_name, is_secret_value

REFERENCE = "env:"  # prefix of a variable's value that refers to another variable


@dataclass(frozen=True, kw_only=True)
class Serve:
    """A server that proxima starts, supervises and stops.

    Args:
        environment: folder of the server's virtual environment; `proxima engine install` creates one. null: the one of
            `executable`, or else `.venv-vllm` in the current folder if it exists.
        executable: the server's program, a path or a name on the PATH; null: `bin/vllm` of the environment, or else
            `vllm` on the PATH.
        port: port of the first server on 127.0.0.1; the others get the following ones. 0: free ports.
        replicas: servers of the same model, each with all weights.
        threads: OpenMP threads of each server on a CPU; 0: the cores, shared evenly among servers and trainer.
        dtype: of weights and computation; auto: the dtype of the model's files.
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
    return os.environ.get(value.removeprefix(REFERENCE)) if value.startswith(REFERENCE) else value


def _check_argument(word: str) -> None:
    """Raise FieldError for a secret on the command line, which every user of the machine can read."""
    name, _, value = word.partition("=")
    option = name.startswith("-") and is_secret_name(name)
    shown = name if option else HIDDEN
    reason = "would show a secret in the list of processes"
    remedy = "give it as an environment variable of the server: variables: {NAME: env:NAME}; the API key is made"
    require(not option and not is_secret_value(value or word), "arguments", shown, reason, remedy=remedy)
