"""A run folder made through the real writers, with numbers of a plausible run: no model, no time."""

import math
import random
from dataclasses import replace

from proxima.data import Completion, Group, Prompt, Score
from proxima.evaluate.intervals import wilson_interval
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import write_evals, write_rollouts
from proxima.runtime.watch.observer import RunInfo
from proxima.system.environment import describe_environment
from proxima.train import TokenStatistics
from proxima.train.completion_record import CompletionRecord

CONFIG = """\
model:
  path: SmolLM2-135M-Instruct                # recipes/quickstart.yaml:4
  compute_dtype: bfloat16                    # default
algorithm:
  surrogate:
    kind: cppo                               # preset cppo, chosen in recipes/quickstart.yaml:9
    delta: 0.2                               # command line, over 0.15 of the preset
task:
  kind: arithmetic                           # recipes/quickstart.yaml:11
train:
  steps: 40                                  # recipes/quickstart.yaml:17
  prompts_per_step: 8                        # recipes/quickstart.yaml:18
  completions_per_prompt: 8                  # recipes/quickstart.yaml:19
  updates_per_step: 1                        # default
  epochs_per_step: 1                         # default
  tokens_per_micro_batch: 2048               # recipes/quickstart.yaml:20
seed: 1                                      # command line
"""


COMPOSITION = "8 prompts × 8 completions = 64 sequences → micro-batches ≤ 2,048 tokens → 1 update"


def info(folder, steps=40, **more):
    facts = {
        "version": "0.1.0",
        "algorithm": "cppo",
        "model": "SmolLM2-135M-Instruct",
        "seed": 1,
        "folder": folder,
        "steps": steps,
    }
    facts |= {"composition": COMPOSITION, "parameters": 134_515_008}
    return RunInfo(**facts | {"threads": 2, "dtype": "bfloat16"} | more)


def record(step, steps=40, seed=1, **more):
    """A line of metrics.jsonl."""
    draw = random.Random(1000 * seed + step)
    learnt = 1 / (1 + math.exp(-10 * (step / steps - 0.35)))
    reward = min(1.0, 0.15 + 0.8 * learnt + draw.gauss(0, 0.04))
    generate, train = 1.1 + 0.2 * draw.random(), 1.6 + 0.3 * draw.random()
    length = 8.4 - 2 * learnt + draw.gauss(0, 0.15)
    return {
        "kind": "train",
        "step": step,
        "time": 18.0 + 3.2 * step,
        "reward/mean": reward,
        "reward/std": math.sqrt(max(reward * (1 - reward), 0.0)),
        "reward/part/answer": reward,
        "reward/invalid": 3 if step == 12 else 0,
        "accuracy": reward,
        "length/mean": length,
        "length/max": 12,
        "truncated_fraction": 0.1 * (1 - learnt),
        "loss": -0.02 * (1 - learnt) + draw.gauss(0, 0.004),
        "entropy/mean": 0.9 - 0.7 * learnt + draw.gauss(0, 0.03),
        "approx_kl": 0.0002 + 0.003 * learnt * abs(draw.gauss(1, 0.3)),
        "ratio_mean": 1.0001,
        "ratio_max": 1.4 + draw.random(),
        "masked_fraction": 0.004 + 0.015 * learnt * draw.random(),
        "mismatch/log_prob_absdiff_mean": 0.004,
        "grad_norm": 1.4 - 0.8 * learnt + 0.2 * draw.random(),
        "lr": 1e-5 * min(1.0, step / 5),
        "skipped_zero_advantage": round(8 * learnt) * 4,
        "dropped/uniform_groups": round(2 * learnt),
        "updates": 1,
        "prompts": 8,
        "completions": 64,
        "tokens/generated": round(64 * length),
        "tokens/trained": round(60 * length),
        "tokens_per_second/generate": 64 * length / generate,
        "tokens_per_second/train": 60 * length / train,
        "time/generate": generate,
        "time/score": 0.05,
        "time/train": train,
        "time/publish": 0.01,
        "time/step": generate + train + 0.15,
        "policy_version": step,
        **more,
    }


def evaluation(step, label, correct, questions=200, time=18.0):
    facts = {
        "kind": "eval",
        "step": step,
        "time": time,
        "label": label,
        "correct": correct,
        **wilson_interval(correct, questions).figures("accuracy"),
    }
    return facts | {
        "questions": questions,
        "length/mean": 7.5,
        "truncated_fraction": 0.01,
        "time/evaluate": 17.6,
        "answers": questions,
        "invalid": 0,
    }


def group(uid, texts, rights, question=None, failed=()):
    a, b = 1 + uid * 7 % 20, 1 + uid * 3 % 20
    prompt = Prompt(
        uid=uid,
        messages=({"role": "user", "content": question or f"What is {a} + {b}?"},),
        tokens=(1, 2, 3),
        answer={"value": a + b},
    )
    completions, scores = [], []
    for i, (text, right) in enumerate(zip(texts, rights, strict=True)):
        tokens = tuple(range(10, 11 + len(text) % 5))
        log_prob = tuple(-0.1 * (t + 1) for t in range(len(tokens)))
        plain = Completion.of_text(uid, i, text, tokens)
        completions.append(replace(plain, sampled_log_prob=log_prob, untruncated_log_prob=log_prob))
        good = Score(value=float(right), parts={"answer": float(right), "format": 0.5}, correct=bool(right))
        scores.append(Score.failed("timed out after 5 s") if i in failed else good)
    return Group(prompt=prompt, completions=tuple(completions), scores=tuple(scores))


def step_groups(step, steps):
    draw = random.Random(step)
    learnt = 1 / (1 + math.exp(-10 * (step / steps - 0.35)))
    groups = []
    for uid in range(8 * (step - 1), 8 * step):
        total = 2 + uid * 7 % 20 + uid * 3 % 20
        rights = [draw.random() < 0.15 + 0.8 * learnt for _ in range(8)]
        texts = [
            str(total) if right else f"The answer is {total + draw.randint(1, 30)}, I believe." for right in rights
        ]
        groups.append(group(uid, texts, rights, failed=(0,) if step == 12 and uid % 3 == 0 else ()))
    return groups


def records(groups):
    out = {}
    for each in groups:
        values = [s.value for s in each.scores if s.valid]
        mean = sum(values) / max(len(values), 1)
        for completion, score in zip(each.completions, each.scores, strict=True):
            n = len(completion.tokens)
            if not score.valid:
                out[completion.key] = CompletionRecord(outcome="invalid")
            elif score.value == mean:
                out[completion.key] = CompletionRecord(outcome="skipped_zero_advantage", advantage=0.0)
            else:
                facts = {"log_prob": [-0.2] * n, "keep": [True] * (n - 1) + [False], "entropy": [0.5] * n}
                out[completion.key] = CompletionRecord(
                    outcome="trained", advantage=score.value - mean, statistics=TokenStatistics(**facts)
                )
    return out


def evals(correct, questions=200):
    out = []
    for uid in range(questions):
        total, right = 2 + uid * 7 % 20 + uid * 3 % 20, (uid * 37 % questions) < correct
        text = str(total) if right else f"The sum of the two numbers you gave me is {total + 11}"
        out.append(group(uid, [text], [right]))
    return out


def make_run(path, steps=40, finished=True):
    """A whole run, or with `finished=False` one that was killed after its last step."""
    folder = RunFolder(path)
    folder.begin(overwrite=folder.has_run)
    folder.write_config(CONFIG)
    folder.write_environment(
        describe_environment(1, {"path": "SmolLM2-135M-Instruct", "parameters": 134_515_008, "sha256": "ab" * 32})
    )
    folder.append_metrics(evaluation(0, "before", 25))
    write_evals(folder.eval_file(0, "before"), 0, evals(25))
    for step in range(1, steps + 1):
        groups = step_groups(step, steps)
        write_rollouts(folder.rollout_file(step), step, groups, records(groups))
        folder.append_metrics(record(step, steps))
        if step % 10 == 0 and step < steps:
            folder.append_metrics(evaluation(step, "step", min(185, 25 + 4 * step), time=18 + 3.2 * step))
    if finished:
        folder.append_metrics(evaluation(steps, "after", 188, time=35 + 3.2 * steps))
        write_evals(folder.eval_file(steps, "after"), steps, evals(188))
        before, after = ({k: evaluation(0, "", n)[k] for k in ("accuracy", "correct", "questions")} for n in (25, 188))
        summary = {
            "status": "done",
            "steps": steps,
            "seconds": 35 + 3.2 * steps,
            "model": "SmolLM2-135M-Instruct",
            "seed": 1,
        }
        folder.write_summary(
            summary
            | {
                "algorithm": "cppo",
                "peak_memory_bytes": 3_650_722_202,
                "error": None,
                "eval": {"before": before, "after": after},
            }
        )
    folder.release()
    return folder
