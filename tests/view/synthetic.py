"""The records and the folder of a plausible run: no model, no time."""

from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.evaluation.intervals import wilson_interval
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.state.rollouts import write_evals, write_rollouts
from proxima.runtime.watch.observer import RunInfo
from proxima.system.machine import describe_environment
from proxima.training.batch_builder import CompletionRecord
from tests.experiments.runs import answered, make_run, step

COMPOSITION = "8 prompts × 8 completions = 64 sequences → micro-batches ≤ 2,048 tokens → 1 update"


def info(folder, steps=40, **more):
    facts = {"version": "0.1.0", "algorithm": "cppo", "model": "SmolLM2-135M-Instruct", "parameters": 134_515_008}
    facts |= {"seed": 1, "composition": COMPOSITION, "threads": 2, "dtype": "bfloat16"}
    return RunInfo(folder=folder, steps=steps, **facts | more)


def record(number, steps=40, **more):
    """The metrics of a step: one or two of each group of the report."""
    facts = {"accuracy": number / steps, "loss": -0.02, "entropy/mean": 0.9, "approx_kl": 0.001, "grad_norm": 1.4}
    facts |= {"mismatch/k3_kl": 0.03}
    facts |= {"completions": 64, "skipped_zero_advantage": 8, "reward/invalid": 3 if number == 12 else 0}
    return step(number, reward=number / steps, seconds=3.2, **facts | more)


def evaluation(number, label, correct, questions=200):
    """With the interval of so many right answers."""
    facts = {"correct": correct, "questions": questions, "answers": questions, "invalid": 0, "time/evaluate": 17.6}
    figures = wilson_interval(correct, questions).figures("accuracy")
    return answered(number, None, label) | facts | figures


def group(uid, texts, rights, question=None, failed=()):
    """Answers to a sum; those of `failed` have no score."""
    a, b = 1 + uid * 7 % 20, 1 + uid * 3 % 20
    asked = ({"role": "user", "content": question or f"What is {a} + {b}?"},)
    scores = tuple(
        Score.failed("timed out after 5 s") if i in failed else Score(value=float(right), correct=right)
        for i, right in enumerate(rights)
    )
    return Group(
        prompt=Prompt(uid=uid, messages=asked, tokens=(1, 2, 3), answer={"value": a + b}),
        completions=tuple(Completion.of_text(uid, i, text, (10, 11)) for i, text in enumerate(texts)),
        scores=scores,
    )


def summed(uid, rights, **more):
    """A group that says the sum where it is right."""
    total = 2 + uid * 7 % 20 + uid * 3 % 20
    return group(
        uid, [str(total) if right else f"I believe that it is {total + 11}" for right in rights], rights, **more
    )


def step_groups(number, steps):
    """More are right from step to step; in the twelfth some scores failed."""
    return [
        summed(
            uid,
            [(uid + i) % 8 < 8 * number // steps for i in range(8)],
            failed=(0,) if number == 12 and uid % 3 == 0 else (),
        )
        for uid in range(8 * (number - 1), 8 * number)
    ]


def records(groups):
    """What became of each completion."""
    scored = {c.key: score for each in groups for c, score in zip(each.completions, each.scores, strict=True)}
    return {
        key: CompletionRecord(
            outcome="trained" if score.valid else "invalid", advantage=score.value if score.valid else None
        )
        for key, score in scored.items()
    }


def evals(correct, questions=200):
    return [summed(uid, [uid * 37 % questions < correct]) for uid in range(questions)]


def whole_run(path, steps=40, finished=True):
    """A run with answers, or with `finished=False` one that was killed after its last step."""
    measured = [(0, "before", 25), *((number, "step", 25 + 4 * number) for number in range(10, steps, 10))]
    measured += [(steps, "after", 188)] if finished else []
    lines = [record(number, steps) for number in range(1, steps + 1)] + [evaluation(*each) for each in measured]
    done = {"seconds": 163.0, "model": "SmolLM2-135M-Instruct", "peak_memory_bytes": 3_650_722_202}
    lines.sort(key=lambda line: line["step"])
    folder = RunFolder(make_run(path, lines, steps=40, status="done" if finished else None, **done))
    folder.write_environment(describe_environment(1))
    folder.evals.mkdir()
    for number, label, correct in measured:
        if label != "step":
            write_evals(folder.eval_file(number, label), number, evals(correct))
    folder.rollouts.mkdir()
    for number in range(1, steps + 1):
        groups = step_groups(number, steps)
        write_rollouts(folder.rollout_file(number), number, groups, records(groups))
    return folder
