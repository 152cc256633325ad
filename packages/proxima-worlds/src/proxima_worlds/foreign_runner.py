"""The program that gives the rows of an environment of verifiers or NeMo Gym, or plays its episodes.

    python foreign_runner.py '{"kind", "name", "args"}' describe|rows|play

The JSON also names `files`, the file of `proxima.system.foreign_folder`, by which files of the environment are read. It
runs in the interpreter that has the library and the environment. `describe` writes facts about the environment, and
`rows` its data after them: a line of JSON for each row, then `{"end": true}`. `play` speaks the protocol of
`proxima.environment.agent_process`, whose file the JSON names as `episodes`, with the values of its reward functions
as `parts`. Both APIs of verifiers are supported: environments with `load_environment`, and those of verifiers 0.4, a
taskset with a harness. A resources server of NeMo Gym runs in this process, without a port. The library's own output
goes to stderr. Imports only the standard library, those files and the library: proxima is not installed there.
"""

import asyncio
import contextlib
import contextvars
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import math
import os
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

Row = dict[str, Any]
bounded: Any = None  # `proxima.system.foreign_folder`, once `main` has loaded it
NO_ROLES = ("mean", "std", "invalid", "max", "part")  # see `proxima.data.players`
OWN = "environment_row"  # the column with the row as the environment has it


class BadField(Exception):
    """Something that the user must change: the field, its value, and what is wrong."""


def short(error: BaseException) -> str:
    """Return an exception as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:300]


# ---- environments with `load_environment` ----------------------------------------------------------------------------

raised: contextvars.ContextVar[dict[str, tuple[float, str]]] = contextvars.ContextVar("raised")
"""The reward functions without a value in an episode, by their names: each one's weight and what happened."""


class LoadedEnvironment:
    """An environment that a function `load_environment` of its package has made."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        from verifiers import load_environment

        try:
            self.environment: Any = load_environment(name, **args)
        except Exception as error:
            cause = error.__cause__ or error
            raise BadField("args", dict(args), f"are refused by the environment {name!r}: {short(cause)}") from None
        self.rubrics = list(_rubrics(self.environment))
        whole = [f.__name__ for rubric in self.rubrics for f in rubric.funcs if rubric._is_group_func(f)]
        if whole:
            message = f"has a reward function of whole groups, {', '.join(whole)}, which an episode alone doesn't have"
            raise BadField("name", name, message)
        for rubric in self.rubrics:
            weights = rubric.weights
            if len(weights) != len(rubric.funcs):
                weights = [1.0 for _ in rubric.funcs]
            rubric.funcs[:] = map(_reported, rubric.funcs, weights)
        self.rewards = [function.__name__ for rubric in self.rubrics for function in rubric.funcs]

    def rows(self, split: str) -> Iterator[Row]:
        if split == "eval":
            if getattr(self.environment, "eval_dataset_source", None) is None and self.environment.eval_dataset is None:
                raise BadField("split", split, "has no rows: the environment has no evaluation data")
            data = self.environment.get_eval_dataset()
        else:
            if getattr(self.environment, "dataset_source", None) is None and self.environment.dataset is None:
                raise BadField("split", split, "has no rows: the environment has evaluation data only (split: eval)")
            data = self.environment.get_dataset()
        for row in data:
            prompt = row["prompt"]
            if isinstance(prompt, str):
                messages = [{"role": "user", "content": prompt}]
            else:
                messages = prompt
            yield {"messages": _texts(messages), "answer": row.get("answer"), OWN: row}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def play(self, job: Row) -> Row:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        row = dict(job["row"])
        own = row.pop(OWN, None)
        if own is None:
            own = {"example_id": 0, "answer": "", **row, "prompt": row["messages"]}
        failures: dict[str, tuple[float, str]] = {}
        raised.set(failures)
        async with AsyncOpenAI(base_url=job["base_url"], api_key=job["api_key"], max_retries=0, timeout=None) as client:
            made = OpenAIChatCompletionsClient(client)
            result = await self.environment.run_rollout(own, made, job["model"], {})
        values = {name: value for name, value in (result["metrics"] or {}).items() if name not in failures}
        answer = {"reward": float(result["reward"]), "parts": _numbers(values)}
        error = result.get("error")
        reasons = []
        if error is not None and not _empty_answer(error):
            reasons.append(" ".join(str(_error_text(error)).split())[:300])
        raising = [f"the reward function {name} {what}" for name, (weight, what) in failures.items() if weight]
        if raising:
            return {"error": "; ".join([*reasons, raising[0]]), "unscored": True}
        if reasons:
            answer["error"] = reasons[0]
        return answer


def _error_text(error: Any) -> Any:
    if isinstance(error, Mapping):
        return error.get("error_chain_repr") or error.get("error") or error
    return repr(error)


def _empty_answer(error: Any) -> bool:
    """Return True for what the library calls an error, but is an answer of the policy: one without text."""
    return "EmptyModelResponseError" in str(_error_text(error))


def _rubrics(environment: Any) -> Iterator[Any]:
    """Yield the rubrics that have functions of their own: those of a group of environments or of rubrics, too."""
    waiting = [environment.rubric, *(each.rubric for each in getattr(environment, "envs", ()))]
    seen: list[Any] = []
    while waiting:
        rubric = waiting.pop(0)
        if any(rubric is each for each in seen):
            continue
        seen.append(rubric)
        waiting += getattr(rubric, "rubrics", ())
        if getattr(rubric, "funcs", None):
            yield rubric


def _reported(function: Callable[..., Any], weight: float) -> Callable[..., Any]:
    """Return a reward function that also records in `raised` why it has no value: the library makes a 0 of what it
    raises, and an exit would end the process with all its episodes."""
    name = getattr(function, "__name__", repr(function))

    @functools.wraps(function)
    async def reported(*args: Any, **named: Any) -> Any:
        try:
            value = function(*args, **named)
            if inspect.isawaitable(value):
                value = await value
            value = float(value)
        except (Exception, SystemExit) as error:
            raised.get()[name] = weight, f"raised {short(error)}"
            raise RuntimeError(f"{name} raised {short(error)}") from error
        if not math.isfinite(value):
            raised.get()[name] = weight, f"returned {value}"
            raise ValueError(f"{name} returned {value}")
        return value

    return reported


# ---- tasksets of verifiers 0.4 ---------------------------------------------------------------------------------------


class TasksetEnvironment:
    """A taskset, with the harness in which the policy works on a task."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils import loaders

        given = dict(args)
        try:
            config = loaders.resolve_env_config({**given, "taskset": {**given.get("taskset", {}), "id": name}})
            seats = [seat for seat, each in agent_config_fields(config).items() if each.client is None]
            if not seats:
                raise BadField("args", given, "give every agent a client of its own, so the policy plays none")
            unnamed = [seat for seat in seats if len(seats) > 1 and seat in NO_ROLES]
            if unnamed:
                raise BadField("name", name, f"has an agent {unnamed[0]!r}, whose name is that of a metric")
            for seat in seats:
                model = f"policy/{seat}" if len(seats) > 1 else None
                self._prepare(config, seat, model, given)
            self.environment: Any = loaders.load_environment(config)
        except BadField:
            raise
        except Exception as error:
            raise BadField("args", given, f"are refused by the environment {name!r}: {short(error)}") from None
        self.seats = tuple(seats)
        self.taskset = self.environment.taskset
        self.task_class = type(self.taskset).task_type()
        self.endless = not self.taskset.bounded
        self.rewards: list[str] = []

    def _prepare(self, config: Any, seat: str, model: str | None, given: Row) -> None:
        """Give the agent of a seat a runtime, and the name of the model as which it asks the policy."""
        from verifiers.v1 import SubprocessConfig
        from verifiers.v1.utils import loaders

        agent = getattr(config, seat)
        changes: Row = {}
        if model is not None:
            changes["model"] = model
        if "runtime" not in agent.model_fields_set:
            harness = config.agent_harnesses()[seat]
            if loaders.harness_class(harness.id).EXECUTES_CODE:
                message = f"let the harness {harness.id!r} run the model's commands on this machine, without a "
                message += f"sandbox; set args.{seat}.harness.id=null, or args.{seat}.runtime.type"
                raise BadField("args", given, message)
            changes["runtime"] = SubprocessConfig()
        setattr(config, seat, agent.model_copy(update=changes))

    def rows(self, split: str) -> Iterator[Row]:
        if split != "train":
            message = "has no rows: a taskset has one list of tasks; split it by `skip` and `size`, or by `args`"
            raise BadField("split", split, message)
        for task in self.taskset:
            data = task.data
            asked = data.prompt or ""
            if isinstance(asked, str):
                messages = [{"role": "user", "content": asked}]
            else:
                messages = data.model_dump()["prompt"]
            if data.system_prompt:
                messages = [{"role": "system", "content": data.system_prompt}, *messages]
            answer = getattr(data, "answer", None)
            yield {"messages": _texts(messages), "answer": answer, OWN: data.model_dump(mode="json")}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self.environment.serving():
            yield

    async def play(self, job: Row) -> Row:
        from verifiers.v1 import EvalClientConfig, ModelContext, SamplingConfig

        fields = self.task_class.data_type()
        row = dict(job["row"])
        own = row.pop(OWN, None)
        if own is None:
            own = {key: value for key, value in row.items() if key in fields.model_fields} | {"prompt": row["messages"]}
        task = self.task_class(fields.model_validate(own), self.environment.config.taskset.task)
        variable = f"PROXIMA_EPISODE_{job['id']}"  # where the library's client looks for its key
        os.environ[variable] = job["api_key"]
        try:
            client = EvalClientConfig(base_url=job["base_url"], api_key_var=variable)
            context = ModelContext(client=client, model=job["model"], sampling=SamplingConfig())
            (slot,) = self.environment.slots(task)
            episode = await self.environment.run_slot(slot, context)
        finally:
            del os.environ[variable]
        traces = {seat: [each for each in episode.traces if each.agent.name == seat] for seat in self.seats}
        played = [trace for several in traces.values() for trace in several]
        errors = [error for each in (episode, *played) for error in each.errors]
        if not episode.ok or not played:
            what = "no agent of the policy was run"
            if errors:
                what = f"{errors[-1].type}: {errors[-1].message}"
            return {"error": " ".join(what.split())[:300]}
        unscored = [name for trace in played for name, reward in trace.rewards.items() if reward is None]
        if unscored:
            return {"error": f"the reward {unscored[0]} was not computed", "unscored": True}
        rewards = {seat: _mean_reward(several) for seat, several in traces.items() if several}
        parts: dict[str, list[float]] = {}
        for seat, several in traces.items():
            before = f"{seat}/" if len(self.seats) > 1 else ""
            for trace in several:
                values = {name: reward.score for name, reward in trace.rewards.items()} | trace.metrics
                for name, value in _numbers(values).items():
                    parts.setdefault(before + name, []).append(value)
        means = {name: sum(values) / len(values) for name, values in parts.items()}
        if len(self.seats) > 1:
            return {"reward": rewards, "parts": means}
        return {"reward": rewards[self.seats[0]], "parts": means}


def _mean_reward(traces: list[Any]) -> float:
    """The mean reward of what one agent did in an episode; 0 for one that is not to be trained, in every episode, so
    that its advantage is 0, too."""
    rewards = [float(trace.reward) for trace in traces if trace.agent.trainable]
    return sum(rewards) / len(traces)


# ---- resources servers of NeMo Gym -----------------------------------------------------------------------------------


class ResourcesServer:
    """A resources server, which has tools and verifies what was done; the run plays its episodes."""

    def __init__(self, name: str, args: Mapping[str, Any]) -> None:
        given = dict(args)
        self.module = module = importlib.import_module(f"resources_servers.{name}.app")
        self.folder = os.path.dirname(str(module.__file__))
        from nemo_gym.base_resources_server import SimpleResourcesServer

        own: list[Any] = [
            each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__
        ]
        servers = [each for each in own if issubclass(each, SimpleResourcesServer)]
        if len(servers) != 1:
            raise BadField("name", name, f"has {len(servers)} resources servers in its app.py, not one")
        (server,) = servers
        settings = {"host": "", "port": 0, "entrypoint": "app.py", "name": name, "domain": "other", **given}
        config_class = server.model_fields["config"].annotation
        unknown = [field for field in given if field not in config_class.model_fields]
        if unknown:
            fields = ", ".join(sorted(config_class.model_fields))
            raise BadField("args", dict(args), f"have {unknown[0]!r}; the server's config has {fields}")
        try:
            config = config_class(**settings)
            self.app = server(config=config, server_client=_no_client()).setup_webserver()
        except Exception as error:
            raise BadField("args", dict(args), f"are refused by the environment {name!r}: {short(error)}") from None
        self.rewards: list[str] = []
        self.sessions: dict[int, tuple[Any, Row]] = {}  # of the episodes that are open: a client, and the row

    def rows(self, split: str) -> Iterator[Row]:
        names = ("train.jsonl", "example.jsonl") if split == "train" else ("validation.jsonl",)
        files = [os.path.join(self.folder, "data", name) for name in names]
        file = next(filter(os.path.isfile, files), None)
        if file is None:
            raise BadField("split", split, f"has no rows: there is no {files[0]}")
        for line in bounded.bounded_lines(Path(file)):
            row = json.loads(line)
            yield {"messages": _texts(_asked(row)), "answer": row.get("expected_answer"), OWN: row}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def play(self, job: Row) -> Row:
        """Do what a job of `proxima_worlds.nemo_gym` asks for in the episode that it numbers: `open` it with its row,
        `call` a tool, `verify` what was said, or `drop` it."""
        parts: dict[str, Callable[[Row], Awaitable[Row]]] = {
            "open": self._open,
            "call": self._call,
            "verify": self._verify,
            "drop": self._drop,
        }
        return {"value": await parts[job["do"]](job)}

    async def _open(self, job: Row) -> Row:
        httpx: Any = importlib.import_module("httpx")  # of that interpreter: this room imports none
        row = dict(job["row"])
        own = row.pop(OWN, None) or {**row, "responses_create_params": {"input": row["messages"]}}
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://gym", timeout=None)
        self.sessions[job["episode"]] = client, own
        (await client.post("/seed_session", json=own)).raise_for_status()
        return {"tools": [_offered(tool) for tool in _tools(own)]}

    async def _call(self, job: Row) -> Row:
        """Call a tool; what it answers, an error too, is for the model."""
        client, _ = self.sessions[job["episode"]]
        answer = await client.post(f"/{job['name']}", json=job["arguments"])
        return {"text": str(answer.text)}

    async def _verify(self, job: Row) -> Row:
        client, own = self.sessions[job["episode"]]
        response = {"id": "episode", "created_at": 0, "model": "policy", "object": "response", "tools": _tools(own)}
        response |= {"output": _items(job["messages"]), "parallel_tool_calls": True, "tool_choice": "auto"}
        answer = await client.post("/verify", json={**own, "response": response})
        answer.raise_for_status()
        verified = answer.json()
        if verified.get("mask_sample") is True:  # the server's own fault: no measure of the policy
            raise RuntimeError(f"the server can't verify it: {verified.get('failure_reason') or 'mask_sample'}")
        added = {key: value for key, value in verified.items() if key not in {*own, "response", "reward"}}
        components = added.pop("reward_components", None)
        parts = _numbers(added)
        if isinstance(components, Mapping):
            parts |= _numbers(components)
        return {"reward": verified["reward"], "parts": parts}

    async def _drop(self, job: Row) -> Row:
        client, _ = self.sessions.pop(job["episode"], (None, None))
        if client is not None:
            await client.aclose()
        return {}


SHOWN = ("name", "description", "parameters")  # of a tool


def _no_client() -> Any:
    """A client of other servers, of which there are none."""
    from nemo_gym.server_utils import ServerClient

    return ServerClient.model_construct(head_server_config=None, global_config_dict={})


def _asked(row: Row) -> list[Row]:
    """Return the messages with which a row of NeMo Gym begins."""
    parameters = row["responses_create_params"]
    asked = parameters["input"]
    first = parameters.get("instructions")
    if isinstance(asked, str):
        items = [{"role": "user", "content": asked}]
    else:
        items = asked
    if any("role" not in item for item in items):
        raise BadField("name", None, "has a row that begins with tool calls, which is not supported")
    roles = {"developer": "system"}
    messages = [{"role": roles.get(item["role"], item["role"]), "content": _plain(item["content"])} for item in items]
    if first:
        return [{"role": "system", "content": first}, *messages]
    return messages


def _plain(content: Any) -> Any:
    """Return the content of a message with parts named as in chat completions."""
    if isinstance(content, str):
        return content
    return [{**part, "type": str(part.get("type")).removeprefix("input_").removeprefix("output_")} for part in content]


def _tools(row: Row) -> list[Row]:
    return row["responses_create_params"].get("tools") or []


def _offered(tool: Row) -> Row:
    """A tool of a row as chat completions have it."""
    function = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": function | {key: tool[key] for key in SHOWN if tool.get(key) is not None}}


def _items(messages: list[Row]) -> list[Row]:
    """Messages of chat completions as output items of a response."""
    items: list[Row] = []
    for number, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        if "tool_call_id" in message:
            answer = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output", **answer})
        elif message["role"] != "assistant":  # what tells the model that its call can't be read
            items.append({"type": "message", "role": "user", "content": message["content"]})
        elif message["content"] or not calls:
            items.append(_said(message["content"], number))
        items += map(_called, calls)
    return items


def _said(text: str, number: int) -> Row:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed", "content": content}


def _called(call: Row) -> Row:
    made = {"type": "function_call", "call_id": call["id"], "id": call["id"], "status": "completed"}
    return {**made, "name": call["function"]["name"], "arguments": call["function"]["arguments"]}


# ---- all -------------------------------------------------------------------------------------------------------------


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are finite numbers."""
    numbers = {}
    for name, value in values.items():
        with contextlib.suppress(OverflowError):  # of an integer of hundreds of digits
            if isinstance(value, (bool, int, float)) and math.isfinite(value):
                numbers[name] = float(value)
    return numbers


def _texts(messages: list[Any]) -> list[dict[str, str]]:
    """Return the messages with their texts alone."""
    rows = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            if any(part.get("type") != "text" for part in content):
                raise BadField("name", None, "has a row with an image, which an environment of this kind can't show")
            content = "\n".join(part["text"] for part in content)
        rows.append({"role": message["role"], "content": content})
    return rows


def _module(name: str) -> Any:
    """Import the environment's package, or a taskset that comes with the library."""
    own = name.split("@")[0].split("/")[-1].replace("-", "_")
    for module in (f"verifiers.v1.tasksets.{own}", own):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise BadField("name", name, f"can't be imported: {short(error)}") from None
        except Exception as error:
            older = ""
            if "module 'verifiers'" in str(error):
                older = "; it was written for another version"
            raise BadField("name", name, f"can't be imported: {short(error)}{older}") from None
    raise BadField("name", name, f"is not an environment that {sys.executable} can import; install its package there")


def sources(module: Any) -> dict[str, str]:
    """Return the SHA-256 of a module's file; of a package, that of each Python file in its folder, by its name there.
    A module that lies in a package of the environment's own has the files of that folder."""
    file = getattr(module, "__file__", None)
    if file is None:
        return {}
    folder = os.path.dirname(file)
    names = [os.path.basename(file)]
    if hasattr(module, "__path__") or "." in module.__name__:
        names = []
        for where, _, files in os.walk(folder):
            names += [os.path.join(where, name) for name in files if name.endswith(".py")]
    if len(names) > bounded.MOST_FILES:
        raise BadField("name", module.__name__, f"has more than {bounded.MOST_FILES:,} Python files")
    try:
        places = [os.path.join(folder, name) for name in sorted(names)]
        return {os.path.relpath(place, folder): bounded.file_sha256(Path(place)) for place in places}
    except (OSError, ValueError) as error:
        raise BadField("name", module.__name__, f"has a file that can't be read: {short(error)}") from None


def loaded_environment(kind: str, name: str, args: Mapping[str, Any]) -> tuple[Any, Row]:
    """Load an environment, and describe it."""
    random.seed(0)  # rows that are drawn without a seed are then the same in every process
    if not name.strip():
        raise BadField("name", name, "must be the name of an installed environment")
    if kind == "nemo_gym":
        return _of_nemo_gym(name, args)
    return _of_verifiers(name, args)


def _of_nemo_gym(name: str, args: Mapping[str, Any]) -> tuple[Any, Row]:
    try:
        from importlib.metadata import version

        import nemo_gym  # noqa: F401
    except ImportError as error:
        raise BadField("python", sys.executable, f"can't import the package nemo_gym: {short(error)}") from None
    if importlib.util.find_spec("resources_servers") is None or not importlib.util.find_spec(
        f"resources_servers.{name}"
    ):
        raise BadField("name", name, f"is not a resources server of {sys.executable}")
    try:
        environment = ResourcesServer(name, args)
    except ImportError as error:
        needs = f"can't be imported: {short(error)}; install resources_servers/{name}/requirements.txt there"
        raise BadField("name", name, needs) from None
    facts = {"version": version("nemo-gym"), "sources": sources(environment.module), "rewards": environment.rewards}
    return environment, facts


def _of_verifiers(name: str, args: Mapping[str, Any]) -> tuple[Any, Row]:
    try:
        import verifiers
    except ImportError as error:
        raise BadField("python", sys.executable, f"can't import the package verifiers: {short(error)}") from None
    module = _module(name)
    version = getattr(verifiers, "__version__", "")
    with_function = hasattr(module, "load_environment")
    below_0_4 = hasattr(verifiers, "load_environment")
    if with_function and not below_0_4:
        message = f"has a load_environment, which verifiers {version} no longer knows; install verifiers<0.4 there"
        raise BadField("name", name, message)
    if not with_function and below_0_4:
        raise BadField("name", name, "has no function load_environment")
    environment = LoadedEnvironment(name, args) if with_function else TasksetEnvironment(name, args)
    facts = {"version": version, "sources": sources(module), "rewards": environment.rewards}
    return environment, facts | {"seats": list(getattr(environment, "seats", ()))}


def give_rows(given: Row, write: Callable[[Row], None]) -> None:
    """Write facts, the rows of a split and an end mark; or a problem."""
    write({"facts": {"python": sys.executable}})  # at once: this is an interpreter
    try:
        environment, facts = loaded_environment(given["kind"], given["name"], given["args"])
        write({"facts": facts})
        if "split" in given:
            skip = given["skip"]
            size = given["size"]
            end = None if size is None else skip + size
            try:
                if size is None and getattr(environment, "endless", False):
                    raise BadField("size", size, "must be given: the environment draws rows without an end")
                for row in islice(environment.rows(given["split"]), skip, end):
                    write({"row": row})
            except BadField as problem:
                field, value, message = problem.args
                if value is None:
                    value = given[field]
                raise BadField(field, value, message) from None
            except Exception as error:
                raise BadField("split", given["split"], f"can't be read: {short(error)}") from None
        write({"end": True})
    except BadField as problem:
        write({"problem": list(problem.args)})


def _of_proxima(name: str, file: str) -> Any:
    """A module of proxima that imports only the standard library, by its file."""
    found: Any = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def play(given: Row, write: Callable[[Row], None]) -> None:
    """Play the jobs that stdin gives until it ends, then exit at once, even if episodes are still running."""
    environment, _ = loaded_environment(given["kind"], given["name"], given["args"])
    episodes = _of_proxima("proxima_episodes", given["episodes"])

    async def played(job: Row) -> Row:
        answer: Row = await environment.play(job)
        given = answer.get("reward", 0.0)
        if isinstance(given, Mapping):
            values = list(given.values())
        else:
            values = [given]
        if not all(map(math.isfinite, values)):
            return {"error": f"the reward is {answer['reward']}", "unscored": True}
        return answer

    asyncio.run(episodes.serve_jobs(played, write, environment.serving()))


def main() -> None:
    """Run the command; a problem in `play` ends it with one line on stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # the library and the environment may print
    sys.stdout = os.fdopen(1, "w", closefd=False, encoding="utf-8", errors="backslashreplace", buffering=1)
    sys.path[0] = os.getcwd()  # not this folder, whose files have the names of packages
    given_paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [os.getcwd(), *map(os.path.abspath, given_paths)]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of the environment's own processes, which run in other folders
    logging.basicConfig(level=logging.ERROR)

    def write(message: Row) -> None:
        answers.write(json.dumps(message) + "\n")

    global bounded
    given = json.loads(sys.argv[1])
    command = sys.argv[2]
    bounded = _of_proxima("proxima_files", given["files"])
    if command == "play":
        try:
            play(given, write)
        except BadField as problem:
            field, value, message = problem.args
            sys.exit(f"{field}={value!r} {message}")
        except Exception as error:
            sys.exit(f"it can't be served: {short(error)}")
    else:
        give_rows(given, write)


if __name__ == "__main__":
    main()
