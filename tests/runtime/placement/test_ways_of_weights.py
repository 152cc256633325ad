"""Every kind of engine in every place: new weights reach its servers in a way that `explain` and `plan` name alike, or
one line refuses it before a server starts, with remedies that pass."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxima.config.outcomes import field_outcomes
from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima.config.resolved import Resolved
from proxima.config.sections.placement import engines_can_start
from proxima.config.validate import require_sound
from proxima.data import FieldError, within
from proxima.engine.http.dialect import ServerFacts
from proxima.engine.http.weights.transport import Receivers, choose_transport
from proxima.engine.http.weights.weight_folders import FolderTransport
from proxima.runtime.placement.engine_group import EngineGroup, engine_plan
from proxima.system.user_files import shipped_layouts, shipped_recipes
from proxima_plan.devices import read_devices
from proxima_plan.engine_settings import engine_settings
from proxima_plan.layout import planned_layout
from tests.engine.http.plain_servers import Plain


class OwnServers(Plain):
    """Servers of somebody's own kind, which proxima can't start."""


class OwnTransport(FolderTransport):
    """A way of somebody's own."""

    @classmethod
    def unreached(cls, servers: Any) -> str | None:
        return None


OWN, OWN_WAY = f"{__name__}:OwnServers", f"{__name__}:OwnTransport"
FOUR = 4  # GPUs of a server, where it has some
CPUS = {"gpus_per_rank": 0, "gpus_per_engine": 0}
ADDRESS = {"url": "http://192.0.2.1:8000", "allow_remote": True, "token_env": "A_TOKEN"}
PLACES: dict[str, dict[str, Any]] = {  # of the servers; those of a placement are 32
    "ranks' GPUs": {"placement": {"kind": "ray", "ranks": 128, "engines": 32, "colocate": True}},
    "other GPUs": {"placement": {"kind": "ray", "ranks": 8, "engines": 32, "gpus_per_engine": FOUR}},
    "CPUs": {"placement": {"kind": "ray", "ranks": 8, "engines": 32, **CPUS}},
    "started": {"engine": {"serve": {}}},
    "here": {},
    "remote": {"engine": ADDRESS},
}
PLACED = ("ranks' GPUs", "other GPUs", "CPUs")
WAYS = ("auto", "group", "ipc", "folder", "adapters", OWN_WAY)
OF_WAYS = ("engine.transfer", "engine.weight_folder", "engine.adapters_only")
FOLDER = "/shared/weights"


@dataclass(frozen=True)
class Case:
    """A layout, and what is expected of it."""

    engine: str
    place: str
    way: str
    split: int
    nodes: int

    def config(self) -> dict[str, Any]:
        """The sections of the recipe that it sets."""
        sections: dict[str, Any] = deepcopy(PLACES[self.place])
        engine = sections.setdefault("engine", {})
        engine["kind"] = self.engine
        if self.way == "adapters":
            sections["model.lora"] = {"rank": 4}
            engine["adapters_only"] = True
        elif self.way != "auto":
            engine["transfer"] = self.way
        if self.split > 1:
            engine["serve"] = {"arguments": ["--tensor-parallel-size", str(self.split)]}
        return sections

    def expected(self) -> str:
        """The way by which weights get there, or the field that is refused."""
        kind, place, way = self.engine, self.place, self.way
        on_gpus, shared = place in ("ranks' GPUs", "other GPUs"), place == "ranks' GPUs"
        elsewhere = place == "remote" or self.nodes > 1
        # 1. proxima starts vLLM and SGLang
        if kind == OWN and place in (*PLACED, "started"):
            return "engine.kind" if place == "started" else "placement.engines"
        # 2. a server has the devices over which it is split
        if on_gpus and self.split > FOUR:
            return "engine.serve.arguments"
        # 3. adapters alone are for vLLM
        if way == "adapters" and kind != "vllm":
            return "engine.adapters_only"
        # 4. a folder of this machine is not seen elsewhere
        reached = {OWN_WAY} if elsewhere else {OWN_WAY, "folder", "adapters"}
        # 5. a group has one member on a GPU
        if kind != OWN and not shared:
            reached.add("group")
        # 6. memory is shared on a GPU or on a machine, with proxima's own worker
        if kind == "vllm" and (shared or (not elsewhere and place != "other GPUs")):
            reached.add("ipc")
        if way != "auto":
            field = "engine.weight_folder" if way == "adapters" else "engine.transfer"
            return way if way in reached else field
        order = ("ipc", "group", "folder") if on_gpus else ("folder", "group")
        return next((name for name in order if name in reached), "engine.weight_folder")


def cases() -> Iterator[Case]:
    """The whole product. Who has an address was started elsewhere: its split and nodes are not in the recipe."""
    for engine, place, way, split, nodes in product(("vllm", "sglang", OWN), PLACES, WAYS, (1, 2, 4, 8), (1, 2, 16)):
        started = engine != OWN and place in (*PLACED, "started")
        if (started or split == 1) and (place in PLACED or nodes == 1):
            yield Case(engine, place, way, split, nodes)


def resolved_of(sections: Mapping[str, Any]) -> Resolved[Any]:
    return resolve("quickstart", [f"{name}={json.dumps(section)}" for name, section in sections.items()])


@pytest.fixture
def refusal(monkeypatch, tmp_path):
    """What refuses a recipe whose servers are on so many nodes: `explain`, or the supervisor before a server starts."""
    monkeypatch.setenv("A_TOKEN", "key")
    found = dict[str, Any]()

    def of(sections: Mapping[str, Any], nodes: int) -> list[tuple[str, str]] | Resolved[Any]:
        if (text := repr(sections)) not in found:
            try:
                found[text] = resolved_of(sections)
                require_sound(found[text])
            except ConfigError as error:
                found[text] = [(problem.path, problem.message) for problem in error.problems]
        if isinstance(resolved := found[text], list):
            return resolved
        try:
            reach_all(resolved.config, nodes, tmp_path)
        except FieldError as error:
            return [(error.field, error.requirement)]
        return resolved

    return of


def reach_all(config: Any, nodes: int, folder: Path) -> None:
    """What the supervisor does when a cluster has reserved devices on so many nodes, and before a server starts; or
    what running servers of somebody's own are asked, which take files.

    Raises:
        FieldError: new weights do not get to all servers.
    """
    plan = engine_plan(config, folder)
    if plan is not None:
        group = object.__new__(EngineGroup)
        group.spec, group.plan, group.bundles = config.placement, plan, None
        table = {"bundles_to_node_id": dict(enumerate(range(nodes)))}
        module = SimpleNamespace(placement_group_table=lambda bundles: table)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "ray.util.placement_group", module)
            group._require_reach()
    elif isinstance(config.engine, OwnServers):
        facts = [ServerFacts(server="own", model="", transfers=("folder",))]
        with within("engine"):
            choose_transport(Receivers(facts, config.engine, adapter_rank=config.model.adapter_rank))


def remedied(sections: Mapping[str, Any], field: str, message: str) -> Iterator[dict[str, Any]]:
    """The recipe with each of the remedies at the end of a message."""
    name = field
    for remedy in re.split(r",? or ", message.rpartition("; ")[2]):
        changed: dict[str, Any] = deepcopy(dict(sections))
        for step in re.split(r", and ", remedy):
            step = step.removeprefix("set ")
            words = re.fullmatch(r"(?:use )?([\w., ]+?)(?:(?:=| to )(.*))?", step)
            assert words is not None, message
            target, value = words.groups()
            if value is None:
                values = target.split(", ")
            else:
                name = field if target == "it" else target if "." in target else f"{field.rpartition('.')[0]}.{target}"
                values = [value]
            for value in values[1:]:
                yield changed_to(changed, name, value)
            changed = changed_to(changed, name, values[0])
        yield changed


def changed_to(sections: Mapping[str, Any], path: str, value: str) -> dict[str, Any]:
    changed: dict[str, Any] = deepcopy(dict(sections))
    section, name = path.split(".", 1)
    known = {"true": True, "false": False, "null": None}.get(value, int(value) if value.isdecimal() else value)
    changed.setdefault(section, {})[name] = FOLDER if value.startswith("a folder that") else known
    return changed


def passing(refusal: Any, sections: Mapping[str, Any], nodes: int) -> int:
    """The number of remedies for the first line that refuses a recipe, each of which makes it pass, or leaves what the
    other lines refuse."""
    first, *others = refusal(sections, nodes)
    allowed = {field for field, _ in others}
    if first[0] not in OF_WAYS[:2]:  # ways are asked of a kind that can be started, on devices that it has
        allowed.update(OF_WAYS)
    count = 0
    for changed in remedied(sections, *first):
        count += 1
        answer = refusal(changed, nodes)
        if isinstance(answer, list):
            assert {field for field, _ in answer} <= allowed, (sections, first, changed, answer)
            count += passing(refusal, changed, nodes)
    assert count, first
    return count


def explained_way(resolved: Resolved[Any], nodes: int) -> str:
    """The way that `explain` names for `transfer: auto`, or the recipe's own."""
    engine = resolved.config.engine
    if engine.adapters_only or engine.transfer != "auto":
        return "adapters" if engine.adapters_only else engine.transfer
    known = [outcome for outcome in field_outcomes(resolved.config) if outcome.path == "engine.transfer"]
    if not known:
        return "asked"
    on_several = re.search(r"; (\w+) if they are on several nodes", known[0].reason)
    return on_several[1] if on_several and nodes > 1 else known[0].value


def planned_way(resolved: Resolved[Any], nodes: int) -> str:
    """The way that a plan prices, with all devices on one node or eight on each."""
    config = resolved.config
    on_cpu = not getattr(config.placement, "gpus_per_rank", 0)
    (devices,) = read_devices("256xH100-80G")
    layout = planned_layout(config, replace(devices, kind=replace(devices.kind, node=256 if nodes == 1 else 8)))
    adapters = config.model.lora is not None
    return engine_settings(config).way(adapters=adapters, colocated=layout.colocated, cpu=on_cpu)


@pytest.mark.slow
def test_every_layout_has_a_way_or_a_remedy(refusal, monkeypatch):
    """A plan knows no nodes of CPUs, and no servers of somebody's own."""
    monkeypatch.setattr("proxima.engine.http.server_settings.has_nvidia_gpu", lambda: False)
    started, remedies = Counter[str](), 0
    for case in cases():
        sections = case.config()
        answer, expected = refusal(sections, case.nodes), case.expected()
        if isinstance(answer, list):
            assert answer[0][0] == expected, (case, answer)
            remedies += passing(refusal, sections, case.nodes)
            continue
        started[expected] += 1
        named = explained_way(answer, case.nodes)
        assert named in (expected, "asked" if case.place == "remote" or case.engine == OWN else expected), case
        if case.engine != OWN and (case.place != "CPUs" or case.nodes == 1):
            assert planned_way(answer, case.nodes) == expected, case
    assert min(started.values()) > 10 and set(started) == {"group", "ipc", "folder", "adapters", OWN_WAY}
    assert remedies > 500


def test_the_layouts_of_the_recipes_start_with_weights(tmp_path):
    """By `ipc`, from each rank to the server on its GPU, whatever the number of nodes."""
    assert len(shipped_layouts()) == 6
    for layout in shipped_layouts():
        family = layout.rpartition("/")[2].rpartition("_")[0]
        recipe = next(name for name in shipped_recipes() if name.startswith(family))
        resolved = resolve(recipe, [f"@{layout}"])
        config = resolved.config
        assert not list(engines_can_start(config.placement, config.engine, config.model)), layout
        for nodes in (1, 16):
            assert explained_way(resolved, nodes) == planned_way(resolved, nodes) == "ipc", layout
            reach_all(config, nodes, tmp_path)
