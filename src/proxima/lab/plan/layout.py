"""The placement of trainer and engines on devices."""

import math
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig

from proxima.config.model_size import ModelFacts
from proxima.config.sections import PLACEMENTS
from proxima.config.sections.ranks_section import check_layout
from proxima.data import require, within
from proxima.lab.plan.devices import Devices
from proxima.model.parallel.refusals import check_split
from proxima.model.parallel.sharding import Sharding


@dataclass(frozen=True)
class DeviceLayout:
    """The ranks of the trainer, and the engines.

    Args:
        ranks: of the trainer, one device each.
        sharding: how the ranks share the model, with the sizes of tensor, context and expert groups.
        engines: number of engines. engine_devices: devices per engine, over which its weights are split.
        colocated: the engines take turns with the ranks on the same devices.
        in_process: the engine is a part of rank 0.
        pipeline: stages that the layers are split over; 1 in proxima, more in some published figures.
    """

    ranks: int = 1
    sharding: Sharding = field(default_factory=Sharding)
    engines: int = 1
    engine_devices: int = 1
    colocated: bool = True
    in_process: bool = False
    pipeline: int = 1

    @property
    def shares(self) -> int:
        """The number of parts that an update is split into."""
        return self.ranks // (self.sharding.together * self.pipeline)

    @property
    def devices(self) -> int:
        return self.ranks if self.colocated else self.ranks + self.engines * self.engine_devices

    def __str__(self) -> str:
        s = self.sharding
        groups = [("tensor", s.tensor_parallel), ("context", s.context_parallel), ("expert", s.expert_parallel)]
        split = "".join(f", {name} {size}" for name, size in [*groups, ("pipeline", self.pipeline)] if size > 1)
        where = "on the same devices" if self.colocated else "beside them"
        of = f" of {self.engine_devices} devices" if self.engine_devices > 1 else ""
        engines = "rank 0 generates" if self.in_process else f"{self.engines} engine{'s' * (self.engines > 1)}{of}"
        return f"{self.ranks} rank{'s' * (self.ranks > 1)} ({s.kind}{split}), {engines} {where}"


def key_parts(model: ModelFacts, devices: int) -> int:
    """Return the number of devices of an engine with distinct keys and values: no head is split, and with fewer heads
    than devices several devices have the same ones."""
    return math.gcd(devices, model.kv_heads) if model.kv_heads else devices


def planned_layout(config: Any, devices: Devices) -> DeviceLayout:
    """Return the recipe's own layout on these devices. Every device is a rank, except with Ray, whose placement sets
    the number of ranks.

    Raises:
        FieldError: the placement does not fit these devices.
    """
    placement, engine = config.placement, getattr(config, "engine", None)
    count, here = devices.count, not hasattr(engine, "urls")
    ray = PLACEMENTS.holds(placement, "ray")
    ranks = placement.ranks if ray else count
    sharding = Sharding()
    if placement is not None and not PLACEMENTS.holds(placement, "local"):
        with within("placement"):
            check_layout(placement, ranks)
        sharding = Sharding.of(placement)
    servers = placement.engines if ray else 0
    if not servers:
        serve = getattr(engine, "serve", None)
        servers = 1 if here else serve.replicas if serve is not None else len(getattr(engine, "urls", ())) or 1
        layout = DeviceLayout(ranks, sharding, servers, 1, colocated=here or not ray, in_process=here)
    else:
        each = int(placement.gpus_of_ranks if placement.colocate else placement.gpus_per_engine)
        layout = DeviceLayout(ranks, sharding, servers, max(1, each), colocated=placement.colocate)
    bound = f"takes {layout.devices} devices for {layout}, and --devices has {count}"
    require(
        layout.devices <= count,
        "placement.ranks",
        ranks,
        bound,
        remedy=f"use --devices {layout.devices}x{devices.name}, or another layout: --propose lists some",
    )
    return layout


def check_model(layout: DeviceLayout, config: Any, *, adapters: bool) -> None:
    """Refuse a layout that the trainer or the engines refuse for a model with this `transformers` config.

    Raises:
        FieldError: it names the nearest number that is possible.
    """
    check_split(config, None, layout.sharding, layout.ranks, adapters=adapters)
    heads, size = config.get_text_config().num_attention_heads, layout.engine_devices
    bound = f"gives each engine {size} devices, which must divide the {heads} attention heads"
    require(heads % size == 0, "placement.engines", layout.engines, bound, remedy="start other engines")


def known_config(model: ModelFacts) -> Any:
    """Build a `transformers` config with the fields that `check_model` reads, for a model without an available one."""
    kind = "qwen3_moe" if model.all_experts else "qwen3" if model.normed else "llama"
    experts = {"num_experts": model.all_experts} if model.all_experts else {}
    return AutoConfig.for_model(
        kind,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.query_width // model.heads,
        vocab_size=model.vocabulary,
        **experts,
    )
