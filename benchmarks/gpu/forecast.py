"""What the plan predicts of each figure, for the kind of device that this is."""

import re
import tempfile
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.sizes import Batch, shape_folder
from proxima.config.sections.model import ModelConfig
from proxima_plan.devices import GIB, DeviceKind, Devices, device_kinds, this_machine
from proxima_plan.engine_settings import EngineSettings
from proxima_plan.forecast import PlannedRecipe, StepPlan
from proxima_plan.layout import DeviceLayout
from proxima_plan.model_size import ModelFacts, model_facts
from proxima_plan.stage_times import Sequences
from proxima_plan.step_load import Load

# bytes that a pass over the output head reads and writes for each logit, counted in `model/log_prob.py`: forward, the
# product's 16 bits, its copy in float32, and the passes over that; backward, the same again and the gradient
LOGIT_BYTES = 100
HEAD_GRADIENT_BYTES = 10  # of a weight of the head, for each chunk: the chunk's gradient, and the sum so far


@cache
def kind_here() -> DeviceKind:
    """The kind of this device in the plan's table, that of its name with the nearest memory; another one is
    measured."""
    if not torch.cuda.is_available():
        return this_machine("float32", "cpu", 1).kind

    words = re.split(r"[\s-]+", torch.cuda.get_device_name().upper())
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    known = [kind for kind in device_kinds().values() if kind.name.partition("-")[0] in words]
    if not known:
        return this_machine("bfloat16", "cuda", 1).kind
    return min(known, key=lambda kind: abs(kind.memory - memory))


def product_rate(width: int = 8192) -> float:
    """FLOP/s of products with a matrix of so many columns."""
    return 1 / kind_here().product(width)


def bandwidth() -> float:
    """Bytes a second that a pass over memory reaches."""
    return kind_here().bandwidth * 1e12 * kind_here().rates.decode


def head_seconds(rows: int, vocabulary: int, hidden: int, chunk: int) -> float:
    """Seconds of log-probs and their gradients through an output head: four products, the passes over logits, and the
    sum of the head's gradient chunk by chunk."""
    products = 8 * rows * vocabulary * hidden * kind_here().product(hidden)
    chunks = -(-rows // chunk)
    moved = LOGIT_BYTES * rows * vocabulary + HEAD_GRADIENT_BYTES * chunks * vocabulary * hidden
    return products + moved / bandwidth()


@dataclass(frozen=True)
class Forecast:
    """The plan of an update, and of what surrounds it, for one model on one device.

    Args:
        config: of transformers.
        spec: the `model` section of a recipe, but for its path; its dtypes are not `auto`.
        batch: of the update. micro_tokens: tokens of a micro-batch.
        optimizer: its spec; None: AdamW's.
        sharding: of a single rank, None: not sharded.
    """

    config: Any
    spec: ModelConfig
    batch: Batch
    micro_tokens: int = 4096
    optimizer: Any = None
    sharding: Any = None

    @cached_property
    def model(self) -> ModelFacts:
        """The model's size, counted from its config."""
        with tempfile.TemporaryDirectory() as place:
            return model_facts(shape_folder(self.config, Path(place)), None, self.spec.lora)

    @cached_property
    def load(self) -> Load:
        """What is trained in a step."""
        batch = self.batch
        return Load(
            sequences=batch.sequences,
            group=batch.completions,
            prompt=batch.prompt,
            mean=batch.response,
            longest=batch.response,
            forwards=0,
            micro_tokens=max(self.micro_tokens, batch.prompt + batch.response),
            shared=self.spec.share_prompt,
            checkpointing=self.spec.gradient_checkpointing,
            engine=EngineSettings(kind="local", transfer="ipc"),
            optimizer=self.optimizer,
            generates=False,
        )

    def plan(self, **layout: Any) -> StepPlan:
        """The plan of the update alone, or with other fields of the layout."""
        recipe = PlannedRecipe(self.model, self.spec, self.load, Devices(kind_here(), 1), self.config)
        if self.sharding is None:
            shards = {}
        else:
            shards = {"sharding": self.sharding}
        return recipe.plan(DeviceLayout(**{"engines": 0, **shards, **layout}))

    @cached_property
    def seconds(self) -> float:
        """Seconds of the update."""
        return next(stage.seconds for stage in self.plan().stages if stage.name == "update")

    @property
    def allocated(self) -> float:
        """GiB of tensors at the peak."""
        return sum(self.plan().memory.trainer.values()) / GIB

    @property
    def needed(self) -> float:
        """GiB of the device, with what the driver and the allocator take."""
        return self.plan().memory.needed / GIB

    @property
    def fits(self) -> bool:
        """True if the device has the memory for it."""
        return bool(self.plan().memory.fits)

    @property
    def flops(self) -> float:
        """Model FLOPs of the update, recomputed ones not counted: three passes over all weights but those that only the
        responses meet, the head's."""
        head = self.model.vocabulary * self.model.hidden
        layers = self.model.layers * self.model.layer
        responses = self.batch.sequences * self.batch.response
        products = 6.0 * (layers * self.batch.fed + head * responses)
        return products + 12.0 * self.model.layers * self.model.query_width * self.batch.pairs

    @property
    def attention(self) -> float:
        """Seconds of attention in one layer, forward and backward, of the whole batch."""
        times = replace(self.plan().times, model=replace(self.model, layers=1))
        # two pairs of queries and keys a token and key: the plan halves the squares of the lengths
        whole = times.update(Sequences(float(self.batch.fed), 2.0 * self.batch.pairs, 0.0))
        without = times.update(Sequences(float(self.batch.fed), 0.0, 0.0))
        return whole.parts["compute"] - without.parts["compute"]

    def decode_step(self, rows: int, context: float) -> float:
        """Seconds of a decode step of so many rows with so many tokens on average."""
        return self.plan(in_process=True).times.decode_step(rows, context)[0]

    def decode_limit(self, rows: int, context: float) -> float:
        """Seconds in which the device reads what a decode step must: weights, keys and values, in 16 bits."""
        read = 2 * self.model.parameters + 2 * rows * context * self.model.key_elements
        return read / (kind_here().bandwidth * 1e12)

    def publish(self, **layout: Any) -> float:
        """Seconds of new weights to an engine, in the process or as the layout says."""
        return self.plan(**layout).times.publish().seconds
