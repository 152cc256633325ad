"""Measure losses and costs with four servers: 5 % of their calls fail, 5 % hang, and one server dies and comes back."""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import HERE, finish, parser, table

SLOW = 0.002  # seconds per token of a fake server
IDLE = 2.0  # seconds without a token after which a completion counts as hung
SIDES: dict[str, dict[str, float]] = {"well": {}, "faulty": {"error": 0.05, "hang": 0.05}}


@dataclass
class Figures:
    """The figures of one side.

    Args:
        seconds: [N] from a prompt's request to each of its completions.
        lengths: [N] tokens of each.
        wrong: completions whose log-probs differ from the formula.
        missing, doubled: completions that did not arrive, and that arrived twice.
        counts: counters of `Engine.health`.
    """

    seconds: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    wrong: int = 0
    missing: int = 0
    doubled: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        tokens = sum(self.lengths)
        lost = self.counts["tokens_lost"]
        return {
            "completions": len(self.seconds),
            "missing": self.missing,
            "doubled": self.doubled,
            "wrong": self.wrong,
            "p50_seconds": round(float(np.percentile(self.seconds, 50)), 3),
            "p99_seconds": round(float(np.percentile(self.seconds, 99)), 3),
            "mean_length": round(tokens / len(self.lengths), 3),
            "lost_share": round(lost / (lost + tokens), 4),
            **{name: self.counts[name] for name in ("retried", "ejected", "returned")},
        }


async def measure(engine: Any, servers: Sequence[Any], prompts: int, callers: int, dies: bool) -> Figures:
    from tests.engine.http.plain_dialect import expected, requests, update

    figures, todo = Figures(), iter(range(prompts))
    await engine.publish(update(1))

    async def caller() -> None:
        for uid in todo:
            asked = {(r.prompt.uid, r.sample): r for r in requests(1, 8, first=uid, max_tokens=24)}
            start, keys = time.monotonic(), []
            async for completion in engine.generate(list(asked.values())):
                figures.seconds.append(time.monotonic() - start)
                figures.lengths.append(len(completion.tokens))
                keys.append(completion.key[:2])
                right = expected(asked[keys[-1]], completion)
                figures.wrong += not np.allclose(completion.sampled_log_prob, right, atol=1e-5)
            figures.doubled += len(keys) - len(set(keys))
            figures.missing += len(set(asked) - set(keys))

    async def disaster() -> None:
        for share in (0.3, 0.6):
            while len(figures.seconds) < share * prompts * 8:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(servers[0].die if share == 0.3 else servers[0].come_back)

    await asyncio.gather(*(caller() for _ in range(callers)), *([disaster()] if dies else []))
    figures.counts = (await engine.health()).detail["replicas"]
    return figures


def side(name: str, facts: dict[str, Any], prompts: int, callers: int, seed: int) -> Figures:
    from tests.engine.http.plain_dialect import engine_over, fakes

    with tempfile.TemporaryDirectory() as folder, fakes(4, rates=SIDES[name], facts=facts, slow=SLOW) as servers:
        for i, server in enumerate(servers):
            server.draws = random.Random(10 * seed + i)
        with engine_over(servers, Path(folder), idle_seconds=IDLE, max_running=16, retries=8) as engine:
            return asyncio.run(measure(engine, servers, prompts, callers, dies=name == "faulty"))


def main() -> None:
    p = parser(__doc__, repeats=3)
    p.add_argument("--prompts", type=int, default=150, help="of 8 completions each (default: %(default)s)")
    p.add_argument("--callers", type=int, default=6, help="prompts that generate at once (default: %(default)s)")
    o = p.parse_args()
    sys.path.insert(0, str(HERE.parent))  # the fakes are those of the tests
    rows, runs = list[list[str]](), list[dict[str, Any]]()
    for kind, facts in (("random", {"batch_invariant": False}), ("repeatable", {"batch_invariant": True})):
        for name in SIDES:
            for seed in range(o.repeats):
                run = {"servers": kind, "side": name, "seed": seed}
                run |= side(name, facts, o.prompts, o.callers, seed).json()
                runs.append(run)
                rows.append([str(value) for value in run.values()])
    print(f"{o.prompts} prompts of 8 completions, {o.callers} at once, over 4 servers\n")
    print(table(list(runs[0]), rows) + "\n")
    reached = not any(run["missing"] or run["doubled"] or run["wrong"] for run in runs)
    finish(
        {
            "claim": "replica_faults",
            "reached": reached,
            "runs": runs,
            "prompts": o.prompts,
            "callers": o.callers,
            "idle_seconds": IDLE,
            "seconds_a_token": SLOW,
        },
        o.json_out,
    )
