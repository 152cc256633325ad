"""Send a training command to a Ray cluster as a job, after checking its recipe on this machine. With `placement=ray`
the job starts the ranks; without it, the job trains in one process on the cluster's head. Ctrl-C leaves the job
running."""

import asyncio
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from proxima.cli.parameters import Argument, Overrides, Recipe
from proxima.config.problems import ConfigError, Problem
from proxima.config.sections import PLACEMENTS
from proxima.data.errors import UserError
from proxima.system.user_files import find_recipe, shipped_recipes

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

ADDRESS = "of the cluster's dashboard, http://HEAD:8265; default: RAY_ADDRESS"
WORKING_DIR = "folder that is sent with the job, which runs in a copy; default: this one, which the nodes must share"
RUNTIME_ENV = "YAML file with Ray's runtime environment of the job: env_vars, pip, py_modules"
TOKEN = "copy ~/.ray/auth_token from the cluster's head to this machine, and export RAY_AUTH_MODE=token"
PYTHON = "interpreter on the cluster that has proxima; default: the path of this one"
ELSEWHERE = ("model.device",)  # fields that only the cluster can check
ANSWER_SECONDS = 0.5  # between requests to the job server
AGENT_SECONDS = 60.0  # for the job agent of a new cluster to start
SILENT_SECONDS = 60.0  # for which a log that has ended is asked for again; that of a running job stays open
INTERRUPTED = 130
RAYS_OWN = re.compile(r"^(?:.*\sINFO job_manager\.py:\d+ -- |Running entrypoint for job ).*\n", re.MULTILINE)  # lines


def submit(
    recipe: Recipe,
    override: Overrides = (),
    *,
    address: Annotated[str | None, Argument(ADDRESS, "URL")] = None,
    working_dir: Annotated[str | None, Argument(WORKING_DIR, "DIR")] = None,
    runtime_env: Annotated[str | None, Argument(RUNTIME_ENV, "FILE")] = None,
    python: Annotated[str | None, Argument(PYTHON, "PATH")] = None,
    resume: Annotated[bool, Argument("resume the run in the folder")] = False,
    no_wait: Annotated[bool, Argument("print the job's name and return")] = False,
) -> int:
    """Submit the job and follow its output; return its exit code."""
    config = check_recipe(recipe, override)
    folder = None if working_dir is None else sent_folder(working_dir, recipe, override)
    environment = read_environment(runtime_env)
    words = [python or sys.executable, "-m", "proxima", "train", recipe_there(recipe, folder), *override]
    if resume:
        words.append("--resume")
    entrypoint = f"exec {shlex.join(words)}"
    if folder is None:
        entrypoint = f"cd {shlex.quote(str(Path.cwd()))} && {entrypoint}"
    else:
        environment = environment | {"working_dir": str(folder)}
    client = connect(address)
    if PLACEMENTS.holds(config.placement, "local"):
        print("note: placement is local: the job computes in one process, on the cluster's head", file=sys.stderr)
    job = submit_job(client, entrypoint, environment)
    where = f" --address {shlex.quote(address)}" if address else ""
    how_to = f"`ray job logs {job} --follow{where}` follows it, `ray job stop {job}{where}` stops it"
    if no_wait:
        print(f"job {job}; {how_to}", flush=True)
        return 0
    print(f"job {job}", flush=True)
    try:
        return follow_job(client, job, how_to)
    except KeyboardInterrupt:
        print(f"\nthe job is still running: {how_to}", file=sys.stderr)
        return INTERRUPTED


def check_recipe(recipe: str, overrides: Sequence[str]) -> Any:
    """Check the recipe and return the config of the job. Raises `ConfigError` for the problems that the job would
    find, except those that only the cluster's machines can check."""
    from proxima.config import resolution, validate

    resolved = resolution.resolve(recipe, overrides, root=None)
    problems = [problem for problem in validate.check(resolved) if not is_of_cluster(problem)]
    if problems:
        raise ConfigError(problems)
    return resolved.config


def is_of_cluster(problem: Problem) -> bool:
    """True if only the cluster can check the field: its devices, and files at absolute paths that don't exist here."""
    path = problem.value or ""
    return problem.path in ELSEWHERE or (path.startswith("/") and not Path(path).exists())


def sent_folder(working_dir: str, recipe: str, overrides: Sequence[str]) -> Path:
    """The folder that is sent; the run must be written elsewhere, because Ray deletes the copy."""
    folder = Path(working_dir).expanduser().absolute()
    if not folder.is_dir():
        raise UserError(f"--working-dir {working_dir}: is not a folder")
    named = [word.partition("=")[2] for word in overrides if word.startswith("folder=")]
    if not (named and named[-1].startswith("/")):
        reason = "the job runs in a copy of --working-dir, which Ray deletes with the run in it"
        raise UserError(reason, remedy="add folder=/…, an absolute path that stays")
    return folder


def recipe_there(recipe: str, folder: Path | None) -> str:
    """The name of the recipe in the job: a local file by its path in the copy, or by its absolute path."""
    path = find_recipe(recipe).absolute()
    if recipe in shipped_recipes() and not Path(recipe).exists():
        return recipe
    if folder is None:
        return str(path)
    if not path.is_relative_to(folder):
        raise UserError(f"{recipe}: is not in --working-dir {folder}", remedy="name a folder that has it")
    return str(path.relative_to(folder))


def read_environment(file: str | None) -> dict[str, Any]:
    """Read the runtime environment from a YAML file; empty without a file."""
    if file is None:
        return {}
    import yaml

    try:
        read = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--runtime-env {file}: can't be read: {' '.join(str(error).split())}") from None
    if not isinstance(read, dict):
        raise UserError(f"--runtime-env {file}: must be a mapping of Ray's runtime environment: {{env_vars: {{…}}}}")
    return read


def connect(address: str | None) -> "JobSubmissionClient":
    """Connect to the cluster's job server."""
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError:
        raise UserError("proxima submit needs the package ray", remedy="pip install 'proxima-rl[ray]'") from None
    logging.getLogger("ray").setLevel(logging.ERROR)  # it logs each connection that closes
    if address is not None and "://" not in address:  # Ray would search for a cluster there, for a long time
        raise UserError(f"--address {address} has no scheme", remedy=f"--address http://{address}")
    if address is not None:  # which these variables would override
        os.environ.pop("RAY_API_SERVER_ADDRESS", None)
        os.environ["RAY_ADDRESS"] = address
    elif not {"RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"} & os.environ.keys():
        raise UserError("no cluster is named", remedy="give --address http://HEAD:8265, or set RAY_ADDRESS")
    try:
        return JobSubmissionClient(address)
    except Exception as error:  # ConnectionError, RuntimeError, or the error of an address that is not valid
        reason = " ".join(str(error).split())
        shown = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
        if "uthenticat" in reason:
            reason = f"the job server at {shown} refuses this machine: it has no token of the cluster, or sends none"
            raise UserError(reason, remedy=TOKEN) from None
        raise UserError(f"no job server at {shown}: {reason}", remedy="is the dashboard of the cluster running?") from (
            None
        )


def submit_job(client: "JobSubmissionClient", entrypoint: str, environment: dict[str, Any]) -> str:
    """Submit a job and return its name. Waits for a cluster that has just been started."""
    until = time.monotonic() + AGENT_SECONDS
    while True:
        try:
            return str(client.submit_job(entrypoint=entrypoint, runtime_env=environment))
        except Exception as error:  # RuntimeError of the server, ValueError of a runtime environment, OSError
            reason = " ".join(str(error).split())
            if "No available agent" not in reason or time.monotonic() > until:
                raise UserError(f"the cluster refuses the job: {reason}") from None
        time.sleep(ANSWER_SECONDS)


def follow_job(client: "JobSubmissionClient", job: str, how_to: str) -> int:
    """Print the job's output until it ends; return the exit code of its command.

    Args:
        how_to: the remedy in the error if the connection breaks.
    """

    printed = 0
    news = time.monotonic()

    async def tail() -> None:
        nonlocal printed, news
        seen = 0
        async for text in client.tail_job_logs(job):
            seen = seen + len(text)
            if seen > printed:
                print(RAYS_OWN.sub("", text[printed - seen :]), end="", flush=True)
                printed = seen
                news = time.monotonic()

    try:
        asyncio.run(tail())
        while not (info := client.get_job_info(job)).status.is_terminal():
            if time.monotonic() - news > SILENT_SECONDS:
                what = f"its log has ended, but Ray reports the job as {info.status.value}: its node may be gone"
                raise UserError(what, remedy=how_to)
            time.sleep(ANSWER_SECONDS)
            asyncio.run(tail())
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the connection to the job server broke: {reason}", remedy=how_to) from None
    if info.status.value == "STOPPED":
        print("the job was stopped", file=sys.stderr)
        return INTERRUPTED
    if info.driver_exit_code is None and info.status.value != "SUCCEEDED":
        print(f"error: the job failed: {' '.join(str(info.message).split())}", file=sys.stderr)
    if info.driver_exit_code is not None:
        return int(info.driver_exit_code)
    return int(info.status.value != "SUCCEEDED")


COMMAND = submit
