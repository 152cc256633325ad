"""Run folders with the records that a test names; no model."""

import json

from proxima.experiments.run_comparison import compare_runs
from proxima.experiments.run_reader import find_runs, read_run

CONFIG = """\
model:
  path: models/m                 # r.yaml:1
task:
  kind: arithmetic               # r.yaml:2
eval:
  limit: 100                     # default
algorithm:
  preset: {kind}                 # r.yaml:3
  surrogate:
    kind: {kind}                 # r.yaml:3
train:
  steps: {steps}                 # default
  optimizer:
    lr: 1.0e-05                  # default
runtime:
  threads: {threads}             # default
seed: {seed}                     # command line
folder: {folder}                 # command line
"""


def step(number, reward=0.5, seconds=2.0, **more):
    facts = {
        "kind": "train",
        "step": number,
        "time": 99.0,
        "reward/mean": reward,
        "time/step": seconds,
        "time/generate": seconds / 2,
    }
    facts |= {"time/train": seconds / 4, "tokens/generated": 100, "tokens/trained": 40, "length/mean": 8.0}
    return facts | more


def answered(number, accuracy, label="step", **more):
    facts = {
        "kind": "eval",
        "step": number,
        "time": 99.0,
        "label": label,
        "accuracy": accuracy,
        "questions": 100,
        "correct": 1,
    }
    return facts | more


def make_run(folder, records, *, kind="cppo", seed=1, status="done", config=CONFIG, threads=1, steps=None, **done):
    """Write it; the folder. `done`: what summary.json has beside its status."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    last = max((r["step"] for r in records if r["kind"] == "train"), default=0)
    (folder / "config.yaml").write_text(
        config.format(kind=kind, seed=seed, folder=folder, threads=threads, steps=steps or last)
    )
    if status:
        (folder / "summary.json").write_text(json.dumps({"status": status, "steps": last, **done}))
    return folder


def curve(accuracies, every=2, seconds=2.0, reward=0.5, **more):
    """Evaluations at 0, `every`, … and the steps between them."""
    records = [answered(0, accuracies[0], "before")]
    for i, accuracy in enumerate(accuracies[1:], 1):
        records += [step(s, reward=reward, seconds=seconds, **more) for s in range(every * (i - 1) + 1, every * i + 1)]
        records.append(answered(every * i, accuracy))
    return records


def make_sweep(root, cells):
    """`cells`: name → {seed: (records, options)}; as a sweep leaves them."""
    listed = []
    for name, seeds in cells.items():
        for seed, (records, options) in seeds.items():
            make_run(root / name / f"seed-{seed}", records, seed=seed, **{"kind": name, **options})
            listed.append({"cell": name, "seed": seed, "folder": f"{name}/seed-{seed}"})
    (root / "sweep.json").write_text(json.dumps({"runs": listed}))
    return root


def comparison(root, **more):
    """Of all runs below a folder."""
    return compare_runs([read_run(folder) for folder in find_runs([root])], **more)
