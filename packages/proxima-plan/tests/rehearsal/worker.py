"""What runs in the process of rehearsals, which a fake device has changed for good."""

import ast
import inspect
import os
import sys
import textwrap
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path, PurePath
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import proxima
from proxima.config.outcomes import decided_on_gpus
from proxima.config.resolution import resolve
from proxima.core.metrics import SumCount
from proxima.data import UserError
from proxima.engine.http.vllm import Vllm
from proxima.engine.http.weights import buckets
from proxima.engine.http.weights.probe import trainer_log_prob
from proxima.engine.http.weights.stream import StreamTransport
from proxima.engine.protocol import WeightUpdate
from proxima.model.micro_batch import micro_batches
from proxima.model.parallel.lending import lent
from proxima.training.offline.sft_method import SftObjective
from proxima_plan.rehearsal import rehearsal
from proxima_plan.rehearsal.device_watch import STEP, DeviceWatch
from proxima_plan.rehearsal.fake_device import fake_device
from proxima_plan.rehearsal.fake_ranks import fake_ranks
from proxima_plan.rehearsal.fake_training import FakeLoader, StepShape, Training, trainings
from proxima_plan.rehearsal.rehearsal import Rehearsal, rehearse_step

SHAPE = StepShape(groups=4, size=2, prompt=8, length=16, updates=2)
OURS, HERE = Path(proxima.__file__).parent, Path(__file__).parent
PACKS = "pack"  # the method that begins a micro-batch


def answer(channel: int) -> None:
    """What the process does: functions of this module, by name, until the other end is closed."""
    torch.set_num_threads(1)
    calls = Connection(channel)
    while True:
        try:
            name, arguments = calls.recv()
        except EOFError:
            os._exit(0)
        try:
            output = globals()[name](*arguments)
            result = None, SimpleNamespace(**vars(output)) if isinstance(output, Watched) else output
        except Exception:
            result = traceback.format_exc(), None
        calls.send(result)


@dataclass(frozen=True)
class Watched:
    """A rehearsal, and where the host waits in it.

    places: waits by the function of our own code. inside: those in loops over micro-batches, by operation.
    """

    rehearsal: Rehearsal
    places: Counter[str]
    inside: Counter[str]
    updates: int
    micro_batches: int


class PlaceWatch(DeviceWatch):
    """Records where the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.inside = Counter[str](), Counter[str]()
        self._thread = threading.get_ident()

    def restart(self) -> None:
        super().restart()
        self.places.clear()
        self.inside.clear()

    def wait(self, what: str) -> None:
        super().wait(what)
        frames = list(self._frames())
        self.places[frames[0].f_code.co_qualname.partition(".<")[0] if frames else "torch"] += 1
        self.inside[what] += any(frame.f_lineno in packing_lines(frame.f_code) for frame in frames)

    def _frames(self) -> Iterator[FrameType]:
        """Frames of our own code, innermost first. A backward pass runs in its own threads; its frames are followed by
        those of the thread that waits for it."""
        own: FrameType | None = sys._getframe(2)
        waiting = None if threading.get_ident() == self._thread else sys._current_frames().get(self._thread)
        for frame in (own, waiting):
            while frame is not None:
                path = PurePath(frame.f_code.co_filename)
                if path.is_relative_to(OURS) or path.is_relative_to(HERE):
                    yield frame
                frame = frame.f_back


@cache
def packing_lines(code: CodeType) -> frozenset[int]:
    """The lines of a function that run once per micro-batch: the bodies of the loops that pack one."""
    try:
        lines, start = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While))
    packing = (loop for loop in loops if any(map(_packs, ast.walk(loop))))
    return frozenset(
        start + line - 1 for loop in packing for line in range(loop.body[0].lineno, (loop.end_lineno or 0) + 1)
    )


def _packs(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == PACKS


def rehearsed(
    recipe: str, overrides: Sequence[str], shape: StepShape = SHAPE, ranks: int = 1, objective: Any = None
) -> Watched:
    """Rehearse with the recipe's objective, or another one; count updates and micro-batches of the last step."""
    steps: list[tuple[Training, Any]] = []
    before = rehearsal.run_part

    def counting(part: Training, updates: Any) -> None:
        if objective is not None:
            part = Training(part.stack, objective, part.stages)
        steps.append((part, updates))
        before(part, updates)

    rehearsal.run_part = counting
    try:
        watch = PlaceWatch()
        result = rehearse_step(resolve(recipe, overrides, root=None).config, shape, ranks, watch)
    finally:
        rehearsal.run_part = before
    last = steps[len(steps) // 2 :]
    packed = sum(_packed(part, items) for part, updates in last for items in updates)
    return Watched(result, +watch.places, +watch.inside, sum(len(updates) for _, updates in last), packed)


def _packed(part: Training, items: Sequence[Any]) -> int:
    """The micro-batches of this rank's share of an update."""
    stack = part.stack
    sequences = [part.objective.sequences(item) for item in items[: len(items) // stack.ranks.shares]]
    return len(micro_batches(sequences, stack.tokens_per_micro_batch, share_prompt=stack.model.share_prompt))


@dataclass(frozen=True, kw_only=True)
class OnTheHost(SftObjective):
    """Adds a number for each token that it has forgotten on the host."""

    def losses(self, batch: Any, outputs: Any, statistics: Any = None) -> Any:
        log_prob = outputs.need("log_prob")
        (loss,) = super().losses(batch, outputs)
        wrong: Tensor = log_prob + torch.ones(len(log_prob))
        return [type(loss)(wrong.double().sum(), loss.denominator, loss.metrics)]


@dataclass(frozen=True, kw_only=True)
class Impatient(SftObjective):
    """Reads its loss in every micro-batch, and its mask by an index."""

    def losses(self, batch: Any, outputs: Any, statistics: Any = None) -> Any:
        (loss,) = super().losses(batch, outputs)
        learnt = outputs.need("log_prob")[batch.loss_mask]
        share = float(learnt.sum())
        count = torch.tensor(share, device=batch.target.device, dtype=torch.float64)
        return [type(loss)(loss.numerator, loss.denominator, {"share": SumCount(count, count)})]


def with_objective(recipe: str, overrides: Sequence[str], name: str) -> Watched:
    """Rehearse with an objective of this module."""
    return rehearsed(recipe, overrides, objective=globals()[name]())


def fault_of(recipe: str, overrides: Sequence[str], name: str) -> str:
    """The error that ends such a rehearsal."""
    try:
        with_objective(recipe, overrides, name)
    except UserError as error:
        return str(error)
    return ""


def host_states(recipe: str, overrides: Sequence[str]) -> tuple[int, int, list[str]]:
    """Bytes of a state of 2²¹ elements in host memory, of one of 4, and what waited when the device wrote them."""
    device = fake_device()
    with FakeTensorMode(allow_non_fake_inputs=True), DeviceWatch() as watch:
        torch.zeros(2**21)[0] = 1  # no state: it holds data
        watch.kind = STEP
        large, small = torch.zeros(2**21), torch.zeros(4)
        there = large.to(device)
        large.copy_(there)
        small.copy_(there[:4])
    sizes = [state.untyped_storage().nbytes() for state in (large, small)]
    return *sizes, list(watch.waits)


@dataclass(frozen=True)
class Sent:
    """New weights on their way from the ranks' devices, as rank 0 sends them, and what it held beside its own part.

    bytes, held, whole: of what was sent, of the most that was there at once for it, and of the model.
    waits, proof: where the host waited for the device, to send them, and for the log-probs of the proof.
    """

    bytes: int
    held: int
    whole: int
    waits: Counter[str]
    proof: Counter[str]


def weights_sent(recipe: str, overrides: Sequence[str], ranks: int) -> SimpleNamespace:
    """Send the weights of a sharded model, in bfloat16, a bucket of which holds one tensor."""
    config = decided_on_gpus(resolve(recipe, overrides, root=None).config)
    device, setup = fake_device(), SimpleNamespace(tokenizer=None, compute=None)
    buckets.BUCKET = 1
    with fake_ranks(ranks, 1) as group, FakeTensorMode(allow_non_fake_inputs=True), PlaceWatch() as watch:
        sharding = rehearsal._sharding(config, ranks)
        stack = trainings(config, FakeLoader(config.model.path, device, group, sharding))[0].stack
        module = stack.lent_model().model
        transport: Any = StreamTransport(Vllm(), setup)
        weights = transport.prepare(WeightUpdate(version=0, module=module), "v0", "bfloat16")
        rest = watch.bytes.total
        watch.restart()
        with weights.lent():
            for _, content in weights.filled(lambda size: torch.empty(size, dtype=torch.uint8, device=device)):
                assert content.device == device
        waits, held = +watch.places, watch.bytes.most - rest
        watch.restart()
        with lent(module):
            trainer_log_prob(module, np.arange(24, dtype=np.int32))
        whole = sum(weight.numel() * weight.element_size() for weight in module.parameters())
        return SimpleNamespace(**vars(Sent(weights.size, held, whole, waits, +watch.places)))
