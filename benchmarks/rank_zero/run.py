"""CPU seconds of rank 0 on the host in a step of the large recipes, by part; needs neither a GPU nor a model.

The run's own journal, batch builder, dealing, packing and files work on completions whose lengths are drawn.
"""

import ctypes
import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pyarrow

from benchmarks.balance.run import CORRELATION, PAIRS, update_of
from benchmarks.harness import finish, parser, table
from benchmarks.rank_memory.rank import resident
from proxima.data.flow import Completion, Group, Prompt, Score
from proxima.data.packed_batch import pack
from proxima.data.trajectory import Trajectory
from proxima.model.attention_cost import pair_cost
from proxima.runtime.state.journal import Journal
from proxima.runtime.state.rollouts import write_rollouts
from proxima.training.batch_builder import BatchBuilder, TrainingBatch
from proxima.training.dealing import deal
from proxima.training.objectives.protocol import TokenStatistics

PART = 1 / 16  # of the prompts of a step, so that its columns fit this machine
LARGE = 1024  # sequences of a step from which rank 0 takes seconds
PARTS = ("journal", "advantages", "dealing", "packing", "sending", "files")


def main() -> None:
    p = parser(__doc__, repeats=1)
    p.add_argument("--part", type=float, default=PART, help="of the prompts of a step; its seconds are scaled up")
    o = p.parse_args()
    row(*PAIRS[1], seed=0, part=0.0)  # the first use of a library loads it
    rows = [row(*pair, seed=seed, part=o.part) for pair in PAIRS for seed in range(o.repeats)]
    header = ["recipe", "sequences", "tokens", *PARTS, "sum", "of the plan", "bytes a token"]
    lines = []
    for each in rows:
        sizes = [each["recipe"], f"{each['sequences']:,}", f"{each['tokens']:,}"]
        seconds = [f"{each[name]:.2f} s" for name in (*PARTS, "sum", "planned")]
        lines.append([*sizes, *seconds, f"{each['bytes']:.0f}"])
    print(table(header, lines))
    worst = max(max(each["ratio"], 1 / each["ratio"]) for each in rows if each["sequences"] > LARGE)
    finish({"claim": "rank_zero", "rows": rows, "worst": round(worst, 3)}, o.json_out)


def row(recipe: str, layout: str, *, seed: int, part: float) -> dict[str, Any]:
    """Measure the parts of a step with `part` of its prompts, scaled to all of them.

    journal: the states of the prompts. advantages: trajectories, advantages, selection, assignment to updates. dealing:
    an update is dealt to the shares, on every rank. packing: the micro-batches of share 0. sending: the updates as
    bytes. files: the records of the completions, and their Parquet. bytes: what all that holds at most, for each token.
    """
    from proxima.config.resolution import resolve
    from proxima_plan.devices import device_rates
    from proxima_plan.stage_times import host_seconds
    from tests.recipes.shapes import SHAPES

    config = resolve(recipe, [f"@layouts/{layout}"]).config
    train, place, algorithm = config.train, config.placement, config.algorithm
    shares = place.ranks // (place.context_parallel * place.tensor_parallel)
    updates = train.updates_per_step
    prompts = max(1, round(train.prompts_per_step * part))
    scale = train.prompts_per_step / prompts
    pyarrow.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)  # else the row takes what the one before it has freed
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is that from now on
    before = resident("VmRSS")
    groups = groups_of(prompts, train.completions_per_prompt, config.sampling.max_tokens, seed)
    builder = BatchBuilder(advantage=algorithm.advantage, selection=algorithm.selection, updates=min(updates, prompts))
    budget, pair = train.tokens_per_micro_batch, pair_cost(SHAPES[config.model.path][0])
    seconds = dict.fromkeys(PARTS, 0.0)

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = process_time()
        value = work()
        seconds[name] += (process_time() - began) * scale
        return value

    with tempfile.TemporaryDirectory() as place_of_files:
        folder = Path(place_of_files)
        with Journal(folder / "run.sqlite") as journal:
            batch: TrainingBatch = timed("advantages", lambda: builder.step_batch(groups, 1))
            timed("journal", lambda: write_journal(journal, groups, batch))
            items = [[item] for item in batch.trajectories]
            timed("sending", lambda: len(pickle.dumps(items, pickle.HIGHEST_PROTOCOL)))
            own = items[:: max(1, shares)]
            timed("packing", lambda: [pack(each) for each in own])
            timed("files", lambda: write_files(folder / "step.parquet", batch))
    held = resident("VmHWM") - before
    drawn = sum(len(c.tokens) for group in groups for c in group.completions)
    whole = update_of(
        train.prompts_per_step // updates, train.completions_per_prompt, config.sampling.max_tokens, seed, CORRELATION
    )
    began = process_time()
    deal(whole, shares, budget, pair_cost=pair)
    seconds["dealing"] = (process_time() - began) * updates

    sequences = train.prompts_per_step * train.completions_per_prompt
    tokens = round(scale * drawn)
    total = sum(seconds.values())
    planned = host_seconds(device_rates(), sequences, tokens)
    return {
        "recipe": recipe,
        "layout": layout,
        "seed": seed,
        "sequences": sequences,
        "tokens": tokens,
        **{name: round(value, 3) for name, value in seconds.items()},
        "sum": round(total, 3),
        "planned": round(planned, 3),
        "ratio": round(planned / total, 3),
        "bytes": held / drawn,
    }


def groups_of(prompts: int, size: int, most: int, seed: int) -> list[Group]:
    """Return groups of drawn lengths, half of whose answers are right."""
    draw = np.random.default_rng(seed)
    completions: dict[int, list[Completion]] = {}
    prompt_of: dict[int, Prompt] = {}
    for (item,) in update_of(prompts, size, most, seed, CORRELATION):
        question = ({"role": "user", "content": "What is it?"},)
        prompt_of.setdefault(item.group, Prompt(uid=item.group, messages=question, tokens=item.prompt_tokens, answer=1))
        completions.setdefault(item.group, []).append(completion_of(item, draw))
    scores = tuple(Score(value=float(i % 2), correct=bool(i % 2), parts={"math": float(i % 2)}) for i in range(size))
    return [Group(prompt=prompt_of[g], completions=tuple(own), scores=scores) for g, own in completions.items()]


def completion_of(item: Trajectory, draw: np.random.Generator) -> Completion:
    count = len(item.tokens)
    tokens = draw.integers(0, 150_000, count).astype(np.int32)
    log_prob = -draw.exponential(size=count).astype(np.float32)
    return Completion(
        prompt_uid=item.group,
        sample=item.sample,
        tokens=tokens,
        text="word " * count,
        sampled_log_prob=log_prob,
        untruncated_log_prob=log_prob,
        policy_version=np.zeros(count, np.int32),
        finish_reason="stop",
        temperature=1.0,
    )


def write_journal(journal: Journal, groups: Sequence[Group], batch: TrainingBatch) -> None:
    """The states of the prompts of a step, as a run writes them."""
    journal.enqueue([group.prompt for group in groups], size=len(groups))
    journal.generating([group.prompt.uid for group in groups])
    for group in groups:
        journal.scored([group])
    journal.select(1, batch.kept, batch.dropped)
    journal.consume(1, {}, {"step": 1}, version=1)


def write_files(file: Path, batch: TrainingBatch) -> None:
    """The records of the completions, with what a forward pass measures of each token."""
    measured = {}
    for item in batch.trajectories:
        log_prob = np.asarray(item.behavior_log_prob)
        measured[item.key] = TokenStatistics(log_prob=log_prob, keep=np.ones(len(log_prob), np.bool_), entropy=log_prob)
    write_rollouts(file, 1, batch.groups, batch.records(measured))
