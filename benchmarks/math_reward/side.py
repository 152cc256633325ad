"""Score the answers once, as a run does: `BATCH` groups at a time, by the runner and its worker processes."""

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.math_reward.answers import Answer, groups
from benchmarks.side import Channel, argument, serve
from proxima.data.flow import Completion, Prompt, Score
from proxima.reward.base import Job
from proxima.reward.math.symbolic import Math
from proxima.reward.runner import RewardRunner

BATCH = 64  # groups a step


def completion(sample: int, text: str) -> Completion:
    return Completion(
        prompt_uid=0,
        sample=sample,
        tokens=(1,),
        text=text,
        sampled_log_prob=(0.0,),
        untruncated_log_prob=(0.0,),
        policy_version=(0,),
        finish_reason="stop",
        temperature=1.0,
    )


def judged(answer: Answer, score: Score) -> str:
    """Classify the verdict on an answer: an ordinary one is as it should be, misjudged or invalid; a hostile one is
    rewarded, wrong or invalid."""
    if answer.right is None:
        if score.valid and score.value > 0:
            return "hostile rewarded"
        if score.valid:
            return "hostile wrong"
        return "hostile invalid"
    if not score.valid:
        return "ordinary invalid"
    if score.correct == answer.right and score.value == float(answer.right):
        return "ordinary as it should be"
    return "ordinary misjudged"


def cpu_seconds(pool: Any) -> float:
    """Return the CPU seconds of the workers; those of exited ones are accumulated by the process that forks them."""
    total, fork_server = 0.0, pool._server.child.process.pid
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == fork_server:
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        elif int(entry.parent.name) == fork_server:
            total += (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    return total


def main() -> None:
    channel, settings = Channel(), argument()
    questions = groups(settings["answers"], settings["group"], settings["hostile"], settings["seed"])

    async def score(runner: RewardRunner) -> list[list[Score]]:
        scores: list[list[Score]] = []
        for start in range(0, len(questions), BATCH):
            tasks = [
                runner.score(
                    Prompt(uid=start + i, messages=(), tokens=(), answer=gold),
                    [completion(j, a.text) for j, a in enumerate(own)],
                )
                for i, (gold, own) in enumerate(questions[start : start + BATCH])
            ]
            scores += await asyncio.gather(*tasks)
        return scores

    def once() -> dict[str, Any]:
        runner = RewardRunner([Math()], workers=settings["workers"])
        try:
            pool, start = runner._pools["text"], time.perf_counter()
            asyncio.run(
                runner.score(
                    Prompt(uid=0, messages=(), tokens=(), answer=r"\pi"),
                    [completion(i, r"\boxed{e}") for i in range(2)],
                )
            )
            ready, forked, before = time.perf_counter() - start, pool.started, cpu_seconds(pool)
            start = time.perf_counter()
            all_scores = asyncio.run(score(runner))
            seconds = time.perf_counter() - start
            used, replaced = cpu_seconds(pool) - before, pool.started - forked
            (after,) = asyncio.run(
                runner.score(
                    Prompt(uid=0, messages=(), tokens=(), answer=r"\sqrt{8}"), [completion(0, r"\boxed{2\sqrt{2}}")]
                )
            )
            alive = sum(thread.name == "worker-queue" for thread in threading.enumerate())
        finally:
            runner.close()
        fates: dict[str, int] = {}
        for (_, own), scores in zip(questions, all_scores, strict=True):
            for answer, verdict in zip(own, scores, strict=True):
                fate = judged(answer, verdict)
                fates[fate] = fates.get(fate, 0) + 1
        answered = sum(len(scores) for scores in all_scores)
        facts = {"answered": answered, "workers_at_the_end": alive if after.correct else 0, "replaced": replaced}
        return {"seconds": seconds, "start": ready, "cpu_seconds": used, "fates": fates, **facts}

    jobs = [
        Math().job(Prompt(uid=0, messages=(), tokens=(), answer=gold), completion(0, answer.text))
        for gold, own in questions
        for answer in own
        if answer.right is not None
    ]
    to_workers = [(job.arguments["answer"], tuple(job.arguments["texts"])) for job in jobs if isinstance(job, Job)]
    serve(once, channel, ordinary=len(jobs), to_workers=len(to_workers), different=len(set(to_workers)))


if __name__ == "__main__":
    main()
