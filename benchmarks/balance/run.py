"""How evenly an update is dealt to the ranks of the large layouts, and in how many micro-batches; needs no GPU.

Lengths are lognormal with the plan's spread, and correlated within a group: hard questions have long answers.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from benchmarks.harness import finish, parser, table
from proxima.data.trajectory import Trajectory
from proxima.model.attention_cost import pair_cost
from proxima.model.micro_batch import micro_batches
from proxima.training.dealing import Work, cost_of_passes, deal, together, work_of

PAIRS = (
    ("qwen3_4b_cppo", "qwen3_4b_32xH800"),
    ("qwen3_30b_cppo", "qwen3_30b_128xH800"),
    ("dapo_32b", "dapo_32b_128xH800"),
)
SPREAD, CORRELATION, MEAN = 0.7, 0.6, 1 / 3  # of log lengths; of them within a group; of the limit
PROMPT = 200  # tokens


def main() -> None:
    p = parser(__doc__, repeats=5)
    p.add_argument("--correlation", type=float, default=CORRELATION, help="of log lengths within a group")
    o = p.parse_args()
    rows = [row(*pair, seed=seed, correlation=o.correlation) for pair in PAIRS for seed in range(o.repeats)]
    lines = []
    for recipe, layout in PAIRS:
        own = [each for each in rows if each["layout"] == layout]
        cells = [
            interval(own, name) for name in ("groups", "bound", "dealt", "waits", "passes_of_groups", "passes", "least")
        ]
        lines.append([recipe, layout, str(own[0]["shares"]), *cells])
    header = [
        "recipe",
        "layout",
        "shares",
        "whole groups",
        "bound",
        "dealt",
        "with waiting",
        "passes",
        "dealt",
        "least",
    ]
    print(table(header, lines))
    finish({"claim": "balance", "rows": rows, "worst": max(each["dealt"] for each in rows)}, o.json_out)


def row(recipe: str, layout: str, *, seed: int, correlation: float) -> dict[str, Any]:
    """Deal an update of a recipe in a layout; costs in parts of their mean over the shares.

    groups, passes_of_groups: with each group whole. bound: what no dealing is below. dealt, passes: as a run does.
    waits: with what the shares wait for each other in every micro-batch. least: the micro-batches that the tokens alone
    need.
    """
    from proxima.config.resolution import resolve
    from tests.recipes.shapes import SHAPES

    config = resolve(recipe, [f"@layouts/{layout}"]).config
    train, place = config.train, config.placement
    shares = place.ranks // (place.context_parallel * place.tensor_parallel)
    groups = train.prompts_per_step // train.updates_per_step
    items = update_of(groups, train.completions_per_prompt, config.sampling.max_tokens, seed, correlation)
    budget, pair = train.tokens_per_micro_batch, pair_cost(SHAPES[config.model.path][0])
    work = work_of(items, pair_cost=pair)
    cuts = deal(items, shares, budget, pair_cost=pair)
    totals = [sum(work.costs_of(own)) for own in cuts]
    whole = groups_of_shares(work.groups, [len(item) for (item,) in items], shares)
    of_groups = [work.cost_of(own) for own in whole]
    mean = sum(of_groups) / shares
    tokens = sum(len(item.prompt_tokens) for item, *_ in (items[g[0]] for g in together(items, share_prompt=True)))
    tokens += sum(len(item.tokens) for (item,) in items)
    return {
        "recipe": recipe,
        "layout": layout,
        "seed": seed,
        "shares": shares,
        "groups": round(max(of_groups) / mean, 3),
        "bound": round(lowest(work, shares, budget), 3),
        "dealt": round(max(totals) / mean, 3),
        "waits": round(cost_of_passes(work.costs_of(chain.from_iterable(cuts)), shares) / mean, 3),
        "passes_of_groups": max(len(micro_batches([items[i] for i in own], budget)) for own in whole),
        "passes": max(map(len, cuts)),
        "least": math.ceil(tokens / shares / budget),
    }


def groups_of_shares(groups: Sequence[Sequence[int]], tokens: Sequence[int], shares: int) -> list[list[int]]:
    """Return the items of each share if groups stay whole: the longest first, each to the share that has least."""
    load, dealt = [0] * shares, [list[int]() for _ in range(shares)]
    for group in sorted(groups, key=lambda group: -sum(tokens[i] for i in group)):
        share = load.index(min(load))
        load[share] += sum(tokens[i] for i in group)
        dealt[share] += group
    return dealt


def lowest(work: Work, shares: int, budget: int) -> float:
    """Return what the most expensive share costs at least: that of the longest item, or the mean with the prompts that
    are run again because a group is longer than a micro-batch."""
    whole = again = 0.0
    for first, *later in work.groups:
        whole += work.cost_of([first, *later])
        tokens = work.alone[first].tokens + sum(work.after[i].tokens for i in later)
        prompt = min((work.alone[i].cost - work.after[i].cost for i in later), default=0.0)
        again += prompt * (math.ceil(tokens / budget) - 1)
    longest = max(piece.cost for piece in work.alone)
    return max((whole + again) / whole, longest * shares / whole)


def update_of(groups: int, size: int, most: int, seed: int, correlation: float) -> list[tuple[Trajectory]]:
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(0, 1000, draw.integers(PROMPT // 2, 2 * PROMPT)).astype(np.int32) for _ in range(groups)]
    hard, own = draw.normal(size=(groups, 1)), draw.normal(size=(groups, size))
    spread = SPREAD * (math.sqrt(correlation) * hard + math.sqrt(1 - correlation) * own)
    median = MEAN * most / math.exp(SPREAD**2 / 2)
    lengths = np.clip(np.round(median * np.exp(spread)), 1, most).astype(int)
    return [
        (Trajectory(group=g, sample=s, prompt_tokens=prompts[g], tokens=np.zeros(lengths[g, s], np.int32)),)
        for g in range(groups)
        for s in range(size)
    ]


def interval(rows: Sequence[dict[str, Any]], name: str) -> str:
    values = [each[name] for each in rows]
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g}–{high:g}"
