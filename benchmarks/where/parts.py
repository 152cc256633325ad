"""The parts of a step, each executed by the code of a real run, and the least time that each could take."""

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from benchmarks.decode_vs_hf.prompts import without_end
from benchmarks.side import clock
from benchmarks.where.kinds import KINDS, trace
from benchmarks.where.limits import Machine, Products, Shapes
from benchmarks.where.phases import Clock
from proxima.core import ADVANTAGES, AGGREGATES, SURROGATES
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.engine.local.local_engine import Local, LocalEngine, collect
from proxima.engine.protocol import Request, Sampling, WeightUpdate
from proxima.model.load import load
from proxima.model.micro_batch import micro_batches, tokens_fed
from proxima.model.policy import Policy
from proxima.model.pretrained import DTYPES
from proxima.training.batch_builder import BatchBuilder
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.stack import TrainStack

HEAD_ROWS = 512  # of logits at once in training, as `Policy` has them
ADAM_BYTES = 28  # a weight: float32 weight, gradient and both moments read, and all but the gradient written


@dataclass
class Phase:
    """The measurements of a phase.

    Args:
        seconds: of each repeat.
        kinds: seconds of each kind in the profiled run, and `overhead`, the rest of the median.
        limits: the least seconds of each kind; a kind that is missing needs none.
        tokens: processed in the phase, for a rate; 0: no rate.
        operations: the longest of the profiled run, `kind name`.
    """

    seconds: list[float]
    kinds: dict[str, float]
    limits: dict[str, float]
    tokens: int = 0
    operations: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def limit(self) -> float:
        return sum(self.limits.values())

    def json(self) -> dict[str, Any]:
        spread = [round(x, 5) for x in (self.median, min(self.seconds), max(self.seconds))]
        rounded = {name: {k: round(v, 5) for k, v in getattr(self, name).items()} for name in ("kinds", "limits")}
        longest = {name: round(seconds, 5) for name, seconds in self.operations.items()}
        return {"seconds": spread, "tokens": self.tokens, "limit": round(self.limit, 5), **rounded, "longest": longest}


@dataclass
class Times:
    """The seconds of each phase in every repeat, `total` among them, and those of a profiled run."""

    phases: dict[str, list[float]]
    kinds: dict[str, Counter[str]]
    operations: dict[str, Counter[str]]

    def phase(self, name: str, seconds: Sequence[float], limits: Mapping[str, float], tokens: int = 0) -> Phase:
        """Divide the phase `name`, whose repeats took `seconds`, into kinds. If the operations of the profiled run
        alone took longer than the median, they are scaled down to it."""
        of_kind, middle = self.kinds.get(name, Counter[str]()), statistics.median(seconds)
        scale = min(1.0, middle / max(1e-9, sum(of_kind.values())))
        kinds = {kind: of_kind[kind] * scale for kind in KINDS if of_kind[kind]}
        kinds["overhead"] = max(0.0, middle - sum(kinds.values()))
        longest = dict(self.operations.get(name, Counter()).most_common(12))
        return Phase(list(seconds), kinds, dict(limits), tokens, longest)


def times(work: Callable[[], Any], repeats: int) -> Times:
    """Run `work` once to warm up, `repeats` times with a clock, and once under the profiler."""
    work()
    phases: dict[str, list[float]] = {}
    for _ in range(repeats):
        watch = Clock()
        with watch.watch():
            start = clock()
            work()
            total = clock() - start
        for name, seconds in {**watch.seconds, "total": total}.items():
            phases.setdefault(name, []).append(seconds)
    kinds, operations, _ = trace(work)
    return Times(phases, kinds, operations)


class Parts:
    """Measures each part of a step on one model.

    Args:
        model: its folder.
        dtype: of products, by name.
        repeats: measurements of each part.
        tiny: see `Machine`.
    """

    def __init__(self, model: str, dtype: str, repeats: int, *, tiny: bool = False) -> None:
        self.loaded = load(model)
        without_end(self.loaded.model, self.loaded.tokenizer)
        self.name, self.dtype, self.repeats, self.tiny = dtype, DTYPES[dtype], repeats, tiny
        self.shapes = Shapes.of(self.loaded.model)
        self.seed = 0

    @cached_property
    def machine(self) -> Machine:
        return Machine(self.dtype, self.device, tiny=self.tiny)

    @property
    def device(self) -> torch.device:
        return next(self.loaded.model.parameters()).device

    def decode(self, rows: int, tokens: int, context: int = 40, prompts: int = 8) -> dict[str, Phase]:
        """Measure `tokens` new tokens of each of `rows` completions of some prompts of `context` tokens."""
        prompts = min(prompts, rows)
        engine, ask = self.engine(rows), self.prompts(prompts, context)
        timed = times(lambda: self.generate(engine, ask, rows, tokens), self.repeats)
        seconds = [total - first for total, first in zip(timed.phases["total"], timed.phases["prefill"], strict=True)]
        steps = tokens - 1
        joined, head = self._products(rows)
        size = self.dtype.itemsize
        a_position = self.shapes.depth * 2 * self.shapes.kv_heads * self.shapes.head_dim * size
        own = rows * sum(range(1, steps + 1))
        read = a_position * (own + prompts * context * steps)
        limits = {
            "products": (joined + head) * steps,
            "attention": max(
                self.machine.moved(read, read / steps),
                self._attention_flops(own + rows * context * steps) / self.machine.flops,
            ),
            "elementwise": self._between(rows) * steps,
            "vocabulary": self._logits(rows) * steps,
        }
        return {"decode": timed.phase("decode", seconds, limits, rows * steps)}

    def prefill(self, prompts: int, length: int) -> dict[str, Phase]:
        """Measure prompts of `length` tokens, up to the first token of one completion of each."""
        engine, ask = self.engine(prompts), self.prompts(prompts, length)
        timed = times(lambda: self.generate(engine, ask, prompts, 1), self.repeats)
        rows = prompts * length
        joined, _ = self._products(rows)
        head = Products([self.shapes.head], self.dtype, self.device).forward(prompts, packed=True)
        limits = {
            "products": joined + head,
            "attention": self._attention_flops(prompts * length * (length + 1) // 2) / self.machine.flops,
            "elementwise": self._between(rows),
            "vocabulary": self._logits(prompts),
        }
        return {"prefill": timed.phase("prefill", timed.phases["total"], limits, rows)}

    def update(self, sequences: int, prompt: int, response: int, *, attention: str, at_once: int) -> dict[str, Phase]:
        """Measure an update of `sequences` completions of `response` tokens, eight per prompt of `prompt` tokens, with
        at most `at_once` tokens in a forward pass."""
        policy, stack = self.trainer(attention=attention, at_once=at_once)
        before = {name: value.clone() for name, value in self.loaded.model.state_dict().items()}
        builder, groups = (
            BatchBuilder(advantage=ADVANTAGES["grpo"](), selection=()),
            self.groups(sequences, prompt, response),
        )
        timed = times(lambda: self.train(stack, builder, groups), self.repeats)
        self.loaded.model.load_state_dict(before)
        items = [(item,) for item in builder.step_batch(groups, step=1).trajectories]
        share = policy.share_prompt
        cuts = micro_batches(items, stack.tokens_per_micro_batch, share_prompt=share)
        fed = [tokens_fed([items[i] for i in cut], share_prompt=share) for cut in cuts]
        batches = [(rows, len(cut) * response) for rows, cut in zip(fed, cuts, strict=True)]
        forward, backward = self._training_limits(batches, sequences, prompt, response)
        phases, tokens = timed.phases, sum(fed)
        rest = [
            total - sum(phases[name][i] for name in ("forward", "backward", "optimizer"))
            for i, total in enumerate(phases["total"])
        ]
        moved = ADAM_BYTES * self.shapes.parameters
        optimizer = {"elementwise": self.machine.moved(moved, moved)}
        return {
            "forward": timed.phase("forward", phases["forward"], forward, tokens),
            "backward": timed.phase("backward", phases["backward"], backward, tokens),
            "optimizer": timed.phase("optimizer", phases["optimizer"], optimizer),
            "host of an update": timed.phase("host", rest, {}),
        }

    def publish(self) -> dict[str, Phase]:
        """Measure the transfer of the trained weights to the engine."""
        engine, model = self.engine(8), self.loaded.model

        def work() -> None:
            asyncio.run(engine.publish(WeightUpdate(version=1, module=model)))

        timed = times(work, self.repeats)
        moved = (4 + self.dtype.itemsize) * self.shapes.parameters
        limits = {"copies": self.machine.moved(moved, moved)}
        return {"publish": timed.phase("publish", timed.phases["total"], limits)}

    def trainer(self, *, attention: str, at_once: int) -> tuple[Policy, TrainStack]:
        """Return the policy, and the stack that trains it with at most `at_once` tokens in a forward pass."""
        policy = Policy(self.loaded, compute_dtype=self.dtype, attention=attention)
        return policy, TrainStack(policy, tokens_per_micro_batch=at_once)

    def train(self, stack: TrainStack, builder: BatchBuilder, groups: Sequence[Group]) -> None:
        """Make one update by the groups."""
        objective = PolicyObjective(surrogate=SURROGATES["ppo_clip"](), aggregate=AGGREGATES["token_mean"]())
        chosen = builder.step_batch(groups, step=1)
        stack.update(objective, objective.items(chosen.trajectories, chosen.updates), lambda done, total: None)

    def engine(self, rows: int) -> LocalEngine:
        return LocalEngine(self.loaded, Local(slots=rows, dtype=self.name))  # type: ignore[arg-type]

    def generate(self, engine: LocalEngine, ask: Sequence[Prompt], rows: int, tokens: int) -> None:
        self.seed += 1
        sampling, each = Sampling(max_tokens=tokens), range(rows // len(ask))
        asked = [Request(prompt=prompt, sample=i, sampling=sampling, seed=self.seed) for prompt in ask for i in each]
        made = sum(len(completion.tokens) for completion in asyncio.run(collect(engine, asked)))
        if made != len(asked) * tokens:
            raise RuntimeError(f"{made} tokens were generated instead of {len(asked) * tokens}")

    def _tokens(self, count: int, seed: int) -> tuple[int, ...]:
        most = min(40_000, self.shapes.head[0])
        draws = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(min(1000, most // 2), most, (count,), generator=draws).tolist())

    def prompts(self, count: int, length: int) -> list[Prompt]:
        return [Prompt(uid=i, messages=(), tokens=self._tokens(length, i)) for i in range(count)]

    def groups(self, sequences: int, prompt: int, response: int) -> list[Group]:
        groups = []
        for uid, question in enumerate(self.prompts(max(1, sequences // 8), prompt)):
            completions = tuple(
                Completion(
                    prompt_uid=uid,
                    sample=sample,
                    tokens=self._tokens(response, 100 + 8 * uid + sample),
                    text="",
                    sampled_log_prob=(-10.0,) * response,
                    untruncated_log_prob=(-10.0,) * response,
                    policy_version=(0,) * response,
                    finish_reason="stop",
                    temperature=1.0,
                )
                for sample in range(min(8, sequences))
            )
            scores = tuple(Score(value=float(sample)) for sample in range(len(completions)))  # no advantage is 0
            groups.append(Group(prompt=question, completions=completions, scores=scores))
        return groups

    def _products(self, rows: int) -> tuple[float, float]:
        """Return the seconds of the joined products of all layers, and of the head, in the engine's format."""
        layers = Products(self.shapes.joined, self.dtype, self.device).forward(rows, packed=True)
        return layers, Products([self.shapes.head], self.dtype, self.device).forward(min(rows, HEAD_ROWS), packed=True)

    def _training_limits(
        self, batches: Sequence[tuple[int, int]], sequences: int, prompt: int, response: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        layers, head = (Products(own, self.dtype, self.device) for own in (self.shapes.layers, [self.shapes.head]))
        once = {rows: (layers.forward(rows, repeats=2), layers.backward(rows, repeats=2)) for rows, _ in batches}
        block = min(HEAD_ROWS, max(targets for _, targets in batches))
        of_head = (head.forward(block) / block, head.backward(block) / block)
        targets = sum(count for _, count in batches)
        fed = response - 1  # the last token predicts nothing
        groups = max(1, sequences // 8)
        pairs = groups * prompt * (prompt + 1) // 2 + sequences * (fed * prompt + fed * (fed + 1) // 2)
        attention = self._attention_flops(pairs) / self.machine.flops
        between = sum(self._between(rows, self.shapes.layers) for rows, _ in batches)
        logits = self._logits(block) * targets / block
        forward, backward = (sum(once[rows][i] for rows, _ in batches) + of_head[i] * targets for i in (0, 1))
        return (
            {"products": forward, "attention": attention, "elementwise": between, "vocabulary": logits},
            {"products": backward, "attention": 2 * attention, "elementwise": 2 * between, "vocabulary": 2 * logits},
        )

    def _attention_flops(self, pairs: int) -> float:
        """Return the FLOPs of scores and values for this number of pairs of a query and a key, in every layer."""
        return 4.0 * pairs * self.shapes.heads * self.shapes.head_dim * self.shapes.depth

    def _between(self, rows: int, shapes: Sequence[tuple[int, int]] = ()) -> float:
        """Return the seconds to write each product's operand and to read its result once: the least that norms, rotary
        embedding and activation between them must move."""
        shapes = shapes or self.shapes.joined
        size = self.dtype.itemsize
        return self.machine.moved(rows * size * sum(map(sum, shapes)), rows * size * max(map(sum, shapes)))

    def _logits(self, rows: int) -> float:
        """Return the seconds to read the logits of this number of rows once."""
        count = rows * self.shapes.head[0] * self.dtype.itemsize
        return self.machine.moved(count, count)
