"""How trainer and engines lie on devices."""

from dataclasses import dataclass, field
from typing import Any

from proxima.config.model_size import ModelFacts
from proxima.config.sections import PLACEMENTS
from proxima.config.sections.ranks_section import check_layout
from proxima.data import FieldError, UserError, require
from proxima.lab.plan.devices import Devices
from proxima.model.parallel.sharding import Sharding


@dataclass(frozen=True)
class DeviceLayout:
    """Ranks of the trainer, and engines.

    Args:
        ranks: of the trainer, a device each.
        sharding: how they share the model, with the sizes of tensor, context and expert groups.
        engines: that generate. engine_devices: of each; its weights are split over them.
        colocated: the engines take turns with the ranks on the same devices.
        in_process: the engine is a part of rank 0.
        pipeline: stages that the layers are split over; proxima has 1, and published figures others.
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
        """Parts that an update is split into."""
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


def planned_layout(config: Any, devices: Devices) -> DeviceLayout:
    """The recipe's own layout on so many devices: all of them ranks, but with Ray, whose placement says how many.

    Raises:
        FieldError: the placement does not fit so many devices.
    """
    placement, engine = config.placement, getattr(config, "engine", None)
    count, here = devices.count, not hasattr(engine, "urls")
    ray = PLACEMENTS.holds(placement, "ray")
    ranks = placement.ranks if ray else count
    sharding = Sharding()
    if placement is not None and not PLACEMENTS.holds(placement, "local"):
        _placed(placement, ranks)
        sharding = Sharding.of(placement)
    servers = placement.engines if ray else 0
    if not servers:
        serve = getattr(engine, "serve", None)
        servers = 1 if here else serve.replicas if serve is not None else len(getattr(engine, "urls", ())) or 1
        layout = DeviceLayout(ranks, sharding, servers, 1, colocated=here or not ray, in_process=here)
    else:
        each = int(placement.gpus_of_ranks if placement.colocate else placement.gpus_per_engine)
        layout = DeviceLayout(ranks, sharding, servers, max(1, each), colocated=placement.colocate)
    bound = f"with {layout} needs {layout.devices} devices, and --devices has {count}"
    require(
        layout.devices <= count,
        "placement.ranks",
        ranks,
        bound,
        remedy=f"use --devices {layout.devices}x{devices.name}",
    )
    return layout


def _placed(placement: Any, ranks: int) -> None:
    try:
        check_layout(placement, ranks)
    except FieldError as error:
        error.field = f"placement.{error.field}"
        raise


def check_model(layout: DeviceLayout, model: ModelFacts) -> None:
    """FieldError where the dimensions of the layout do not divide the model.

    Raises:
        FieldError: with the nearest number that does.
        UserError: the plan knows no such model.
    """
    heads = model.kv_width
    if not heads:
        raise UserError("the plan knows decoders with attention only; this model has none")
    size = layout.sharding.expert_parallel
    if size > 1:
        require(
            model.all_experts > 0,
            "placement.expert_parallel",
            size,
            "splits experts, and the model has none",
            remedy="set it to 1",
        )
        legal = min(
            (n for n in range(1, model.all_experts + 1) if model.all_experts % n == 0),
            key=lambda n: (abs(n - size), -n),
        )
        require(
            model.all_experts % size == 0,
            "placement.expert_parallel",
            size,
            f"must divide the {model.all_experts} experts",
            remedy=f"set it to {legal}",
        )
    size = layout.sharding.tensor_parallel
    legal = min(
        (n for n in range(1, size + 1) if model.query_width % n == 0 and model.intermediate % n == 0),
        key=lambda n: (abs(n - size), -n),
    )
    divides = (model.query_width or model.hidden) % size == 0 and model.intermediate % size == 0
    require(
        divides,
        "placement.tensor_parallel",
        size,
        f"must divide the model's widths {model.query_width} and {model.intermediate}",
        remedy=f"set it to {legal}",
    )
