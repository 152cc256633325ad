"""One batch, sixteen updates, and what each mask lets happen: `make evidence CLAIM=mechanism`.

Each mask starts from the same weights with the same answers and updates on all of them sixteen times. After each update
the drift from the policy that sampled them is measured on the batch, over the whole vocabulary, and after some of them
the return on fresh answers to other questions. A line of the results is one batch under one mask; lines that exist are
not repeated.
"""

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from evidence.tasks import ChainSums, Countdown, countdown_reward
from proxima.core import ADVANTAGES, SURROGATES, Outcomes, TokenMean
from proxima.core.correction import CORRECTIONS
from proxima.data.flow import Group, Prompt, Score
from proxima.data.trajectory import Trajectory
from proxima.engine.local.local_engine import Local, LocalEngine
from proxima.engine.protocol import Request, Sampling, WeightUpdate
from proxima.model.load import load
from proxima.model.policy import Policy
from proxima.model.pretrained import without_progress_bars
from proxima.system.jsonl import read_lines
from proxima.task.prompts import to_prompt
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.optimizer import AdamW
from proxima.training.stack import TrainStack

PROMPTS, GROUP, UPDATES, FRESH = 16, 8, 16, 128
BATCHES = 20
RESULTS = Path(__file__).parent / "results.jsonl"
ASKED = (1, 2, 4, 8, 12, 16)  # updates after which fresh answers are sampled
FRESH_UID = 1 << 40  # fresh answers have draws of their own
POSITIONS = 8  # equal parts of an answer


@dataclass(frozen=True)
class Mask:
    """What keeps the policy near μ: a surrogate, and for score centering a correction."""

    surrogate: str
    fields: dict[str, Any] = field(default_factory=dict)
    corrections: tuple[str, ...] = ()


MASKS = {
    "none": Mask("cppo", {"delta": float("inf"), "delta_b": float("inf")}),  # -A r
    "ppo": Mask("ppo_clip", {"epsilon_low": 0.2, "epsilon_high": 0.2}),
    "dppo": Mask("dppo", {"delta": 0.15}),
    "dppo_tuned": Mask("dppo"),  # with the δ of its setting
    "cppo": Mask("cppo", {"delta": 0.15}),
    "drpo": Mask("drpo"),
    "gspo": Mask("gspo", {"epsilon_low": 3e-4, "epsilon_high": 4e-4}),
    "tv_band": Mask("tv_band"),
    "score_centering": Mask("reinforce", {}, ("score_centering",)),
}


BINDING_RESULTS = RESULTS.with_name("positions.jsonl")
BINDING: tuple[tuple[str, Sequence[int], tuple[str, ...]], ...] = (  # start model, batches, masks
    ("chain_15", range(1, 6), ("cppo", "dppo_tuned", "dppo", "ppo", "gspo", "tv_band")),
    ("chain_49", (3, 4, 7, 8), ("cppo", "dppo_tuned")),
)


def is_right(text: str, answer: str) -> float:
    return float(text.rpartition("=")[2] == answer)


@dataclass(frozen=True)
class Setting:
    """What a start model is asked: questions of a task, answers of at most so many tokens, and their reward. `tuned`:
    the δ at which DPPO masks as many tokens as CPPO did in the pilot."""

    task: Callable[..., Any]
    max_tokens: int
    tuned: float
    reward: Callable[[str, str], float] = is_right


SETTINGS = {  # by the name of the start model
    "chain_15": Setting(partial(ChainSums, terms=(15,)), 70, 0.001),
    "chain_49": Setting(partial(ChainSums, terms=(49,)), 206, 0.002),
    "countdown": Setting(Countdown, 30, 0.0007, countdown_reward),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=Path("models/evidence"), help="(default: %(default)s)")
    parser.add_argument("--starts", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="(default: all)")
    parser.add_argument("--batches", type=int, default=BATCHES, help="(default: %(default)s)")
    parser.add_argument("--first", type=int, default=1, help="number of the first batch (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="(default: %(default)s)")
    o = parser.parse_args()
    torch.set_num_threads(1)
    whole = [(o.out, start, range(o.first, o.first + o.batches), tuple(MASKS)) for start in o.starts]
    binding = [(BINDING_RESULTS, *where) for where in BINDING if where[0] in o.starts and o.out == RESULTS]
    for out, start, batches, masks in whole + binding:
        with without_progress_bars():
            asyncio.run(measure(o.models / start, start, batches, out, masks))


async def measure(model: Path, start: str, batches: Sequence[int], out: Path, masks: Sequence[str]) -> None:
    """Append a line for each batch and mask that `out` lacks."""
    have = {(line["start"], line["batch"], line["mask"]) for line in read_lines(out)}
    loaded, setting = load(str(model)), SETTINGS[start]
    fresh = questions(setting.task, "test", loaded.tokenizer, FRESH, seed=1, first=FRESH_UID)
    engine = LocalEngine(loaded, Local(slots=FRESH, dtype="float32"))
    sampling = Sampling(max_tokens=setting.max_tokens)
    version = 0
    for number in batches:
        if all((start, number, name) in have for name in masks):
            continue
        version += 1
        await engine.publish(WeightUpdate(version=version, module=loaded.model))
        asked = questions(setting.task, "train", loaded.tokenizer, PROMPTS, seed=number, first=0)
        groups = await answer(engine, asked, GROUP, sampling, number, setting.reward)
        rows = with_behavior(loaded, trajectories(groups))
        before = returns(await answer(engine, fresh, 1, sampling, number, setting.reward))
        for name in masks:
            if (start, number, name) in have:
                continue
            policy = Policy(load(str(model)), compute_dtype=torch.float32)
            stack = TrainStack(policy, optimizer=AdamW(lr=1e-4, beta2=0.95), tokens_per_micro_batch=16384)
            steps = []
            for made in range(1, UPDATES + 1):
                steps.append(update(stack, mask_of(name, setting), rows) | drift(policy, rows))
                if made in ASKED:
                    version += 1
                    await engine.publish(WeightUpdate(version=version, module=policy.model))
                    steps[-1]["return"] = returns(await answer(engine, fresh, 1, sampling, number, setting.reward))
            line = {"start": start, "batch": number, "mask": name, "before": before, "steps": steps}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            last = steps[-1]
            print(f"{start}, batch {number}, {name}: return {last['return']:.3f}, KL {last['kl']:.2f}", flush=True)


def mask_of(name: str, setting: Setting) -> Mask:
    return replace(MASKS[name], fields={"delta": setting.tuned}) if name == "dppo_tuned" else MASKS[name]


def questions(
    task: Callable[..., Any], split: Literal["train", "test"], tokenizer: Any, count: int, *, seed: int, first: int
) -> list[Prompt]:
    rows = task(split=split, size=count).rows(seed)
    return [to_prompt(rows[i], first + i, tokenizer) for i in range(count)]


async def answer(
    engine: LocalEngine,
    prompts: Sequence[Prompt],
    samples: int,
    sampling: Sampling,
    seed: int,
    reward: Callable[[str, str], float] = is_right,
) -> list[Group]:
    """Sample answers to each prompt and score them."""
    requests = [Request(prompt=p, sample=i, sampling=sampling, seed=seed) for p in prompts for i in range(samples)]
    made = {(c.prompt_uid, c.sample): c async for c in engine.generate(requests)}
    groups = []
    for prompt in prompts:
        completions = tuple(made[prompt.uid, i] for i in range(samples))
        scores = tuple(Score(value=reward(c.text, prompt.answer)) for c in completions)
        groups.append(Group(prompt=prompt, completions=completions, scores=scores))
    return groups


def returns(groups: Sequence[Group]) -> float:
    return float(np.mean([score.value for group in groups for score in group.scores]))


def trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    """Answers with their advantage over the mean of their group."""
    advantage = ADVANTAGES["grpo"](scale="none")(Outcomes.from_groups(groups)).tolist()
    rows = [(number, group.prompt, c) for number, group in enumerate(groups) for c in group.completions]
    return [Trajectory.of(p, c, group=g, advantage=a) for (g, p, c), a in zip(rows, advantage, strict=True)]


def with_behavior(loaded: Any, rows: Sequence[Trajectory]) -> list[Trajectory]:
    """The answers with μ of every token of the vocabulary, by the trainer: what masks compare has no other error."""
    everything = np.arange(loaded.model.config.vocab_size, dtype=np.int32)
    rows = [replace(row, top_k=np.tile(everything, (len(row.tokens), 1))) for row in rows]
    whole = full_log_probs(Policy(loaded, compute_dtype=torch.float32), rows)
    return [
        replace(row, behavior_top_k_log_prob=x, behavior_log_prob=x[np.arange(len(row.tokens)), row.tokens])
        for row, x in zip(rows, whole, strict=True)
    ]


@torch.no_grad()
def full_log_probs(policy: Policy, rows: Sequence[Trajectory]) -> list[Any]:
    """[T, V] log-probs of each answer, nats."""
    log_probs = policy(policy.pack(rows)).top_k_log_prob
    assert log_probs is not None
    return [part.cpu().numpy() for part in log_probs.split([len(row.tokens) for row in rows])]


def update(stack: TrainStack, mask: Mask, rows: Sequence[Trajectory]) -> dict[str, Any]:
    """Make one update on all rows; return the shares of tokens whose gradient was masked, of all and by the
    advantage's sign, and `_at` equal parts of an answer."""
    corrections = [CORRECTIONS[name]() for name in mask.corrections]
    surrogate = SURROGATES[mask.surrogate](**mask.fields)
    objective = PolicyObjective(surrogate=surrogate, aggregate=TokenMean(), corrections=corrections)
    result = stack.update(objective, [rows])
    found = [(row.advantage[0] > 0, result.token_statistics.get(row.key)) for row in rows]
    masked = [(bool(good), ~statistics.keep) for good, statistics in found if statistics is not None]
    shares: dict[str, Any] = {}
    for name, signs in (("masked", (True, False)), ("masked_positive", (True,)), ("masked_negative", (False,))):
        answers = [tokens for good, tokens in masked if good in signs]
        shares[name] = float(np.concatenate(answers).mean()) if answers else 0.0
        shares[f"{name}_at"] = by_part(answers) if answers else [0.0] * POSITIONS
    return shares


def by_part(answers: Sequence[Any]) -> list[float]:
    """The mean over answers of a value of tokens, in equal parts of an answer; those of few tokens lack some."""
    parts = [[p.mean() if len(p) else np.nan for p in np.array_split(x, POSITIONS)] for x in answers]
    return [round(float(x), 6) for x in np.nanmean(parts, axis=0)]


def drift(policy: Policy, rows: Sequence[Trajectory]) -> dict[str, Any]:
    """How far π is from μ on μ's answers: `kl`, nats of a whole answer, the mean over answers; `kl_at`, nats a token in
    equal parts of an answer; `tv`, the mean over tokens of Σ|π − μ|/2; `largest`, the mean over answers of the largest
    |π − μ| of a sampled token."""
    kl, tv, largest = [], [], []
    for row, log_pi in zip(rows, full_log_probs(policy, rows), strict=True):
        log_mu = row.behavior_top_k_log_prob
        assert log_mu is not None
        token_kl = (np.exp(log_mu) * (log_mu - log_pi)).sum(1)
        kl.append(token_kl)
        tv.append(np.abs(np.exp(log_mu) - np.exp(log_pi)).sum(1).mean() / 2)
        sampled = np.arange(len(row.tokens)), row.tokens
        largest.append(np.abs(np.exp(log_mu[sampled]) - np.exp(log_pi[sampled])).max())
    whole = float(np.mean([token_kl.sum() for token_kl in kl]))
    return {"kl": whole, "kl_at": by_part(kl), "tv": float(np.mean(tv)), "largest": float(np.mean(largest))}


if __name__ == "__main__":
    main()
