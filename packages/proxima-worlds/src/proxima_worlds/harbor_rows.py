"""Tasks in Harbor's format (Terminal-Bench), a folder each."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from proxima.data import as_field_errors, require
from proxima.task.protocol import MappedRows, PlayedTask, Row, Rows, user_message
from proxima_worlds.containers import PLACE, VARIABLE_NAME, WITHOUT, ContainerFailed, auto_engine, engine_program
from proxima_worlds.harbor_tasks import HarborTask, digest_of, read_task

OURS = tuple(f"/{name}" for name in ("proxima", "tests", "logs", "proc", "sys", "dev"))  # of a container


def _is_folder(path: object) -> bool:
    if not isinstance(path, str) or not (path == "/" or re.fullmatch(PLACE, path)) or os.path.normpath(path) != path:
        return False
    return not any(PurePosixPath(path).is_relative_to(top) for top in OURS)


@dataclass(frozen=True, kw_only=True)
class Harbor(PlayedTask):
    """Tasks in Harbor's format (Terminal-Bench), played in containers.

    The instruction of a task is the prompt. An agent carries it out in the task's container. The task's tests give the
    reward `environment`: they run in another container of the same image, which has the agent's working folder.
    Without another environment, the model itself acts by calls of a tool `bash`: the environment `harbor`.

    Args:
        path: a folder of tasks, or a task.
        engine: `podman`, `docker`, or `auto`: the first of them that is installed.
        variables: names of variables of this process's environment, as HF_TOKEN, that `${NAME}` in a task's `env` may
            stand for. No other is ever given to a task.
        carried: more folders of the container whose content the tests see as the agent has left it, as /etc/nginx; `/`:
            all, where an agent that is root can replace the programs of the tests.
        network: true: containers have the engine's default network, as in harbor; false: none.
    Returns: rows without an answer; metadata `harbor`, which names the task's folder.
    Raises: FieldError: a task is broken, uses an unsupported feature, or can't be built.
    """

    path: str
    engine: Literal["auto", "podman", "docker"] = "auto"
    network: bool = False
    variables: Sequence[str] = ()
    carried: Sequence[str] = ()
    environment: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        require(self.engine in ("auto", "podman", "docker"), "engine", self.engine, "must be auto, podman or docker")
        named = isinstance(self.variables, list | tuple) and all(
            isinstance(name, str) and VARIABLE_NAME.fullmatch(name) for name in self.variables
        )
        require(named, "variables", self.variables, "must be a list of names of variables")
        object.__setattr__(self, "variables", tuple(self.variables))
        fine = isinstance(self.carried, list | tuple) and all(map(_is_folder, self.carried))
        bound = f"must be a list of absolute paths of folders {WITHOUT}, none in {', '.join(OURS)}"
        require(fine, "carried", self.carried, bound)
        object.__setattr__(self, "carried", tuple(self.carried))
        if self.environment is None:
            object.__setattr__(self, "environment", "harbor")

    def auto_outcome(self, field: str) -> tuple[str, str] | None:
        """See `proxima.config.outcomes`."""
        return auto_engine() if field == "engine" else None

    def rows(self, seed: int) -> Rows:
        """Return the tasks, ordered by the names of their folders; the seed is ignored."""
        return MappedRows(self._tasks(), self._row)

    def prepare(self) -> None:
        """Build or pull the images of all tasks."""
        with as_field_errors(ContainerFailed):
            program = engine_program(self.engine)
            tasks = self._tasks()
            if self.variables:
                given = [name for name in self.variables if name in os.environ]
                print(f"harbor: tasks may read {', '.join(given) or 'none'} of this environment", file=sys.stderr)
            for task in tasks:
                task.prepare(program)

    def _tasks(self) -> list[HarborTask]:
        top = Path(self.path).expanduser().resolve()
        if (top / "task.toml").is_file():
            folders = [top]
        else:
            folders = sorted(file.parent for file in top.glob("*/task.toml"))
        require(bool(folders), "path", self.path, "has no folder with a task.toml")
        with as_field_errors(ContainerFailed):
            return [read_task(folder, self.network, tuple(self.variables), tuple(self.carried)) for folder in folders]

    def _row(self, index: int, task: HarborTask) -> Row:
        facts = {"folder": str(task.folder), "engine": self.engine, "network": self.network}
        if self.variables:
            facts["variables"] = list(self.variables)
        if self.carried:
            facts["carried"] = list(self.carried)
        with as_field_errors(ContainerFailed):
            facts["digest"] = digest_of(task.folder)  # a resume refuses another
        return Row(messages=user_message(task.instruction), metadata={"harbor": facts})
