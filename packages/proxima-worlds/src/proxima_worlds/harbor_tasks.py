"""Tasks in Harbor's format (Terminal-Bench): a folder with `task.toml`, `instruction.md`, `environment/`, `tests/` and
possibly `solution/`; their images are built here. Standard library only.

Read from harbor 0.26. What is not supported is refused by name: several steps, Windows, compose files, GPUs, health
checks, MCP servers, and tests in a container of their own.
"""

import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from proxima.system.foreign_folder import ForeignFileError, ForeignFolder
from proxima_worlds.awaited_commands import run_shown
from proxima_worlds.containers import (
    VARIABLE_NAME,
    Container,
    ContainerFailed,
    client_environment,
    ensure_image,
    image_id,
    image_settings,
)

CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)  # a mark of benchmarks, which no agent sees
VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
# Folders of an image's own programs and settings: an agent that may change them decides what its tests do.
NOT_FOR_WORK = {"/", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/usr", "/opt", "/var"}
NOT_FOR_WORK |= {f"/usr/{name}" for name in ("bin", "sbin", "lib", "local")}
NOT_FOR_WORK |= {f"/usr/local/{name}" for name in ("bin", "sbin", "lib", "local")}
SEARCHED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
LARGEST_TOML = 1 << 17  # bytes
LARGEST = 1_000_000_000
UNITS = {"K": 1 / 1024, "M": 1, "G": 1024}
VERIFIER_SECONDS = 600.0  # harbor's
BUILD_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class HarborTask:
    """A task; its fields are those of `task.toml`.

    Args:
        folder: the task's.
        instruction: what the agent is asked to do.
        container: the container of the agent and of the tests, whose image `prepare` builds or pulls.
        built: the image is built from `environment/Dockerfile`.
        workdir: where commands start; empty: the image's folder.
        carried: more folders in which an agent's work lies, besides the one where commands start.
        variables, tests_variables: of the environment, and those of the tests alone.
        agent_seconds: limit of the agent; None: only `episode.seconds`.
    """

    folder: Path
    instruction: str
    container: Container
    built: bool
    build_seconds: float = BUILD_SECONDS
    workdir: str = ""
    variables: dict[str, str]
    tests_variables: dict[str, str]
    agent_seconds: float | None = None
    tests_seconds: float = VERIFIER_SECONDS
    agent_user: str = ""
    tests_user: str = ""
    carried: tuple[str, ...] = ()

    def prepare(self, program: str) -> None:
        """Build or pull the image, unless the engine has it.

        Raises:
            ContainerFailed: it can't be had.
        """
        image = self.container.image
        if not self.built:
            ensure_image(program, image)
        elif not image_id(program, image):
            build = [program, "build", "--tag", image, str(self.folder / "environment")]
            code, said = run_shown(build, self.build_seconds, environment=client_environment())
            if code:
                place = str(self.folder / "environment")
                raise ContainerFailed("path", place, f"can't be built by {program} (exit code {code}): {said}")
        folders = self.judged_folders(program)
        for name in SEARCHED:
            for entry in image_settings(program, image).variables.get(name, "").split(":"):
                if entry and folders != ("/",) and any(PurePosixPath(entry).is_relative_to(top) for top in folders):
                    print(
                        f"harbor: {self.folder.name}: {name} of the image has {entry}, where an agent may put what "
                        "the tests then use",
                        file=sys.stderr,
                    )

    def judged_folders(self, program: str) -> tuple[str, ...]:
        """The folders that the tests see as the agent has left them; all else they see as the image has it. Only `/`:
        they see all as the agent has left it. The image must be there.

        Raises:
            ContainerFailed: it is not clear where an agent works.
        """
        if "/" in self.carried:
            return ("/",)
        own = os.path.normpath(self.workdir or image_settings(program, self.container.image).folder)
        if own in NOT_FOR_WORK and own not in self.carried:
            named = f"must name the folders in which the agent of {self.folder.name} works, or /: it starts in {own}"
            raise ContainerFailed("carried", list(self.carried), named)
        folders = sorted({own, *self.carried})
        return tuple(
            folder
            for folder in folders
            if not any(PurePosixPath(folder).is_relative_to(other) for other in folders if other != folder)
        )


@lru_cache(maxsize=4096)
def read_task(
    folder: Path, network: bool = False, variables: tuple[str, ...] = (), carried: tuple[str, ...] = ()
) -> HarborTask:
    """Read a task.

    Args:
        network: its container has the engine's usual network.
        variables: names of this process's environment that `${NAME}` in the task may stand for.
        carried: see `HarborTask`.
    Raises:
        ContainerFailed: it is broken, or not supported.
    """
    try:
        files = ForeignFolder(folder)
        config = tomllib.loads(files.text("task.toml", LARGEST_TOML))
        instruction = files.text("instruction.md")
    except (OSError, ValueError, RecursionError) as error:
        raise ContainerFailed("path", str(folder), f"can't be read as a Harbor task: {error}") from None
    lines = instruction.split("\n")
    while lines and (CANARY.fullmatch(lines[0].strip()) or not lines[0].strip()):
        del lines[0]
    try:
        agent, verifier, own = (_value(config, name, {}, "a table") for name in ("agent", "verifier", "environment"))
        _refuse_unsupported(folder, config, verifier, own)
        memory = _number(own, "memory_mb", 0) or _megabytes(_value(own, "memory", "", "a text, as 2G")) or 2048
        image = _value(own, "docker_image", "", "a text")
        return HarborTask(
            folder=folder,
            instruction="\n".join(lines),
            container=Container(
                image=image or f"localhost/proxima-harbor:{digest_of(folder / 'environment')}",
                memory_mb=int(memory),
                cpus=_number(own, "cpus", 0) or 1.0,
                pids=2048,
                writable=True,
                network=network,
            ),
            built=not image,
            build_seconds=_number(own, "build_timeout_sec", BUILD_SECONDS),
            workdir=_value(own, "workdir", "", "a text"),
            variables=_resolved(_value(own, "env", {}, "a table"), variables),
            tests_variables=_resolved(_value(verifier, "env", {}, "a table"), variables),
            agent_seconds=_number(agent, "timeout_sec", 0) or None,
            tests_seconds=_number(verifier, "timeout_sec", VERIFIER_SECONDS),
            agent_user=str(agent.get("user") or ""),
            tests_user=str(verifier.get("user") or ""),
            carried=carried,
        )
    except ContainerFailed as error:
        if error.field == "path":
            raise
        bound = f"has a task.toml whose container can't be made: {error.field}={error.value!r} {error.bound}"
        raise ContainerFailed("path", str(folder), bound) from None
    except ValueError as error:
        raise ContainerFailed("path", str(folder), f"has a task.toml with a wrong value: {error}") from None


def _value(table: Mapping[str, Any], name: str, default: Any, expected: str) -> Any:
    """A value of the default's type; the default where there is none."""
    value = table.get(name, default)
    if not isinstance(value, type(default)):
        raise ValueError(f"{name} = {value!r:.100}, must be {expected}")
    return value


def _number(table: Mapping[str, Any], name: str, default: float) -> float:
    value = table.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
        raise ValueError(f"{name} = {value!r:.100}, must be a number from 0 to {LARGEST:,}")
    return float(value)


def _refuse_unsupported(
    folder: Path, config: Mapping[str, Any], verifier: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    unsupported = {
        "steps": config.get("steps"),
        "environment.os": str(own.get("os", "linux")).lower() != "linux",
        "environment.gpus": own.get("gpus"),
        "environment.tpu": own.get("tpu"),
        "environment.healthcheck": own.get("healthcheck"),
        "environment.mcp_servers": own.get("mcp_servers"),
        "verifier.environment": verifier.get("environment") or verifier.get("environment_mode") == "separate",
        "verifier.collect": verifier.get("collect"),
        "environment/docker-compose.yaml": (folder / "environment" / "docker-compose.yaml").exists(),
    }
    named = [name for name, given in unsupported.items() if given]
    if named:
        raise ContainerFailed("path", str(folder), f"uses {', '.join(named)}, which is not supported")
    wanted = ["tests/test.sh"]
    if not own.get("docker_image"):
        wanted.append("environment/Dockerfile")
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise ContainerFailed("path", str(folder), f"has no {' and no '.join(missing)}")


def _megabytes(size: str) -> float:
    """A size as older tasks write it: 2G, 512M."""
    if not re.fullmatch(r"([0-9]+(\.[0-9]+)?[KMGkmg])?", size):
        raise ValueError(f"memory = {size!r:.100}, must be a number with K, M or G, as 2G")
    if size:
        return float(size[:-1]) * UNITS[size[-1].upper()]
    return 0.0


def _resolved(variables: Mapping[str, str], allowed: tuple[str, ...]) -> dict[str, str]:
    """The variables, with `${NAME}` and `${NAME:-value}` taken from this process's environment if NAME is allowed."""
    resolved = {}
    for name, value in variables.items():
        if not VARIABLE_NAME.fullmatch(name) or not isinstance(value, str) or set(value) & {"\0", "\n", "\r"}:
            given = f"env has {name!s:.100} = {value!r:.100}"
            raise ValueError(f"{given}, must be a text of one line, and its name one of a variable")
        match = VARIABLE.fullmatch(value)
        if match:
            value = _of_this_machine(match[1], match[2], allowed)
        resolved[name] = value
    return resolved


def _of_this_machine(name: str, default: str | None, allowed: tuple[str, ...]) -> str:
    """The value of a variable of this process's environment; the default if it is not set, or not allowed."""
    known = name in allowed
    value = os.environ.get(name, default) if known else default
    if value is None and known:
        raise ValueError(f"the environment variable {name} is not set")
    if value is None:
        raise ValueError(f"env asks for this machine's variable {name!r:.100}, not named in task.variables")
    if set(value) & {"\n", "\r"}:
        raise ValueError(f"the environment variable {name} has more than one line")
    return value


def digest_of(folder: Path) -> str:
    """A digest of the files of a folder, with their names and modes.

    Raises:
        ContainerFailed: a file is refused, see `ForeignFolder`.
    """
    try:
        return ForeignFolder(folder).digest()
    except ForeignFileError as error:
        raise ContainerFailed("path", str(folder), f"can't be read as a Harbor task: {error}") from None
