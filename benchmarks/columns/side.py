"""Measure one version of proxima: hold completions, build trajectories, pack them by micro-batch, write the rollouts.

It runs with both versions: the engine's output and the trainer's report take the form of the measured version.
"""

import gc
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.side import Channel, argument, serve

GROUP, BUDGET, PROMPT = 8, 65_536, 64


def resident() -> int:
    """Return the resident memory of the process in bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    channel, settings = Channel(), argument()
    import numpy as np
    import torch

    from proxima.data import Completion, Group, Prompt, Score, Trajectory, pack
    from proxima.runtime.state import rollouts
    from proxima.train import TokenStatistics

    torch.set_num_threads(settings["threads"])
    columns = "sampled_log_prob" in Completion.__dataclass_fields__
    draw = np.random.default_rng(1)

    def own(values: np.ndarray) -> Any:
        return values if columns else tuple(values.tolist())

    def log_probs(count: int) -> Any:
        sure = -np.exp(-2 - draw.exponential(4, size=count))  # most tokens of a trained policy are near certain
        return own(np.where(draw.random(count) < 0.7, sure, -draw.exponential(size=count)).astype(np.float32))

    def completion(uid: int, sample: int) -> Completion:
        n = settings["tokens"]
        tokens, log_prob = own(draw.integers(0, 50_000, n).astype(np.int32)), log_probs(n)
        facts = {"tokens": tokens, "untruncated_log_prob": log_prob}
        if columns:  # the engine shares one array where nothing truncates, and one number where all versions are equal
            facts |= {"sampled_log_prob": log_prob, "policy_version": np.broadcast_to(np.int32(3), n)}
        else:  # the engine collected a list for each
            facts |= {"behavior_log_prob": tuple(x + 0.0 for x in log_prob), "policy_version": (3,) * n}
        rest = {"text": "4" * n, "finish_reason": "length", "temperature": 1.0}
        return Completion(prompt_uid=uid, sample=sample, **facts, **rest)

    pack([Trajectory(prompt_tokens=(1,), tokens=(1, 2), group=0)])  # warm-up: imports parts of torch
    before = resident()
    groups = []
    for uid in range(settings["completions"] // GROUP):
        prompt = Prompt(uid=uid, messages=({"role": "user", "content": "2 + 2"},), tokens=(1,) * PROMPT, answer=4)
        made = tuple(completion(uid, sample) for sample in range(GROUP))
        groups.append(Group(prompt=prompt, completions=made, scores=(Score(value=1.0),) * GROUP))
    held = resident() - before
    per_batch = max(1, BUDGET // settings["tokens"])

    def trajectories() -> list[Trajectory]:
        pairs = [(g.prompt, c) for g in groups for c in g.completions]
        return [Trajectory.of(p, c, group=p.uid, advantage=0.5) for p, c in pairs]

    def once() -> dict[str, float]:
        start = time.process_time()
        made = trajectories()
        traced = time.process_time()
        tokens = sum(len(pack(made[i : i + per_batch]).target) for i in range(0, len(made), per_batch))
        assert tokens == settings["completions"] * settings["tokens"]
        packed = time.process_time()
        outputs = []
        for item in made:  # the trainer's report on its first forward pass, not timed
            n = len(item.tokens)
            outputs.append({"log_prob": log_probs(n), "keep": own(np.ones(n, bool)), "entropy": log_probs(n)})
        with tempfile.TemporaryDirectory() as folder:
            writing = time.process_time()
            write(Path(folder) / "000001.parquet", made, outputs)
            written = time.process_time()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        return {"trajectories": traced - start, "pack": packed - traced, "write": written - writing, "peak_bytes": peak}

    def write(path: Path, made: list[Trajectory], outputs: list[dict[str, Any]]) -> None:
        if columns:
            records = {
                item.key: rollouts.CompletionRecord(
                    outcome="trained", advantage=0.5, trajectory=item, statistics=TokenStatistics(**output)
                )
                for item, output in zip(made, outputs, strict=True)
            }
            rollouts.write_rollouts(path, 1, groups, records)
        else:
            fates = [rollouts.Fate(outcome="trained", advantage=0.5, **output) for output in outputs]
            rollouts.write_rollouts(path, 1, groups, fates)

    serve(once, channel, held_bytes=held)


if __name__ == "__main__":
    main()
