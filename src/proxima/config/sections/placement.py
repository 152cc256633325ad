"""The `placement` section: the processes in which a run computes, and how ranks share the trained models."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeGuard

from proxima.config.problems import require_at_least
from proxima.config.resolved import Findings, Resolved
from proxima.config.sections.model import ModelConfig
from proxima.data import FieldError, renamed, require, within
from proxima.data.errors import nearest_divisor
from proxima.data.kinds import Slot
from proxima.engine.serve.launch import LAUNCHES, Serve, devices_of_server
from proxima.model.files import BaseModel, base_of, is_adapter, is_at_hand
from proxima.model.parallel.shard import POLICY, auxiliary_sharding, require_splittable
from proxima.model.parallel.sharding import Sharding, ranks_for_tensors
from proxima.system.secret_values import HIDDEN, is_secret_name, is_secret_value

KIND = "placement.kind"
STARTED_BY = "PROXIMA_RANKS_STARTED_BY"  # set for ranks that something other than torchrun started
STARTED_AGAIN = "placement.restarts"  # in an error that already says what the ranks' supervisor will do
Placement = Annotated[  # the field of every run
    Any, Slot("proxima.config.sections:PLACEMENTS", default="local"), "the processes that compute"
]


@dataclass(frozen=True, kw_only=True)
class LocalPlacement:
    """One process."""


def is_supervised() -> bool:
    """True if a cluster's supervisor has started this process, and restarts all ranks when one dies."""
    return STARTED_BY in os.environ


RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which `torchrun` tells a rank about its group."""


@dataclass(frozen=True, kw_only=True)
class ShardingSpec:
    """Fields common to all ways of sharding a model over ranks; `proxima.model.parallel.Sharding` has the same
    fields."""

    kind: ClassVar[str]
    param_dtype: Annotated[
        Literal["bfloat16"] | None, "of the gathered weights in a forward; null: that of the master weights"
    ] = None

    @property
    def splits_one_rank(self) -> bool:
        """True if a single rank shards its models too, over itself: there is a setting that it would ignore
        otherwise."""
        return False


@dataclass(frozen=True, kw_only=True)
class FullSharding(ShardingSpec):
    """Each rank holds 1 / ranks of weights, gradients and optimizer state; layers are gathered when they compute."""

    kind: ClassVar[str] = "full"
    reshard_after_forward: Annotated[
        bool, "free gathered layers between forward and backward: less memory, gathered twice"
    ] = True
    offload: Annotated[bool, "keep the shards, and the optimizer's step, in CPU memory"] = False
    sum_gradients: Annotated[
        Literal["micro_batch", "update"],
        "when ranks add up gradients; update: once, and until then each holds all of them in float32, 4 bytes a weight",
    ] = "micro_batch"

    @property
    def splits_one_rank(self) -> bool:
        return self != FullSharding()


@dataclass(frozen=True, kw_only=True)
class HybridSharding(FullSharding):
    """Shards within a node, copies between nodes: only gradients cross the network."""

    kind: ClassVar[str] = "hybrid"


@dataclass(frozen=True, kw_only=True)
class ReplicatedModel(ShardingSpec):
    """Each rank holds the whole model; only gradients are summed."""

    kind: ClassVar[str] = "replicate"
    reshard_after_forward: ClassVar[bool] = False
    offload: ClassVar[bool] = False
    sum_gradients: ClassVar[str] = "update"


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """Fields common to all placements in several processes."""

    sharding: Annotated[
        Any, Slot("proxima.config.sections:SHARDINGS", default="full"), "how ranks share a trained model"
    ] = field(default_factory=FullSharding)
    tensor_parallel: Annotated[int, "neighbouring ranks that split each layer's matrices, and the vocabulary"] = 1
    context_parallel: Annotated[int, "ranks that split the tokens of a micro-batch between them"] = 1
    expert_parallel: Annotated[int, "ranks that split the experts of a mixture, and send each other its tokens"] = 1
    timeout: Annotated[float, "seconds that a rank waits for the others in a collective before the run fails"] = 1800.0

    def __post_init__(self) -> None:
        require_at_least(self, 1, "tensor_parallel", "context_parallel", "expert_parallel")
        require(1 <= self.timeout < math.inf, "timeout", self.timeout, "must be finite and >= 1 second")

    @property
    def shards_models(self) -> bool:
        """True if the models are sharded. A single rank trains like an ordinary process, unless a field of `sharding`
        is set: then it shards them over itself."""
        return launched_ranks() != 1 or bool(self.sharding.splits_one_rank)


def launched_ranks() -> int | None:
    """The number of ranks that a launcher, or the user in its place, has set in WORLD_SIZE; None if unset."""
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 0:
        return int(size)
    return None


def check_layout(placement: RankPlacement, ranks: int, of: str = "") -> None:
    """Raise FieldError if `ranks` ranks (0: any number) can't have the placement's layout. `of` completes their name in
    the message: ` of a node`."""
    tensor = placement.tensor_parallel
    context = placement.context_parallel
    expert = placement.expert_parallel
    noun = "ranks" if ranks > 1 else "rank"
    most = f"a divisor of the {ranks} {noun}{of}"
    legal = nearest_divisor(tensor, ranks_for_tensors(placement, ranks))
    require(ranks % tensor == 0, "tensor_parallel", tensor, f"must be {most}", remedy=f"set it to {legal}")
    left = ranks // tensor
    of_left = most if tensor == 1 else f"{most} over tensor_parallel={tensor}"
    legal = nearest_divisor(context, left)
    require(left % context == 0, "context_parallel", context, f"must be {of_left}", remedy=f"set it to {legal}")
    legal = nearest_divisor(expert, left)
    require(left % expert == 0, "expert_parallel", expert, f"must be {of_left}", remedy=f"set it to {legal}")
    whole = expert == 1 or placement.sharding.kind != "replicate"
    remedy = "use sharding full, or hybrid"
    require(whole, "expert_parallel", expert, "splits experts, and sharding is replicate", remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class TorchrunPlacement(RankPlacement):
    """The processes that torchrun or srun started, with RANK and WORLD_SIZE in their environment."""


@dataclass(frozen=True, kw_only=True)
class RayPlacement(RankPlacement):
    """Processes on a Ray cluster, which this process starts, watches, and restarts when one dies."""

    ranks: Annotated[int, "processes, one for each device"] = 1
    gpus_per_rank: Annotated[float, "0: a cluster without GPUs"] = 1.0
    cpus_per_rank: Annotated[float, "cores reserved for a rank"] = 1.0
    address: Annotated[
        str | None, "of the cluster; null: RAY_ADDRESS if it is set, else one on this machine that ends with the run"
    ] = None
    strategy: Annotated[
        Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"],
        "ranks on few nodes or on many; STRICT: on one node, or each on its own, or not at all",
    ] = "PACK"
    restarts: Annotated[int, "how many times the ranks are restarted, from the last checkpoint, after one died"] = 3
    start_timeout: Annotated[float, "seconds in which the cluster must grant and start the ranks"] = 600.0
    engines: Annotated[int, "servers of engine.kind that are started next to the ranks; 0: engine.url has them"] = 0
    max_engines: Annotated[
        int,
        "servers in all: more are started in the middle of the run as the cluster has free devices; 0: as `engines`",
    ] = 0
    gpus_per_engine: Annotated[float, "devices of each; 0: a cluster without GPUs"] = 1.0
    cpus_per_engine: Annotated[float, "cores reserved for each"] = 1.0
    colocate: Annotated[
        bool, "each server on the devices of ranks / engines ranks, which it leaves to them during updates"
    ] = False
    reward_workers: Annotated[
        int, "actors of a core each that run what runtime.reward_workers processes would; 0: these, beside rank 0"
    ] = 0
    env: Annotated[Mapping[str, str], "environment variables of the ranks, beside those of their node"] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, "ranks")
        check_layout(self, self.ranks)
        require_at_least(self, 0, "restarts", remedy="0 ends the run at the first death")
        gpus = self.gpus_per_rank
        require(gpus in (0, 1), "gpus_per_rank", gpus, "must be 0 or 1: a rank computes on one device")
        require_at_least(self, 0, "engines", "reward_workers")
        self._check_growth()
        if self.colocate:
            self._check_colocation()
        devices = self.gpus_per_engine
        require(0 <= devices < math.inf, "gpus_per_engine", devices, "must be finite and >= 0")
        for name in ("cpus_per_rank", "cpus_per_engine"):
            cpus = getattr(self, name)
            require(0 < cpus < math.inf, name, cpus, "must be finite and > 0")
        seconds = self.start_timeout
        require(1 <= seconds < math.inf, "start_timeout", seconds, "must be finite and >= 1 second")
        for name, value in self.env.items():
            plain = name.isprintable() and name != "" and "=" not in name
            require(plain, f"env.{name}", value, "is not the name of an environment variable")
            require(name not in RANK_VARIABLES, f"env.{name}", value, "is set for each rank by its place; leave it out")
            secret = is_secret_name(name) or is_secret_value(value)
            remedy = "set it in the environment of the nodes"
            require(not secret, f"env.{name}", HIDDEN, "looks like a secret, and config.yaml is stored", remedy=remedy)

    def _check_growth(self) -> None:
        most = self.max_engines
        count = self.engines
        if most:
            require(
                count > 0, "max_engines", most, "needs servers to begin with, and engines is 0", remedy="set engines"
            )
            require(most >= count, "max_engines", most, f"must be >= engines={count}; 0 starts no more of them")
            remedy = "leave one of the two out"
            require(not self.colocate, "max_engines", most, "is not possible with colocate", remedy=remedy)

    def _check_colocation(self) -> None:
        count = self.engines
        remedy = "set placement.engines, with engine.kind=vllm"
        require(count > 0, "colocate", True, "needs servers, and engines is 0", remedy=remedy)
        bound = f"must divide ranks={self.ranks} with colocate: each server has the devices of as many ranks"
        require(self.ranks % count == 0, "engines", count, bound)
        default = type(self).gpus_per_engine
        gpus = self.gpus_of_ranks
        given = self.gpus_per_engine
        bound = f"is not read with colocate: a server has the {gpus:g} of its ranks; leave it out"
        require(given in (default, gpus), "gpus_per_engine", given, bound)

    @property
    def bundles(self) -> int:
        """The number of bundles that the ranks request: one each, or with `colocate` one with each server."""
        return self.engines if self.colocate else self.ranks

    @property
    def shares_gpus(self) -> bool:
        """True if servers take turns with the ranks on GPUs."""
        return bool(self.colocate and self.gpus_per_rank)

    @property
    def gpus_of_server(self) -> float:
        """The number of devices of each server that the placement starts."""
        return self.gpus_of_ranks if self.colocate else self.gpus_per_engine

    @property
    def gpus_of_ranks(self) -> float:
        """The number of devices of the ranks in one bundle."""
        return self.ranks // self.bundles * self.gpus_per_rank


def ranks_compute_the_model(placement: Any, model: ModelConfig) -> Findings:
    """Products in float32 need gathered weights in float32, and ranks that split tokens need them packed."""
    if not isinstance(placement, RankPlacement):
        return
    if placement.sharding.param_dtype == "bfloat16" and model.compute_dtype == "float32":
        rounds = "rounds the weights that model.compute_dtype=float32 is to compute with"
        yield "placement.sharding.param_dtype", f"{rounds}; set model.compute_dtype=bfloat16, or leave it out"
    if placement.context_parallel > 1 and model.attention == "padded":
        message = "needs packed sequences, and model.attention=padded is set"
        yield "placement.context_parallel", f"{message}; set it to 1, or model.attention to auto"


def models_can_be_split(r: Resolved[Any], placement: Any) -> Findings:
    """The number of ranks must fit the placement's layout, and the models must be divisible among them, as far as
    known: the launcher may not have set their number yet, and a hub model may not have been downloaded."""
    if not isinstance(placement, RankPlacement):
        return
    if isinstance(placement, RayPlacement):
        ranks = placement.ranks
    else:
        ranks = launched_ranks() or 0  # 0: not known yet
    of = ""
    nearby = os.environ.get("LOCAL_WORLD_SIZE")
    if placement.sharding.kind == "hybrid" and nearby:
        ranks = int(nearby)
        of = " of a node"
    try:
        with within("placement"):
            check_layout(placement, ranks, of)
        if ranks == 1 and not placement.shards_models:
            return
        for name in ("model", "critic", "algorithm.distillation"):
            if r.get(f"{name}.path") and r.get(f"{name}.engine") is None:
                _require_splittable(r, name, placement, ranks)
    except FieldError as error:
        yield error.field, error.requirement


def _require_splittable(r: Resolved[Any], section: str, placement: RankPlacement, ranks: int) -> None:
    name = f"{section}.path"
    path = r.get(f"{section}.path")
    revision = r.get(f"{section}.revision")
    source = base_of(path) if is_adapter(path) else BaseModel(path=path, revision=revision)
    if not is_at_hand(source.path, source.revision):
        return
    with renamed(POLICY, name):
        sharding = Sharding.of(placement)
        if name != POLICY:
            sharding = auxiliary_sharding(sharding, path, revision) or sharding
        adapters = r.get(f"{section}.lora") is not None
        require_splittable(path, revision, sharding, ranks, adapters=adapters, name=name)


def starts_servers(placement: Any) -> TypeGuard[RayPlacement]:
    """True if the placement starts the servers of the engine."""
    return isinstance(placement, RayPlacement) and placement.engines > 0


def way_to_placed(
    placement: RayPlacement, engine: Any, *, adapter_rank: int = 0, elsewhere: bool = False
) -> tuple[str, str]:
    """How new weights get to the servers that a placement starts, and why; see `ServerSpec.way_of_weights`.

    Args:
        elsewhere: some are on other nodes than rank 0, which only the cluster knows before they start.

    Raises:
        FieldError: they do not, with a remedy.
    """
    way: tuple[str, str] = engine.way_of_weights(
        on_gpus=placement.gpus_of_server > 0,
        shared=placement.shares_gpus,
        adapter_rank=adapter_rank,
        elsewhere=elsewhere,
    )
    return way


def require_devices(placement: RayPlacement, arguments: Sequence[str]) -> None:
    """Raise FieldError if the arguments of a server split it over more devices than the placement gives it."""
    needed = devices_of_server(arguments)
    given = int(placement.gpus_of_server)
    if not placement.gpus_of_server or needed <= max(1, given):
        return
    bound = f"splits each server over {needed} devices, and "
    if not placement.colocate:
        bound += f"placement.gpus_per_engine={placement.gpus_per_engine:g} gives it {max(1, given)}"
        remedy = f"set placement.gpus_per_engine={needed}"
    else:
        bound += f"the {placement.ranks} ranks / placement.engines={placement.engines} give it {given}"
        fewer, left = divmod(placement.ranks, needed)
        remedy = "lower the parallel sizes"
        if fewer and not left:
            remedy = f"set placement.engines={fewer}"
    raise FieldError("engine.serve.arguments", list(arguments), bound, remedy=remedy)


def engines_can_start(placement: Any, engine: Any, model: ModelConfig) -> Findings:
    """The servers of a placement must be of a kind that proxima starts, have the devices over which they are split, and
    new weights must reach them: where servers share the ranks' devices, a group would have two members on one GPU,
    which NCCL refuses. On which nodes they are is known when the cluster has reserved devices, see `EngineGroup`."""
    if not starts_servers(placement):
        return
    kind = engine.dialect().kind if hasattr(engine, "dialect") else ""
    if kind not in LAUNCHES:
        remedy = f"set engine.kind to {' or '.join(LAUNCHES)}"
        if not placement.colocate:
            remedy += ", or engines to 0"
        yield "placement.engines", f"starts servers, but proxima can't start one of this engine.kind; {remedy}"
        return
    if engine.url != type(engine).__dataclass_fields__["url"].default:
        yield "engine.url", "is not used where placement.engines starts the servers; leave it out"
    serve = engine.serve or Serve()
    for name, only, why in (("port", 0, "engines may share a node"), ("replicas", 1, "placement.engines counts them")):
        if getattr(serve, name) != only:
            yield f"engine.serve.{name}", f"must be {only} with placement.engines: {why}"
    try:
        require_devices(placement, serve.arguments)
    except FieldError as error:
        yield error.field, error.requirement
    if placement.shares_gpus and not engine.dialect().sleep_options:
        yield "placement.colocate", f"needs servers that release their devices, and {kind} has no option for it"
    yield from _weights_reach_placed(placement, engine, model)


def _weights_reach_placed(placement: RayPlacement, engine: Any, model: ModelConfig) -> Findings:
    offers = engine.dialect().offers
    if engine.adapters_only and (model.lora is None or "adapters" not in offers):  # `adapters_can_be_served` says it
        return
    beside = not placement.colocate and placement.gpus_per_engine > 0
    if beside and engine.transfer == "ipc" and "ipc" in offers:
        yield "engine.transfer", "needs servers on the GPUs of the ranks (placement.colocate); use group or auto"
        return
    spread = placement.strategy == "STRICT_SPREAD" and placement.engines > 1
    elsewhere = spread or placement.max_engines > placement.engines
    rank = model.adapter_rank
    try:
        way, _ = way_to_placed(placement, engine, adapter_rank=rank, elsewhere=elsewhere)
    except FieldError:
        try:
            way_to_placed(placement, engine, adapter_rank=rank, elsewhere=True)
        except FieldError as error:  # its remedies are good for any nodes
            yield f"engine.{error.field}", error.requirement
        return
    stacked = beside and placement.gpus_per_engine < 1 and max(placement.engines, placement.max_engines) > 1
    if stacked and way == "group":
        remedy = "set it to 1, or engine.transfer to folder"
        yield "placement.gpus_per_engine", f"puts servers on one GPU, where a group can't have two members; {remedy}"


def weights_reach_servers(placement: Any, engine: Any, model: ModelConfig) -> Findings:
    """New weights must reach servers that the placement does not start, as far as their kind and address tell; those of
    `engine.serve` are of a kind that proxima starts."""
    if starts_servers(placement) or not hasattr(engine, "way_of_weights"):
        return
    dialect = engine.dialect()
    if dialect.kind not in LAUNCHES:  # what others offer is asked of them
        if engine.serve is not None:
            remedy = f"set engine.serve=null, or it to {' or '.join(LAUNCHES)}"
            yield "engine.kind", f"is a kind that proxima can't start, as engine.serve asks for; {remedy}"
        return
    if engine.adapters_only and (model.lora is None or "adapters" not in dialect.offers):
        return
    try:
        engine.way_of_weights(on_gpus=False, shared=False, adapter_rank=model.adapter_rank)
    except FieldError as error:
        yield f"engine.{error.field}", error.requirement


def engines_can_rest(placement: Any, runtime: Any, algorithm: Any) -> Findings:
    """Nothing may call the servers while the ranks use the servers' devices."""
    if not (isinstance(placement, RayPlacement) and placement.colocate):
        return
    if runtime.overlaps:
        message = "lets servers and ranks take turns, and runtime.max_concurrent_rollouts has both compute at once"
        yield "placement.colocate", f"{message}; set that to null, or colocate to false"
    if algorithm.proximal == "next":
        message = "puts the servers to sleep during updates, when algorithm.proximal=next calls them"
        yield "placement.colocate", f"{message}; use another proximal, or set colocate to false"
