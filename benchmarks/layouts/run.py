"""Plan the large recipes in their shipped layouts, rehearse them with all their ranks, and run them on four."""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import finish, parser, table
from benchmarks.ranks.launch import run_command

GIB = 2**30
MEMORY = "80G"  # of the devices that the layouts are named after


@dataclass(frozen=True)
class Pair:
    """A recipe in a layout."""

    recipe: str
    layout: str
    devices: str

    @property
    def name(self) -> str:
        """The layout's name without its folder."""
        return self.layout.rpartition("/")[2]


def pairs() -> list[Pair]:
    """Pair each layout with the recipes whose name is its family or begins with it."""
    from proxima.system.user_files import shipped_layouts, shipped_recipes

    combined = []
    for layout in shipped_layouts():
        family, _, devices = layout.rpartition("/")[2].rpartition("_")
        recipes = [name for name in shipped_recipes() if name == family or name.startswith(f"{family}_")]
        combined += [Pair(recipe, layout, f"{devices}-{MEMORY}") for recipe in recipes]
    return combined


def main() -> None:
    p = parser(__doc__, repeats=1)
    p.add_argument("--only", nargs="+", help="recipes (default: all)")
    p.add_argument("--rehearse", action="store_true", help="count the memory of a rank: minutes for each layout")
    p.add_argument("--run", action="store_true", help="two steps on four processes: a minute for each")
    o = p.parse_args()
    rows, counted = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        for pair in pairs():
            if o.only and pair.recipe not in o.only:
                continue
            row = planned(pair)
            if o.rehearse:  # one per layout: recipes differ in loss or in passes below an update
                if pair.layout not in counted:
                    counted[pair.layout] = rehearsed(pair, Path(folder))
                row["rehearsal"] = counted[pair.layout]
            if o.run:
                row["run"] = two_steps(pair, Path(folder))
            rows.setdefault(pair.recipe, {})[pair.name] = row
            print(f"  {pair.recipe} {pair.name} {json.dumps(row)}", file=sys.stderr, flush=True)
    lines = [(recipe, name, row) for recipe, layouts in rows.items() for name, row in layouts.items()]
    print(table(["recipe", "layout", "step", "memory", "rehearsed", "run"], [cells(*line) for line in lines]))
    wrong = [line[:2] for line in lines if not fits(line[2])]
    gaps = [abs(r["formula_gib"] / r["peak_gib"] - 1) for r in counted.values()]
    result = {"claim": "layouts", "rows": rows, "wrong": wrong, "worst_estimate": round(max(gaps, default=0.0), 3)}
    finish(result, o.json_out)


def planned(pair: Pair) -> dict[str, Any]:
    """Return the plan that `proxima plan` reports."""
    from proxima.config.resolution import resolve
    from proxima_plan.devices import read_devices
    from proxima_plan.forecast import plan_recipe

    plan = plan_recipe(resolve(pair.recipe, [f"@{pair.layout}"]), read_devices(pair.devices)[0])
    return {
        "devices": pair.devices,
        "step_seconds": round(plan.seconds, 1),
        "binds": plan.binds,
        "planned_gib": round(plan.memory.needed / GIB, 1),
        "fits": plan.memory.fits,
    }


def rehearsed(pair: Pair, folder: Path) -> dict[str, Any]:
    """Return the memory that a rehearsal with all ranks counts for one, with fragments and driver, and whether a device
    has room for that and an engine."""
    from proxima.config.resolution import resolve
    from proxima_plan.devices import read_devices
    from proxima_plan.forecast import plan_recipe
    from proxima_plan.memory import CONTEXT, FRAGMENTED
    from proxima_plan.rehearsal.rehearsal import rehearse_recipe
    from tests.recipes.shapes import write_shape

    model = write_shape(resolve(pair.recipe).config.model.path, folder)
    words = [f"@{pair.layout}", f"model.path={model}"]
    resolved, (devices,) = resolve(pair.recipe, words), read_devices(pair.devices)
    plan = plan_recipe(resolved, devices)
    rehearsal = rehearse_recipe(pair.recipe, words, plan.layout.ranks)
    counted = plan.recipe.plan(plan.layout, counted=rehearsal.peak_bytes)
    return {
        "needed_gib": round((CONTEXT + rehearsal.peak * (1 + FRAGMENTED)) / GIB, 1),
        "fits": counted.memory.fits,
        "peak_gib": round(rehearsal.peak / GIB, 2),
        "formula_gib": round(sum(plan.memory.trainer.values()) / GIB, 2),
        "seconds": round(rehearsal.seconds),
    }


def two_steps(pair: Pair, folder: Path) -> dict[str, Any]:
    """Run two steps on a tiny model of the architecture, on four processes in groups of two."""
    from tests.recipes.smaller import RANKS, on_four_ranks

    out = folder / f"{pair.recipe}-{pair.name}"
    words = on_four_ranks(pair.recipe, pair.layout, folder)
    start = time.perf_counter()
    failure = run_command(["train", *words, f"folder={out}"], RANKS, out.with_suffix(".log"))
    steps = []
    if not failure:
        lines = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        steps = [line["grad_norm"] for line in lines if line["kind"] == "train"]
    return {"seconds": round(time.perf_counter() - start, 1), "grad_norms": steps, "failure": failure}


def fits(row: dict[str, Any]) -> bool:
    """Return True if the plan and the rehearsal fit and the run did not fail."""
    rehearsal = row.get("rehearsal") or {"fits": True}
    return row["fits"] and rehearsal["fits"] and not row.get("run", {}).get("failure")


def cells(recipe: str, name: str, row: dict[str, Any]) -> list[str]:
    rehearsal, run = row.get("rehearsal"), row.get("run")
    said = ["", ""]
    if rehearsal:
        said[0] = f"{rehearsal['needed_gib']} GiB, {'fits' if rehearsal['fits'] else 'does not fit'}"
    if run:
        said[1] = run["failure"] or f"{len(run['grad_norms'])} steps"
    return [recipe, name, f"{row['step_seconds']:,.0f} s", f"{row['planned_gib']} GiB", *said]
