"""Stored answers of forced lag: weights, and the gradient against one from fresh answers.

A chain of policies is trained, π_0 … π_8. An answer of lag ℓ has ℓ equal segments, sampled by π_{8-ℓ} … π_7, as when
each new version interrupts it. On these tokens both weights are measured, and the gradient of the loss at π_8 with each
of them, against the gradient from fresh answers of π_8. A line of the results is one chain; one that has every gradient
is not repeated.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evidence.mechanism.run import SETTINGS, answer, is_right, questions, trajectories
from evidence.mechanism.run import returns as mean_reward
from proxima.config.presets import ALGORITHMS
from proxima.core import AGGREGATES, SURROGATES, policy_loss
from proxima.core.correction import CORRECTIONS
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.data.trajectory import Trajectory
from proxima.engine.local.local_engine import Local, LocalEngine
from proxima.engine.protocol import Request, Sampling, WeightUpdate
from proxima.model.load import load
from proxima.model.policy import Policy
from proxima.model.pretrained import without_progress_bars
from proxima.system.jsonl import read_lines
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.optimizer import AdamW
from proxima.training.stack import TrainStack

TOKENS, PROMPTS, GROUP, UPDATES = 68, 16, 8, 4
VERSIONS, LAGS, CHAINS = 8, (1, 2, 4, 8), 5
STALE, FRESH = 16, 390  # batches of 128 answers
RESULTS = Path(__file__).parent / "stored.jsonl"


# The presets whose weights they are; with none, the answers count as fresh.
WEIGHTINGS = {"none": None, "decoupled": "decoupled", "segment-wise": "sdp"}
LOWER, UPPER = 0.2, 5.0  # of the weights that those presets keep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/evidence/chain_15"), help="(default: %(default)s)")
    parser.add_argument("--chains", type=int, nargs="+", default=range(1, CHAINS + 1), help="(default: 1 to 5)")
    parser.add_argument("--stale", type=int, default=STALE, help="batches of each lag (default: %(default)s)")
    parser.add_argument("--fresh", type=int, default=FRESH, help="fresh batches (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    o = parser.parse_args()
    torch.set_num_threads(1)
    lines = {line["chain"]: line for line in read_lines(o.out)}
    whole = {chain for chain, line in lines.items() if all(map(has_every_gradient, line["lags"].values()))}
    for chain in sorted(set(o.chains) - whole):
        with without_progress_bars():
            lines[chain] = asyncio.run(Chain(o.model, chain).measure(o.stale, o.fresh))
        o.out.write_text("".join(json.dumps(line) + "\n" for line in lines.values()), encoding="utf-8")
        print(f"chain {chain} is done", flush=True)


def has_every_gradient(of_lag: Mapping[str, Any]) -> bool:
    return WEIGHTINGS.keys() <= of_lag["gradients"].keys()


class Chain:
    """Policies π_0 … π_8 from one seed, and an engine that samples with any of them."""

    def __init__(self, model: Path, number: int) -> None:
        self.number = number
        self.loaded = load(str(model))
        self.policy = Policy(self.loaded, compute_dtype=torch.float32)
        self.engine = LocalEngine(self.loaded, Local(slots=PROMPTS * GROUP, dtype="float32"))
        self.versions: list[dict[str, Any]] = []
        self.published = self.asked = 0

    async def measure(self, stale: int, fresh: int) -> dict[str, Any]:
        returns = [await self.train(version) for version in range(VERSIONS)]
        self.keep()
        target, again = Gradients(), Gradients()
        await self.use(VERSIONS)
        for _ in range(fresh):
            target.add(self.gradient(self.rows(await self.groups()), "none"))
        for _ in range(stale):
            again.add(self.gradient(self.rows(await self.groups()), "none"), target)
        lags = {lag: await self.stale(lag, stale, target) for lag in LAGS}
        on_policy = {"returns": returns} | again.against(target)
        return {"chain": self.number, "fresh": on_policy, "lags": lags}

    async def train(self, version: int) -> float:
        """Keep π_version, make the updates that end it, and return its mean reward."""
        self.keep()
        await self.use(version)
        groups = await self.groups()
        rows = self.rows(groups)
        if version == 0:
            self.stack = TrainStack(self.policy, optimizer=AdamW(lr=1e-4), tokens_per_micro_batch=16384)
        surrogate = SURROGATES["ppo_clip"](epsilon_low=0.2, epsilon_high=0.2)
        objective = PolicyObjective(surrogate=surrogate, aggregate=AGGREGATES["token_mean"]())
        self.stack.update(objective, [rows[part::UPDATES] for part in range(UPDATES)])
        return mean_reward(groups)

    def keep(self) -> None:
        self.versions.append({name: value.clone() for name, value in self.loaded.model.state_dict().items()})

    async def use(self, version: int) -> None:
        """Trainer and engine have the weights of a version."""
        self.loaded.model.load_state_dict(self.versions[version])
        self.published += 1
        await self.engine.publish(WeightUpdate(version=self.published, module=self.loaded.model))

    async def groups(self) -> list[Group]:
        asked = self.questions()
        return await answer(self.engine, asked, GROUP, Sampling(max_tokens=TOKENS), seed=self.number)

    def questions(self) -> list[Prompt]:
        """Questions that were not asked before in this chain."""
        self.asked += 1
        seed, first = 1000 * self.number + self.asked, PROMPTS * self.asked
        return questions(SETTINGS["chain_15"].task, "train", self.loaded.tokenizer, PROMPTS, seed=seed, first=first)

    def rows(self, groups: Sequence[Group]) -> list[Trajectory]:
        """Answers with the log-probs of the weights that the trainer has, as μ and as proximal policy."""
        rows = trajectories(groups)
        return [
            replace(r, behavior_log_prob=x, proximal_log_prob=x) for r, x in zip(rows, self.scored(rows), strict=True)
        ]

    @torch.no_grad()
    def scored(self, rows: Sequence[Trajectory]) -> list[Any]:
        parts = self.policy(self.policy.pack(rows)).log_prob.split([len(row.tokens) for row in rows])
        return [part.cpu().numpy() for part in parts]

    # ---- stale answers

    async def stale(self, lag: int, batches: int, target: "Gradients") -> dict[str, Any]:
        """The statistics of both weights, and of the gradient with each, over batches of answers of this lag."""
        gradients = {name: Gradients() for name in WEIGHTINGS}
        weights: dict[str, list[Any]] = {"decoupled": [], "segment-wise": []}
        rewards: list[float] = []
        for _ in range(batches):
            groups, versions = await self.interrupted(lag)
            rows = trajectories(groups)
            rewards.append(mean_reward(groups))
            scores = []
            for version in range(VERSIONS - lag, VERSIONS + 1):
                self.loaded.model.load_state_dict(self.versions[version])
                scores.append(np.concatenate(self.scored(rows)))
            table, at = np.stack(scores), np.concatenate(versions) - (VERSIONS - lag)
            behavior, following = (table[at + later, np.arange(len(at))] for later in (0, 1))
            weights["decoupled"].append(table[-1] - behavior)
            weights["segment-wise"].append(following - behavior)
            cuts = np.cumsum([len(row.tokens) for row in rows])[:-1]
            columns = [np.split(x, cuts) for x in (behavior, following, table[-1])]
            self.loaded.model.load_state_dict(self.versions[VERSIONS])
            told = [
                replace(row, behavior_log_prob=b, next_log_prob=n, proximal_log_prob=v)
                for row, b, n, v in zip(rows, *columns, strict=True)
            ]
            for name in WEIGHTINGS:
                gradients[name].add(self.gradient(told, name), target)
        return {
            "reward": float(np.mean(rewards)),
            "weights": {name: spread(np.concatenate(logs)) for name, logs in weights.items()},
            "gradients": {name: own.against(target) for name, own in gradients.items()},
        }

    async def interrupted(self, lag: int) -> tuple[list[Group], list[Any]]:
        """Answers in `lag` segments, each by the next version, and the version of each of their tokens."""
        asked, length = self.questions(), -(-TOKENS // lag)
        tokens = {(p.uid, i): np.zeros(0, np.int32) for p in asked for i in range(GROUP)}
        versions = {key: np.zeros(0, np.int64) for key in tokens}
        open_, ended = set(tokens), dict[tuple[int, int], Completion]()
        for turn in range(lag):
            await self.use(VERSIONS - lag + turn)
            sampling = Sampling(max_tokens=min(length, TOKENS - turn * length))
            requests = [
                Request(
                    prompt=replace(p, tokens=np.concatenate([p.tokens, tokens[p.uid, i]])),
                    sample=i, sampling=sampling, seed=self.number, turn=turn,
                )
                for p in asked for i in range(GROUP) if (p.uid, i) in open_
            ]  # fmt: skip
            async for made in self.engine.generate(requests):
                key = made.prompt_uid, made.sample
                tokens[key] = np.concatenate([tokens[key], made.tokens])
                versions[key] = np.concatenate([versions[key], np.full(len(made.tokens), VERSIONS - lag + turn)])
                ended[key] = made
                if made.finish_reason == "stop":
                    open_.discard(key)
        groups = []
        for p in asked:
            keys = [(p.uid, i) for i in range(GROUP)]
            whole = tuple(self.whole(ended[key], tokens[key]) for key in keys)
            scores = tuple(Score(value=is_right(c.text, p.answer)) for c in whole)
            groups.append(Group(prompt=p, completions=whole, scores=scores))
        return groups, [versions[p.uid, i] for p in asked for i in range(GROUP)]

    def whole(self, last: Completion, tokens: Any) -> Completion:
        """An answer from its segments; only tokens and text count here."""
        text = self.loaded.tokenizer.decode(tokens, skip_special_tokens=True)
        zeros = np.zeros(len(tokens), np.float32)
        return replace(
            last, turn=0, tokens=tokens, text=text, policy_version=zeros.astype(np.int32),
            sampled_log_prob=zeros, untruncated_log_prob=zeros,
        )  # fmt: skip

    def gradient(self, rows: Sequence[Trajectory], name: str) -> torch.Tensor:
        """The gradient of the loss at the trainer's weights, over all weights, as one vector."""
        preset = WEIGHTINGS[name]
        corrections = [] if preset is None else ALGORITHMS[preset]["correction"]
        batch = self.policy.pack(rows)
        self.loaded.model.zero_grad()
        policy_loss(
            batch.policy_batch(self.policy(batch).log_prob),
            surrogate=made(SURROGATES, ALGORITHMS["decoupled"]["surrogate"]),
            aggregate=AGGREGATES["token_mean"](),
            correction=[made(CORRECTIONS, settings) for settings in corrections],
        ).value.backward()
        return torch.cat([p.grad.flatten() for p in self.loaded.model.parameters() if p.grad is not None])


def made(table: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """An object of a preset."""
    return table[settings["kind"]](**{name: value for name, value in settings.items() if name != "kind"})


class Gradients:
    """The mean of gradients, each of one batch, and their variance."""

    def __init__(self) -> None:
        self.count, self.total, self.squares, self.cosines = 0, torch.zeros(()), 0.0, list[float]()

    def add(self, gradient: torch.Tensor, target: "Gradients | None" = None) -> None:
        gradient = gradient.double()
        if target is not None:
            self.cosines.append(cosine(gradient, target.mean))
        self.count, self.total = self.count + 1, self.total + gradient
        self.squares += float(gradient.square().sum())

    @property
    def mean(self) -> torch.Tensor:
        return self.total / self.count

    @property
    def variance(self) -> float:
        """The expected squared distance of a batch's gradient from its expectation."""
        return (self.squares - self.count * float(self.mean.square().sum())) / (self.count - 1)

    @property
    def square(self) -> float:
        """The squared norm of the expectation, without what the noise of the mean adds to it."""
        return float(self.mean.square().sum()) - self.variance / self.count

    def against(self, target: "Gradients") -> dict[str, float]:
        """Bias² and variance as shares of the squared norm of the true gradient, without the noise of both means, so
        that the bias may be below 0; the cosine of the two means; and the mean cosine of a batch's gradient and the
        true one."""
        distance = float((self.mean - target.mean).square().sum())
        bias = distance - self.variance / self.count - target.variance / target.count
        shares = {"bias": bias / target.square, "variance": self.variance / target.square}
        return shares | {"cosine": cosine(self.mean, target.mean), "batch_cosine": float(np.mean(self.cosines))}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def spread(logs: Any) -> dict[str, float]:
    """Of weights, given as logarithms: the deviation of the logarithm, the effective share of the sample,
    (Σw)²/(nΣw²), and the share outside [.2, 5]."""
    weights = np.exp(logs)
    outside = (weights < LOWER) | (weights > UPPER)
    effective = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    return {"deviation": float(logs.std()), "effective": float(effective), "outside": float(outside.mean())}


if __name__ == "__main__":
    main()
