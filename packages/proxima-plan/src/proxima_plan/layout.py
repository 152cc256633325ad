"""The placement of trainer and engines on devices."""

import math
import os
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from proxima.config.sections import PLACEMENTS
from proxima.config.sections.placement import (
    check_layout,
    engines_can_start,
    launched_ranks,
    starts_servers,
    way_to_placed,
    weights_reach_servers,
)
from proxima.data import FieldError, require, within
from proxima.model.parallel.shard import check_split
from proxima.model.parallel.sharding import Sharding
from proxima_plan.devices import Devices
from proxima_plan.engine_settings import engine_settings
from proxima_plan.model_size import ModelFacts

DEFAULT_RANKS = 2  # of a torchrun that has not started
VISIBLE = "CUDA_VISIBLE_DEVICES"  # in `engine.serve.variables`: the servers have other devices than the ranks


@dataclass(frozen=True)
class DeviceLayout:
    """The ranks of the trainer, and the engines.

    Args:
        ranks: of the trainer, one device each.
        sharding: how the ranks share the model, with the sizes of tensor, context and expert groups.
        engines: number of engines; 0: nothing is generated.
        engine_devices: devices per engine, over which its weights are split.
        colocated: the engines take turns with the ranks on the same devices.
        in_process: the engine is a part of rank 0.
        split: devices of an engine that its weights are split over, if not all.
        awake: engines on the ranks' devices keep their memory while the ranks compute.
        stacked: engines on one device.
        elsewhere: the engines have devices of their own that are not counted.
        pipeline: stages that the layers are split over; 1 in proxima, more in some published figures.
        node: devices of a node.
    """

    ranks: int = 1
    sharding: Sharding = field(default_factory=Sharding)
    engines: int = 1
    engine_devices: int = 1
    colocated: bool = True
    in_process: bool = False
    split: int = 0
    awake: bool = False
    stacked: int = 1
    elsewhere: bool = False
    pipeline: int = 1
    node: int = 8

    @property
    def sharded(self) -> bool:
        """True if a rank gathers what it computes with. A single one does if a field of its sharding is set."""
        return self.ranks > 1 or self.sharding != Sharding()

    @property
    def shares(self) -> int:
        """The number of parts that an update is split into."""
        return max(1, self.ranks // (self.sharding.ranks_per_share * self.pipeline))

    @property
    def parts(self) -> int:
        """The number of ranks that weights and optimizer state are split over."""
        sharding = self.sharding
        ranks = self.ranks
        if sharding.kind == "hybrid":
            return min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", self.node)))
        if sharding.kind == "full":
            return ranks
        return min(ranks, sharding.tensor_parallel * self.pipeline)

    @property
    def engine_split(self) -> int:
        """The number of devices that the weights of an engine are split over."""
        return self.split or self.engine_devices

    @property
    def devices(self) -> int:
        if self.colocated or self.elsewhere:
            beside = 0
        else:
            beside = self.engines * self.engine_devices
        return self.ranks + beside

    def local(self, model: ModelFacts) -> ModelFacts:
        """The model that a rank computes with after gathering a layer: its pipeline stage, with all widths that a
        tensor group splits divided by its size. The states between the layers are not split."""
        t = self.sharding.tensor_parallel
        layers = math.ceil(model.layers / self.pipeline)
        experts = model.all_of_experts // model.layers
        layer = (model.layer - experts) // t + experts // (t * self.sharding.expert_parallel)
        ends = (model.parameters - model.layers * model.layer) * layers // model.layers
        return replace(
            model,
            parameters=layers * layer + max(0, ends) // t,
            layers=layers,
            intermediate=model.intermediate // t,
            query_width=model.query_width // t,
            kv_width=max(1, model.kv_width // t),
            vocabulary=math.ceil(model.vocabulary / t),
            layer=layer,
        )

    def __str__(self) -> str:
        s = self.sharding
        groups = [("tensor", s.tensor_parallel), ("context", s.context_parallel), ("expert", s.expert_parallel)]
        split = "".join(f", {name} {size}" for name, size in [*groups, ("pipeline", self.pipeline)] if size > 1)
        if self.ranks > 1:
            ranks = f"{self.ranks} ranks ({s.kind}{split})"
        else:
            ranks = "1 rank"
        if self.in_process:
            which = "of which rank 0" if self.ranks > 1 else "which"
            return f"{ranks}, {which} generates too"
        of = ""
        if self.engine_devices > 1:
            of = f" of {self.engine_devices} devices"
        if self.split not in (0, self.engine_devices):
            of += f", weights on {self.split} of them,"
        engines = f"{self.engines} engine{'s' * (self.engines > 1)}{of}"
        if self.elsewhere:
            where = "elsewhere"
        elif self.colocated:
            where = "on the same devices"
        else:
            where = "beside them"
        if self.engines:
            return f"{ranks}, {engines} {where}"
        return ranks


def key_parts(model: ModelFacts, devices: int) -> int:
    """Return the number of devices of an engine with distinct keys and values: no head is split, and with fewer heads
    than devices several devices have the same ones."""
    return math.gcd(devices, model.kv_heads)


def is_local(placement: Any) -> bool:
    """Return True if the placement has one process."""
    return placement is None or PLACEMENTS.holds(placement, "local")


def placed_ranks(placement: Any) -> int:
    """The number of ranks of a placement. Only torchrun knows its own: that of WORLD_SIZE or, before it has started,
    the smallest that the groups allow, at least `DEFAULT_RANKS`."""
    if is_local(placement):
        return 1
    sharding = Sharding.of(placement)
    smallest = math.lcm(DEFAULT_RANKS, sharding.ranks_per_share, sharding.expert_parallel)
    return getattr(placement, "ranks", None) or launched_ranks() or smallest


def planned_layout(config: Any, devices: Devices) -> DeviceLayout:
    """Return the recipe's own layout on these devices. Every device is a rank, except with Ray, whose placement sets
    the number of ranks.

    Raises:
        FieldError: the placement does not fit these devices.
    """
    placement = config.placement
    engine = getattr(config, "engine", None)
    count = devices.count
    here = not hasattr(engine, "urls")
    ray = PLACEMENTS.holds(placement, "ray")
    ranks = placement.ranks if ray else count
    sharding = Sharding()
    if not is_local(placement):
        with within("placement"):
            check_layout(placement, ranks)
        sharding = Sharding.of(placement)
    layout = DeviceLayout(ranks, sharding, node=devices.kind.node)
    if engine is None:
        layout = replace(layout, engines=0)
    elif here:
        layout = replace(layout, in_process=True)
    else:
        layout = _with_servers(layout, config, ray=ray)
    bound = f"takes {layout.devices} devices for {layout}, and --devices has {count}"
    require(
        layout.devices <= count,
        "placement.ranks",
        ranks,
        bound,
        remedy=f"use --devices {layout.devices}x{devices.kind.name}, or another layout: --propose lists some",
    )
    return layout


def _with_servers(layout: DeviceLayout, config: Any, *, ray: bool) -> DeviceLayout:
    """Add the servers that the placement or `engine.serve` starts, or those at `engine.url`.

    Raises:
        FieldError: a server needs more devices than it has, or new weights do not reach it.
    """
    placement = config.placement
    engine = config.engine
    settings = engine_settings(config)
    for check in (engines_can_start, weights_reach_servers):
        for finding in check(placement, engine, config.model):
            assert isinstance(finding, tuple)
            field, message = finding
            raise FieldError(field, attrgetter(field)(config), message)
    copies = settings.copies
    if starts_servers(placement):
        given = float(placement.gpus_of_server)
        each = max(1, int(given))
        stacked = max(1, int(1 / given)) if 0 < given < 1 else 1
        split = 0 if settings.split == each // copies else settings.split
        layout = replace(layout, engines=placement.engines * copies, engine_devices=each // copies, split=split)
        layout = replace(layout, colocated=placement.colocate, stacked=stacked)
        elsewhere = layout.devices > layout.node
        with within("engine"):
            way_to_placed(placement, engine, adapter_rank=config.model.adapter_rank, elsewhere=elsewhere)
        return layout
    if engine.serve is None:  # at engine.url
        layout = replace(layout, engines=len(engine.urls), awake=True, colocated=not ray and not settings.remote)
        return replace(layout, elsewhere=settings.remote)
    count = engine.serve.replicas * copies
    elsewhere = VISIBLE in engine.serve.variables
    layout = replace(layout, engines=count, engine_devices=settings.split, awake=True, stacked=engine.serve.replicas)
    return replace(layout, colocated=not elsewhere, elsewhere=elsewhere)


def check_model(layout: DeviceLayout, config: Any, *, adapters: bool) -> None:
    """Refuse a layout that the trainer or the engines refuse for a model with this `transformers` config.

    Raises:
        FieldError: it names the nearest number that is possible.
    """
    check_split(config, None, layout.sharding, layout.ranks, adapters=adapters)
    heads = config.get_text_config().num_attention_heads
    size = layout.engine_split
    bound = f"gives each engine {size} devices, which must divide the {heads} attention heads"
    require(heads % size == 0, "placement.engines", layout.engines, bound, remedy="start other engines")
