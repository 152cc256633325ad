"""The duration of each stage of a step on a layout: a roofline, with the shares of the peaks in `DeviceKind.rates`."""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from proxima_plan.balance import Slowest, slowest
from proxima_plan.devices import CPU, Rates
from proxima_plan.layout import DeviceLayout, key_parts
from proxima_plan.traffic import BUCKET, HALF, PROBE, PlacedModel, Traffic, blocking_traffic, overlapped_traffic

BACKWARD = 2.5  # products of a backward pass of attention, over those of a forward: it computes the scores again
FORWARD_HEAD = 1 / 3  # of what an update reads and writes for a logit: a backward pass computes it again
BANDWIDTH = "bandwidth"
COMPUTE = "compute"
NETWORK = "network"
LONGEST = "longest completion"
FIXED = "fixed cost"
HOST = "host"
PUSHES = 2  # of the first weights


def host_seconds(rates: Rates, sequences: float, tokens: float) -> float:
    """Return the CPU seconds of rank 0 on the host in a step, while the devices wait."""
    return rates.host_sequence * sequences + rates.host_token * tokens


#: the path of attention in the trainer, a rate of a device, in words
ATTENTION_PATHS = {
    "flash3": "flash attention 3",
    "flash2": "flash attention 2",
    "sdpa": "causal rectangles",
    "masked": "rectangles with a mask",
}


class Stage(NamedTuple):
    """The seconds of a stage by cause, the bytes that one device sends by group, and the arithmetic in words."""

    name: str
    parts: Mapping[str, float]
    sent: Mapping[str, float] = {}
    how: str = ""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def repeated(self, count: float) -> "Stage":
        """Return the stage `count` times."""
        parts = {name: seconds * count for name, seconds in self.parts.items()}
        return self._replace(parts=parts, sent={name: size * count for name, size in self.sent.items()})

    @property
    def binds(self) -> str:
        if self.seconds:
            return max(self.parts, key=lambda name: self.parts[name])
        return "nothing"


class Sequences(NamedTuple):
    """What the ranks compute: all tokens, the sum of the squared lengths, and lengths by which sequences are dealt."""

    tokens: float
    squares: float
    lengths: tuple[float, ...]

    @classmethod
    def of(cls, lengths: Sequence[float]) -> "Sequences":
        return cls(sum(lengths), sum(x * x for x in lengths), tuple(lengths))


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
        model = self.model
        rates = self.device.rates
        size = self.layout.engine_split
        used = 0.0
        if model.all_experts:
            used = 1 - (1 - model.experts / model.all_experts) ** running
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
        if engine.eager and model.layers * rates.eager > seconds:
            return model.layers * rates.eager, FIXED
        return seconds, binds

    def prefill(self, tokens: float, mean: float = 0.0) -> float:
        """Return the seconds that one engine takes for `tokens` prompt tokens, with prompts of `mean` tokens."""
        size = self.layout.engine_split
        return self._products(tokens, size) + self._attention(tokens * mean / 2) / size

    def generate(self, lengths: Sequence[int], prompt: int, group: int = 1, slots: int = 1024) -> Stage:
        """Generate completions of these lengths on one engine, at most `slots` at once, the next when one ends. Time in
        which fewer than half of the maximum are running is attributed to the longest completion."""
        prefill = self.prefill(len(lengths) * prompt / group, prompt)
        parts = {BANDWIDTH: 0.0, COMPUTE: prefill, NETWORK: 0.0, FIXED: 0.0, LONGEST: 0.0}
        waiting = list(reversed(lengths))
        running = list[tuple[int, int]]()
        now = 0
        started = 0
        most = min(slots, len(lengths))
        while waiting or running:
            while waiting and len(running) < most:
                heapq.heappush(running, (now + waiting.pop(), now))
                started += now
            count = len(running)
            end = running[0][0]
            context = prompt + (now + end) / 2 - started / count  # halfway until the next one ends
            step, binds = self.decode_step(count, context)
            if 2 * count < most:
                binds = LONGEST
            parts[binds] += (end - now) * step
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
        speed = self._bandwidth
        if self.layout.sharding.offload:
            speed = self.device.rates.host * 1e9
        moved = self.trained / self.layout.parts * (4 * self.master + 16)  # gradients twice, for their norm
        return stage._replace(parts={**stage.parts, BANDWIDTH: stage.parts.get(BANDWIDTH, 0.0) + moved / speed})

    def publish(self) -> Stage:
        """Return the publication of new weights; an engine in the process reads them and writes them in its dtype.
        Servers get them by `engine.transfer`, see `_push`, and prove it: the ranks compute the log-probs of a few
        tokens, and so do the servers."""
        if self.layout.in_process:
            size = self.model.parameters * self.load.engine.weight_bytes
            return Stage("publish", {BANDWIDTH: (self.model.parameters * self.master + size) / self._bandwidth})
        push = self._push()
        proof = self._proof(gradients=False)
        how = f"{push.how}; proof {proof:.2g} s"
        return push._replace(parts={**push.parts, FIXED: push.parts.get(FIXED, 0.0) + proof}, how=how)

    def first_sync(self) -> Stage:
        """Return the publication before the first step, which shows that the proof can fail: the weights are also sent
        moved along the gradient of the probe, and back."""
        one = self._push()
        proofs = 2 * self._proof(gradients=False) + self._proof(gradients=True)
        parts = {name: PUSHES * seconds for name, seconds in one.parts.items()}
        how = f"{PUSHES} × {one.seconds:.2g} s, proofs and a backward pass {proofs:.2g} s"
        return Stage("first weights", {**parts, FIXED: parts.get(FIXED, 0.0) + proofs}, how=how)

    def _push(self) -> Stage:
        """Return how the weights get to all servers, without the proof.

        - `ipc`: the ranks gather a bucket on their devices, and the server's worker on the same one copies its part;
        - `group`: the ranks gather a bucket while the former one is broadcast to the workers;
        - `folder`, and adapters alone: one node writes them and all read them.
        """
        device = self.device
        layout = self.layout
        rates = self.device.rates
        adapters = self.adapter is not None
        way = self.load.engine.way(adapters=adapters, colocated=layout.colocated, cpu=device.name == CPU)
        elements = (self.adapter or 0) if way == "adapters" else self.model.parameters
        size = float(HALF * elements)
        if way in ("folder", "adapters"):
            how = f"{size / 1e9:,.3g} GB by a folder at {rates.publish:g} GB/s"
            return Stage("publish", {NETWORK: size / (rates.publish * 1e9)}, how=how)
        parts = layout.parts
        stride = layout.sharding.tensor_parallel
        speed = self.device.link(max(1, parts // stride), stride) * rates.network
        received = size * (parts - 1) / parts
        gathered = received / speed
        tensors = self.model.tensors
        loaded = tensors * rates.load
        gathering = f"gathered at {speed / 1e9:,.0f} GB/s in {gathered:.2g} s"
        loading = f"{tensors:,} tensors loaded at {1e6 * rates.load:.0f} µs in {loaded:.2g} s"
        if way == "ipc":
            copied = size * (1 + 1 / layout.engine_split) / self._bandwidth
            how = f"{size / 1e9:,.3g} GB: {gathering}, copied by the workers in {copied:.2g} s, {loading}"
            return Stage("publish", {NETWORK: gathered, BANDWIDTH: copied, FIXED: loaded}, {"gather": received}, how)
        members = 1 + layout.engines * layout.engine_devices
        inside = members <= device.node and not layout.elsewhere
        rate = device.inside if inside else device.across
        link = rate * 1e9 * rates.network
        sent = size / link + math.ceil(size / BUCKET) * rates.wait(device.nodes(members))
        sending = f"meanwhile broadcast at {link / 1e9:,.0f} GB/s in {sent:.2g} s"
        how = f"{size / 1e9:,.3g} GB: {gathering}, {sending}, {loading}"
        return Stage("publish", {NETWORK: max(gathered, sent), FIXED: loaded}, {"gather": received}, how)

    def _proof(self, *, gradients: bool) -> float:
        """Return the seconds of a pass over the probe on all ranks, and of the servers' own."""
        probe = Sequences.of([PROBE])
        return self._trained("proof", probe, gradients=gradients).seconds + self.prefill(PROBE, PROBE)

    def of_host(self) -> Stage:
        """Return what rank 0 does on the host while all devices wait."""
        load = self.load
        return Stage("rank 0", {HOST: host_seconds(self.device.rates, load.sequences, load.sequences * load.mean)})

    def rest(self) -> Stage:
        """Return what a step takes outside all other stages."""
        rates = self.device.rates
        return Stage("rest", {FIXED: rates.step * min(1.0, self.load.sequences / rates.sequences)})

    def _trained(self, name: str, data: Sequences, *, gradients: bool) -> Stage:
        if not data.tokens:
            return Stage(name, {COMPUTE: 0.0})
        layout = self.layout
        most = self._slowest(data.lengths)
        share = data.tokens / layout.shares * most.tokens
        squares = data.squares / layout.shares * most.squares
        micro = most.passes
        split = layout.sharding.ranks_per_share * layout.pipeline
        passes = 1
        attended: float = 1
        if gradients:
            passes = 3 if self.adapter is None else 2
            passes += self.load.checkpointing
            attended += BACKWARD + self.load.checkpointing
        compute = passes * self._products(share, split) + attended * self._attention(squares / 2) / split
        moved = passes * self._moved(share) / split + self._of_head(share, gradients=gradients) / split
        bubble = 1 + (layout.pipeline - 1) / micro
        compute *= bubble
        moved *= bubble
        launches = 2 * self.device.rates.eager * passes * micro * self.model.layers / layout.pipeline
        blocking = blocking_traffic(self, share, micro, gradients=gradients)
        overlapped = overlapped_traffic(self, micro, gradients=gradients)
        hidden = self.device.rates.overlap * (compute + moved)
        exposed = self._seconds(blocking) + max(0.0, self._seconds(overlapped) - hidden)
        sent = {where: send.size for where, send in [*blocking.items(), *overlapped.items()]}
        parts = {COMPUTE: compute, BANDWIDTH: moved, NETWORK: exposed, FIXED: max(0.0, launches - compute - moved)}
        path = self.load.attention
        how = ""
        if gradients:
            how = f"attention by {ATTENTION_PATHS[path]}, at {getattr(self.device.rates, path):g} of the peak"
        return Stage(name, parts, sent, how)

    def _slowest(self, lengths: tuple[float, ...]) -> Slowest:
        """Return what the slowest share computes of sequences of these lengths."""
        model = self.model
        routed = 0.0
        if model.all_experts:
            routed = model.all_of_experts * model.experts / model.all_experts
        pair_cost = 2 * model.layers * model.query_width / (self.dense + routed)
        return slowest(lengths, self.layout.shares, self.load.micro_tokens, pair_cost)

    def _seconds(self, sends: Mapping[str, Traffic]) -> float:
        rates = self.device.rates
        seconds = []
        for send in sends.values():
            waits = send.times * rates.wait(send.nodes, send.size / max(1.0, send.times))
            seconds.append(send.size / (send.rate * rates.network) + waits)
        return sum(seconds)

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
        rates = self.device.rates
        times = rates.moved
        if self.load.compiled:
            times *= rates.compiled
        return tokens * model.layers * width * HALF * times / self._bandwidth

    def _of_head(self, tokens: float, *, gradients: bool) -> float:
        """Return the seconds of one device to read and write logits, a chunk at a time."""
        size = self.device.rates.head
        if not gradients:
            size *= FORWARD_HEAD
        return tokens * self.model.vocabulary * size / self._bandwidth

    def _attention(self, keys: float) -> float:
        """Return the seconds of one device for `keys` query-key pairs: their products and those with the values, in
        every layer. A mask does not spare the pairs that it hides."""
        width = self.model.query_width
        path = self.load.attention
        pairs = 2 * keys if path == "masked" else keys
        share: float = getattr(self.device.rates, path)
        return 4 * self.model.layers * width * pairs / (self.device.bf16 * 1e12 * share)
