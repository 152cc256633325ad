"""Run folders with a step of random tokens, as the trainer would have stored them: `keep` is that of `policy_loss` over
the whole batch; and the server of them. `python -m tests.view.microscope.stored_run FOLDER 2048 4096 MODEL` makes a
large one, for benchmarks/view."""

import asyncio
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import yaml

from proxima.core import CORRECTIONS, SURROGATES, TokenSum, policy_loss, precompute
from proxima.core.divergence import divergence
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.data.trajectory import Trajectory
from proxima.laws.batches import make_batch
from proxima.runtime.state.rollouts import write_rollouts
from proxima.training.batch_builder import CompletionRecord
from proxima.training.objectives.protocol import TokenStatistics
from proxima.view.microscope.app import MicroscopeApp
from proxima.view.microscope.server import make_server, open_runs
from tests.reward.served import running

HOSTILE = (
    '</script><script>window.ran=1</script><img src=x onerror="window.ran=2"><svg onload=window.ran=3> {{7*7}} \u2028'
)
WORDS = ("think ", "of ", "two ", "numbers ", "and ", "add ", "them ", "")


def fields_of(table, spec):
    return {"kind": table.kind_of(spec), **asdict(spec)}


def text_of(ids):
    return "".join(WORDS[i % len(WORDS)] for i in ids)


def recipe(surrogate, corrections, model):
    return {
        "model": {"path": model},
        "reward": [{"kind": "number", "weight": 1.0}],
        "algorithm": {
            "preset": "none",
            "proximal": "behavior",
            "next_missing": "decoupled",
            "surrogate": fields_of(SURROGATES, surrogate),
            "correction": [fields_of(CORRECTIONS, spec) for spec in corrections],
            "advantage": {"kind": "grpo"},
        },
        "train": {"updates_per_step": 1, "epochs_per_step": 1},
    }


def policy_batch(lengths, seed=0):
    """Tokens of a step: some far from μ, advantages of both signs, one for each sequence, the proximal policy μ
    itself."""
    all_trained = {"out_of_loss": 0.0, "not_sampled": 0.0, "garbage": False, "proximal": "behavior"}
    batch = make_batch(lengths, seed=seed, spread=0.4, dtype=torch.float32, **all_trained)
    advantage = torch.randn(len(lengths), generator=torch.Generator().manual_seed(seed))
    return replace(
        batch,
        log_prob=batch.log_prob.detach(),
        advantage=advantage.repeat_interleave(torch.tensor(lengths)),
        policy_version=torch.zeros(len(batch), dtype=torch.long),
    )


def decided(batch, surrogate, corrections=()):
    """`keep` [N], the gradient of each token relative to −A, and `selected`, all of the whole batch at once."""
    leaf = batch.log_prob.clone().requires_grad_()
    done = precompute(batch, surrogate=surrogate, correction=corrections)
    loss = policy_loss(
        replace(done.batch, log_prob=leaf), surrogate=surrogate, aggregate=TokenSum(), correction=corrections
    )
    (gradient,) = torch.autograd.grad(loss.numerator, leaf)
    return loss.keep, -gradient / batch.advantage, loss.selected


def step_content(
    surrogate, corrections=(), prompts=3, samples=4, tokens=30, seed=0, text=None, lengths=None, ids_in=(0, 250)
):  # fmt: skip
    """Groups of random tokens, what became of each completion, and the batch, what was kept of it, and the weights."""
    draw = np.random.default_rng(seed)
    lengths = lengths or [int(draw.integers(1, tokens + 1)) for _ in range(prompts * samples)]
    batch = policy_batch(lengths, seed)
    keep, weight, selected = decided(batch, surrogate, corrections)
    optional = {} if selected is None else {"selected": selected.numpy()}
    if "top_k" in surrogate.needs:
        optional["top_k_divergence"] = divergence(batch, surrogate.divergence).numpy()
    groups, records = [], {}
    columns = {name: getattr(batch, name).numpy() for name in ("log_prob", "behavior_log_prob", "entropy", "advantage")}
    starts = np.cumsum([0, *lengths])
    for uid in range(prompts):
        completions, scores = [], []
        question = text or f"Of these, what is {uid} + 1?"
        prompt = Prompt(uid=uid, messages=({"role": "user", "content": question},), tokens=(1, 2, 3))
        for sample in range(samples):
            at = uid * samples + sample
            own = slice(starts[at], starts[at + 1])
            behavior, ids = columns["behavior_log_prob"][own], draw.integers(*ids_in, lengths[at], np.int32)
            answer = text or text_of(ids)
            plain = Completion.of_text(uid, sample, answer, ids)
            completion = replace(plain, sampled_log_prob=behavior, untruncated_log_prob=behavior)
            value = float(draw.random())
            completions.append(completion)
            scores.append(Score(value=value, parts={"number": value, text or "format": 0.5}, correct=value > 0.5))
            trajectory = Trajectory(
                uid=uid, sample=sample, group=uid, prompt_tokens=prompt.tokens, tokens=ids, behavior_log_prob=behavior,
                advantage=columns["advantage"][own],
            )  # fmt: skip
            records[completion.key] = CompletionRecord(
                outcome="trained",
                advantage=float(columns["advantage"][own.start]),
                trajectory=trajectory,
                statistics=TokenStatistics(
                    log_prob=columns["log_prob"][own],
                    keep=keep.numpy()[own],
                    entropy=columns["entropy"][own],
                    **{name: values[own] for name, values in optional.items()},
                ),
            )
        groups.append(Group(prompt=prompt, completions=tuple(completions), scores=tuple(scores)))
    return groups, records, (batch, keep, weight)


def write_step(folder, step, groups, records, recipe):
    """A finished step of a run folder, which may have others."""
    folder = Path(folder)
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
    write_rollouts(folder / "rollouts" / f"{step:06d}.parquet", step, groups, records)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": step, "time": float(step), "reward/mean": 0.5}) + "\n")


def make_step(folder, surrogate, corrections=(), step=1, model="no-model-here", **content):
    """A run folder with a finished step; its batch, and what was decided."""
    groups, records, decisions = step_content(surrogate, corrections, **content)
    write_step(folder, step, groups, records, recipe(surrogate, corrections, model))
    return decisions


def served(folders, key="", **limits):
    """The port of a server of these runs, in a thread."""
    return running(make_server(MicroscopeApp(open_runs(folders), key), **limits), asyncio.run)


if __name__ == "__main__":
    place, completions, tokens, model = sys.argv[1:]
    samples = min(8, int(completions))
    shape = {"prompts": int(completions) // samples, "samples": samples, "lengths": [int(tokens)] * int(completions)}
    make_step(place, SURROGATES["cppo"](), model=model, ids_in=(300, 20_000), **shape)
