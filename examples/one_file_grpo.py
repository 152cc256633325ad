"""The whole method in one file: GRPO on arithmetic, on the public API of proxima.

    python examples/one_file_grpo.py --model models/smollm2-135m-instruct --steps 40

Read `learn` from top to bottom and you have read the method. It is what `proxima train` does, less what a long run
needs: it keeps no journal and no checkpoint, packs each update into one forward pass, scores in the same process, and
stops at the first error.

Four policies are behind the one number that is minimised. The *behavior* policy sampled the tokens (the engine, in
bf16); the *proximal* policy is the centre of the trust region (here the same); the *current* policy gets the gradient;
the *reference* would keep it near its start (here absent). Change SURROGATE to another of `proxima.core.SURROGATES` to
get another algorithm.
"""

import argparse
import asyncio
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from proxima.core import Outcomes, PpoClip, TokenMean, mismatch_metrics, policy_loss
from proxima.core.advantage.group import Grpo
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.data.trajectory import Trajectory
from proxima.engine.local.local_engine import Local, LocalEngine
from proxima.engine.protocol import Request, Sampling, WeightUpdate
from proxima.model.load import load
from proxima.model.policy import Policy
from proxima.model.precision import compute_dtype

SYSTEM = "Reply with only the number."
SURROGATE = PpoClip(epsilon_low=0.2, epsilon_high=0.28)
ADVANTAGE = Grpo(scale="none")
AGGREGATE = TokenMean()

Reward = Callable[[Prompt, Completion], Score]


@dataclass(frozen=True)
class Question:
    """A question, and its right answer."""

    text: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The few settings of a run. The demo has 16 x 8 completions of 12 tokens."""

    steps: int = 40
    prompts: int = 8
    completions: int = 8
    max_tokens: int = 12
    lr: float = 1e-5
    warmup: int = 5
    max_grad_norm: float = 1.0
    seed: int = 1
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # the faster one on this machine


# ---- the task: questions, and a judge of answers ---------------------------------------------------------------------


def arithmetic(seed: int, high: int = 20, held_out: int = 100) -> tuple[list[Question], list[Question]]:
    """Return all sums of two numbers up to `high`, shuffled and split into training and held-out questions: no question
    is in both."""
    pairs = [(a, b) for a in range(1, high + 1) for b in range(1, high + 1)]
    random.Random(seed).shuffle(pairs)
    questions = [Question(f"What is {a} + {b}?", str(a + b)) for a, b in pairs]
    return questions[held_out:], questions[:held_out]


def last_number_is_right(prompt: Prompt, completion: Completion) -> Score:
    """Score 1 if the last number in the text is the answer, else 0."""
    numbers = re.findall(r"-?\d+", completion.text)
    right = bool(numbers) and numbers[-1] == prompt.answer
    return Score(value=float(right), correct=right)


def ask(tokenizer: object, question: Question, uid: int) -> Prompt:
    """Return the question as the model sees it: through its chat template, up to where its answer begins."""
    messages = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": question.text})
    tokens = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    return Prompt(uid=uid, messages=messages, tokens=tuple(tokens), answer=question.answer)


def batches(questions: Sequence[Question], tokenizer: object, s: Settings) -> Iterator[list[Prompt]]:
    """Yield `s.prompts` prompts at a time, endlessly. A uid numbers every prompt ever asked; sampling draws depend on
    it, the seed and the sample only."""
    uid = 0
    while True:
        yield [ask(tokenizer, questions[(uid + i) % len(questions)], uid + i) for i in range(s.prompts)]
        uid += s.prompts


# ---- the four verbs of a step ----------------------------------------------------------------------------------------


async def generate(
    engine: LocalEngine, prompts: Sequence[Prompt], samples: int, sampling: Sampling, seed: int
) -> list[list[Completion]]:
    """Generate `samples` completions of each prompt. They arrive in any order, each when it ends, and are put back in
    order here."""
    requests = [
        Request(prompt=prompt, sample=i, sampling=sampling, seed=seed) for prompt in prompts for i in range(samples)
    ]
    completions = {(c.prompt_uid, c.sample): c async for c in engine.generate(requests)}
    return [[completions[prompt.uid, i] for i in range(samples)] for prompt in prompts]


def score(prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]], reward: Reward) -> list[Group]:
    """Return each prompt with its completions and their scores."""
    return [
        Group(prompt=prompt, completions=tuple(mine), scores=tuple(reward(prompt, c) for c in mine))
        for prompt, mine in zip(prompts, completions, strict=True)
    ]


def trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    """Return each completion with its advantage: how much better it did than the others of its group."""
    advantage = ADVANTAGE(Outcomes.from_groups(groups)).tolist()
    rows = [(number, group.prompt, c) for number, group in enumerate(groups) for c in group.completions]
    return [
        Trajectory.of(prompt, c, group=number, advantage=a)
        for (number, prompt, c), a in zip(rows, advantage, strict=True)
    ]


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, rows: Sequence[Trajectory], max_grad_norm: float
) -> dict[str, float]:
    """Take one optimizer step on a packed batch: no padding, and each group's prompt run once."""
    batch = policy.pack(rows)
    log_prob = policy(batch).log_prob  # [N], of every response token given all before it, with gradient
    tokens = batch.policy_batch(log_prob)
    loss = policy_loss(tokens, surrogate=SURROGATE, aggregate=AGGREGATE)
    loss.value.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss.value.item(), "grad_norm": norm.item()} | {
        name: value.value for name, value in (loss.metrics | mismatch_metrics(tokens)).items()
    }


# ---- the method ------------------------------------------------------------------------------------------------------


async def learn(
    model: str, questions: Sequence[Question], reward: Reward, s: Settings
) -> tuple[Policy, LocalEngine, list[dict[str, float]]]:
    """Generate, score, compare, update and publish, step by step."""
    loaded = load(model)
    products = compute_dtype(s.dtype, loaded.model.device)
    policy = Policy(loaded, compute_dtype=products)  # float32 weights; matrix products in `dtype`
    engine = LocalEngine(policy.loaded, Local(slots=s.prompts * s.completions, dtype=s.dtype))  # its own copy of them
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=s.lr, weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / s.warmup))
    sampling = Sampling(temperature=1.0, max_tokens=s.max_tokens)
    history: list[dict[str, float]] = []
    for step, prompts in zip(range(s.steps), batches(questions, policy.loaded.tokenizer, s), strict=False):
        start = time.perf_counter()
        completions = await generate(engine, prompts, s.completions, sampling, s.seed)
        groups = score(prompts, completions, reward)
        metrics = update(policy, optimizer, trajectories(groups), s.max_grad_norm)
        warm_up.step()
        await engine.publish(WeightUpdate(version=step + 1, module=policy.model))
        mean = sum(x.value for group in groups for x in group.scores) / (s.prompts * s.completions)
        history.append({"step": step + 1, "reward": mean, "seconds": time.perf_counter() - start} | metrics)
        print(line(history[-1]), flush=True)
    return policy, engine, history


async def accuracy(engine: LocalEngine, questions: Sequence[Question], tokenizer: object, max_tokens: int) -> float:
    """Return the share of questions answered correctly by greedy decoding."""
    prompts = [ask(tokenizer, question, uid) for uid, question in enumerate(questions)]
    answers = await generate(engine, prompts, 1, Sampling(temperature=0.0, max_tokens=max_tokens), seed=0)
    return sum(
        last_number_is_right(prompt, only).value for prompt, (only,) in zip(prompts, answers, strict=True)
    ) / len(prompts)


def line(m: dict[str, float]) -> str:
    return (
        f"step {m['step']:>3}   reward {m['reward']:.2f}   kl {m['approx_kl']:.4f}   masked "
        f"{100 * m['masked_fraction']:.1f} %   "
        f"engine-trainer {m['mismatch/log_prob_absdiff_mean']:.4f} nats   grad {m['grad_norm']:.2f}   "
        f"{m['seconds']:.1f} s"
    )


async def run(model: str, s: Settings) -> None:
    training, held_out = arithmetic(s.seed)
    before = load(model)
    engine = LocalEngine(before, Local(dtype=s.dtype))
    print(
        f"held-out accuracy before: {await accuracy(engine, held_out, before.tokenizer, s.max_tokens):.2f}", flush=True
    )
    del engine, before
    policy, engine, _ = await learn(model, training, last_number_is_right, s)
    print(f"held-out accuracy after:  {await accuracy(engine, held_out, policy.loaded.tokenizer, s.max_tokens):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder or name")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--seed", type=int, default=Settings.seed)
    options = parser.parse_args()
    asyncio.run(run(options.model, Settings(steps=options.steps, seed=options.seed)))
