"""The duration of each stage of a step on a layout: a roofline, with the shares of the peaks in `DeviceKind.rates`."""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from proxima_plan.devices import CPU
from proxima_plan.layout import DeviceLayout, key_parts
from proxima_plan.traffic import HALF, PlacedModel, Traffic, blocking_traffic, overlapped_traffic

BUCKET = 2**28  # bytes that a group is sent at once
BANDWIDTH, COMPUTE, NETWORK, LONGEST, FIXED = "bandwidth", "compute", "network", "longest completion", "fixed cost"


class Stage(NamedTuple):
    """The seconds of a stage by cause, and the bytes that one device sends by group."""

    name: str
    parts: Mapping[str, float]
    sent: Mapping[str, float] = {}

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def repeated(self, count: float) -> "Stage":
        """Return the stage `count` times."""
        parts = {name: seconds * count for name, seconds in self.parts.items()}
        return self._replace(parts=parts, sent={name: size * count for name, size in self.sent.items()})

    @property
    def binds(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name]) if self.seconds else "nothing"


class Sequences(NamedTuple):
    """What the ranks compute: all tokens, the sum of the squared lengths of the sequences, and the longest one."""

    tokens: float
    squares: float
    longest: float

    @classmethod
    def of(cls, lengths: Sequence[float]) -> "Sequences":
        return cls(sum(lengths), sum(x * x for x in lengths), max(lengths, default=0.0))


@dataclass(frozen=True)
class StageTimes(PlacedModel):
    """The duration of each stage of a model on a layout, for lengths that the caller passes."""

    def engine_alone(self) -> "StageTimes":
        """Return the times of the engines, independent of the ranks: equal for layouts with equal engines."""
        own = self.layout
        engines = DeviceLayout(1, engines=own.engines, engine_devices=own.engine_split, colocated=own.colocated)
        return replace(self, layout=engines)

    # ---- one engine

    def decode_step(self, running: float, context: float) -> tuple[float, str]:
        """Return the seconds of a decode step and its bottleneck; running completions have `context` tokens on average.

        Weights and keys are read once; keys are read by each device that has a copy. Only those experts are read that
        some token uses.
        """
        model, rates, size = self.model, self.device.rates, self.layout.engine_split
        used = 1 - (1 - model.experts / model.all_experts) ** running if model.all_experts else 0.0
        weights = (self.dense + used * model.all_of_experts) / size
        keys = running * context * model.key_elements / key_parts(model, size)
        engine = self.load.engine
        bandwidth = (engine.layer_bytes * weights + engine.key_bytes * keys) / self._bandwidth
        products = self._products(running, size)
        flop = products + self._attention(running * context) / size
        network = 0.0
        if size > 1:  # two all-reduces in a layer
            states = running * model.hidden * HALF
            wait = rates.wait(self.device.nodes(size), states)
            network = 2 * model.layers * (wait + 2 * states * (size - 1) / size / self._link(size))
        fixed = model.layers * rates.layer
        if network + fixed > max(bandwidth, flop):
            binds = NETWORK if network > fixed else FIXED
        else:
            binds = BANDWIDTH if bandwidth > flop else COMPUTE
        seconds = max(bandwidth, flop) + rates.rows * products + network + fixed
        launches = model.layers * rates.eager if engine.eager else 0.0
        return (launches, FIXED) if launches > seconds else (seconds, binds)

    def prefill(self, tokens: float, mean: float = 0.0) -> float:
        """Return the seconds that one engine takes for `tokens` prompt tokens, with prompts of `mean` tokens."""
        size = self.layout.engine_split
        return self._products(tokens, size) + self._attention(tokens * mean / 2) / size

    def generate(self, lengths: Sequence[int], prompt: int, group: int = 1, slots: int = 1024) -> Stage:
        """Generate completions of these lengths on one engine, at most `slots` at once, the next when one ends. Time in
        which fewer than half of the maximum are running is attributed to the longest completion."""
        parts = {BANDWIDTH: 0.0, COMPUTE: self.prefill(len(lengths) * prompt / group, prompt), NETWORK: 0.0}
        parts |= {FIXED: 0.0, LONGEST: 0.0}
        waiting, running, now, started = list(reversed(lengths)), list[tuple[int, int]](), 0, 0
        most = min(slots, len(lengths))
        while waiting or running:
            while waiting and len(running) < most:
                heapq.heappush(running, (now + waiting.pop(), now))
                started += now
            count, end = len(running), running[0][0]
            context = prompt + (now + end) / 2 - started / count  # halfway until the next one ends
            step, binds = self.decode_step(count, context)
            parts[LONGEST if 2 * count < most else binds] += (end - now) * step
            now = end
            while running and running[0][0] == end:
                started -= heapq.heappop(running)[1]
        return Stage("generate", parts)

    # ---- the trainer

    def forward(self, data: Sequences) -> Stage:
        """Return a pass of all ranks without gradients."""
        return self._trained("forward", data, gradients=False)

    def update(self, data: Sequences) -> Stage:
        """Return one optimizer step: forward and backward passes, and AdamW."""
        stage = self._trained("update", data, gradients=True)
        if not stage.seconds:
            return stage
        speed = self.device.rates.host * 1e9 if self.layout.sharding.offload else self._bandwidth
        moved = self.trained / self.layout.parts * (4 * self.master + 16)  # gradients twice, for their norm
        return stage._replace(parts={**stage.parts, BANDWIDTH: stage.parts.get(BANDWIDTH, 0.0) + moved / speed})

    def publish(self) -> Stage:
        """Return the publication of new weights; an engine in the process reads them and writes them in its dtype. To
        servers they go by `engine.transfer`: the trainer copies them to host memory, and then

        - `folder`, and adapters alone: one node writes them and all read them;
        - `group`: one rank broadcasts buckets, while the next are on their way from host memory to its device;
        - `ipc`: each server is given a copy on the shared device, which it copies once more.
        """
        if self.layout.in_process:
            size = self.model.parameters * self.load.engine.weight_bytes
            return Stage("publish", {BANDWIDTH: (self.model.parameters * self.master + size) / self._bandwidth})
        way = self.load.engine.way(adapters=self.adapter is not None)
        size = HALF * ((self.adapter or 0) if way == "adapters" else self.model.parameters)
        if way in ("folder", "adapters"):
            return Stage("publish", {NETWORK: size / (self.device.rates.publish * 1e9)})
        host = self._bandwidth / 2 if self.device.name == CPU else self.device.rates.host * 1e9
        if way == "ipc":
            moved = self.layout.engines * size * (1 / host + 2 / self._bandwidth)
            return Stage("publish", {BANDWIDTH: size / host + moved})
        members = 1 + self.layout.engines * self.layout.engine_devices
        inside = members <= self.device.node and not self.layout.elsewhere
        link = (self.device.inside if inside else self.device.across) * 1e9 * self.device.rates.network
        waits = math.ceil(size / BUCKET) * self.device.rates.wait(self.device.nodes(members))
        return Stage("publish", {BANDWIDTH: size / host, NETWORK: max(size / host, size / link) + waits})

    def rest(self) -> Stage:
        """Return what a step takes outside all other stages."""
        rates = self.device.rates
        return Stage("rest", {FIXED: rates.step * min(1.0, self.load.sequences / rates.sequences)})

    def _trained(self, name: str, data: Sequences, *, gradients: bool) -> Stage:
        tokens, squares, longest = data
        if not tokens:
            return Stage(name, {COMPUTE: 0.0})
        layout = self.layout
        share = max(tokens / layout.shares, longest)  # no sequence is split between shares
        squares = max(squares / layout.shares, longest * longest)
        micro = max(1, math.ceil(share / max(self.load.micro_tokens, longest)))
        split = layout.sharding.ranks_per_share * layout.pipeline
        passes = (3 if self.adapter is None else 2) + self.load.checkpointing if gradients else 1
        compute = passes * (self._products(share, split) + self._attention(squares / 2) / split)
        moved = passes * self._moved(share) / split
        bubble = 1 + (layout.pipeline - 1) / micro
        compute, moved = compute * bubble, moved * bubble
        launches = 2 * self.device.rates.eager * passes * micro * self.model.layers / layout.pipeline
        blocking = blocking_traffic(self, share, micro, gradients=gradients)
        overlapped = overlapped_traffic(self, micro, gradients=gradients)
        hidden = self.device.rates.overlap * (compute + moved)
        exposed = self._seconds(blocking) + max(0.0, self._seconds(overlapped) - hidden)
        sent = {where: send.size for where, send in [*blocking.items(), *overlapped.items()]}
        parts = {COMPUTE: compute, BANDWIDTH: moved, NETWORK: exposed, FIXED: max(0.0, launches - compute - moved)}
        return Stage(name, parts, sent)

    def _seconds(self, sends: Mapping[str, Traffic]) -> float:
        rates = self.device.rates
        return sum(
            s.size / (s.rate * rates.network) + s.times * rates.wait(s.nodes, s.size / max(1.0, s.times))
            for s in sends.values()
        )

    # ---- common to both

    @property
    def _bandwidth(self) -> float:
        """Bytes per second of a device's memory."""
        return self.device.bandwidth * 1e12 * self.device.rates.decode

    def _link(self, group: int) -> float:
        return self.device.link(group) * self.device.rates.network

    def _products(self, tokens: float, split: int) -> float:
        """Return the seconds to multiply tokens by all weights that they use, on `split` devices: 2 FLOP per weight."""
        model = self.model
        tensor = max(1, self.layout.sharding.tensor_parallel)
        width = model.query_width if model.all_experts else model.intermediate
        seconds = self.dense * self.device.product(min(model.hidden, width / tensor))
        if model.all_experts:
            routed = model.all_of_experts * model.experts / model.all_experts
            seconds += routed * self.device.product(model.intermediate / model.experts)
        return 2 * tokens * seconds / split

    def _moved(self, tokens: float) -> float:
        """Return the seconds of one device to read and write the activations of a pass; experts copy their tokens."""
        model = self.model
        width = (2 + 2 * model.experts) * model.hidden + model.query_width + 1.5 * model.intermediate
        return tokens * model.layers * width * HALF * self.device.rates.moved / self._bandwidth

    def _attention(self, keys: float) -> float:
        """Return the seconds of one device for `keys` query-key pairs: their products and those with the values, in
        every layer."""
        width = self.model.query_width
        return 4 * self.model.layers * width * keys / (self.device.bf16 * 1e12 * self.device.rates.attention)
