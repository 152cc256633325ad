"""Train the same recipes on one process and on several, and measure how much metrics and weights differ."""

import importlib
import json
import math
import pkgutil
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.ranks.cases import Case, all_cases, write_uneven
from benchmarks.ranks.compare import completions, metric_deviations, norm_deviations, weight_deviation
from benchmarks.ranks.launch import run_command

WEIGHTS = 1e-5  # bound at SGD, and of what AdamW has moved; of gradient norms in float64


@dataclass(frozen=True)
class Place:
    """The folders of the runs and the models."""

    root: Path
    models: Path


def prepare(root: Path, model: str | None) -> Place:
    """Create the models, and prepare this process to be forked."""
    sys.path.insert(0, str(harness.HERE.parent))
    import torch

    from tests.tiny import make_tiny

    import_everything()

    torch.set_num_threads(1)
    models = root / "models"
    for kind in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        make_tiny(kind, models / kind)
    make_tiny("llama", models / "teacher", seed=1)
    write_uneven(models)
    if model is not None:
        (models / "smollm2").symlink_to(Path(model).resolve())
    return Place(root, models)


def import_everything() -> None:
    """Import everything once, for all forked processes."""
    import proxima

    names = [module.name for module in pkgutil.walk_packages(proxima.__path__, "proxima.")]
    others = [
        "torch.distributed.fsdp",
        "matplotlib.pyplot",
        "pandas",
        "pyarrow.parquet",
        "rich.live",
        "safetensors.torch",
    ]
    for name in [
        *names,
        *others,
        "transformers.models.auto.tokenization_auto",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ]:
        with suppress(ImportError):  # of an extra
            importlib.import_module(name)


def measure(case: Case, place: Place) -> list[dict[str, Any]]:
    """Return a row for each number of ranks."""
    folder = place.root / "runs"
    rollouts = None
    if case.replay:
        rollouts = folder / "source"
        failure = run_command(case.words(place.models, rollouts, more=case.source), 1, folder / "source.log")
        if failure:
            return [row_of(case, 1, failure=f"source: {failure}")]
    alone = folder / "1"
    failure = run_command(case.words(place.models, alone, rollouts), 1, folder / "1.log")
    if failure:
        return [row_of(case, 1, failure=failure)]
    rows = []
    for size in case.sizes:
        several = folder / str(size)
        words = [*case.words(place.models, several, rollouts), "placement=torchrun", *case.placed]
        failure = run_command(words, size, folder / f"{size}.log", torchrun=case.torchrun)
        rows.append(row_of(case, size, failure=failure) if failure else compared(case, size, alone, several, place))
    if not all(row.get("same_completions", True) for row in rows) and not case.replay:
        return measure_again(case, place)
    return rows


def measure_again(case: Case, place: Place) -> list[dict[str, Any]]:
    """Measure a case again on stored rollouts: a token was drawn so near the border of two that rounding decided."""
    shutil.rmtree(place.root / "runs")
    (place.root / "runs").mkdir()
    return measure(replace(case, replay=True, name=f"{case.name} (replay: a sample differed)"), place)


def compared(case: Case, size: int, alone: Path, several: Path, place: Place) -> dict[str, Any]:
    """Return the row that compares a run on several ranks with that on one process."""
    if not case.exact:
        return row_of(case, size)
    metrics = metric_deviations(alone, several)
    name, (share, judged) = max(metrics.items(), key=lambda item: item[1][1], default=("none", (0.0, 0.0)))
    if "lora" in case.recipe:
        start = None
    else:
        start = place.models / case.model
    weight, moved = weight_deviation(alone, several, start)
    same = completions(alone) == completions(several)
    return row_of(
        case,
        size,
        same_completions=same,
        loss=metrics.get("loss", (0.0, 0.0))[1],
        grad_norm=metrics.get("grad_norm", (0.0, 0.0))[1],
        metric=judged,
        metric_name=name,
        metric_share=share,
        beyond={name: pair for name, pair in metrics.items() if pair[1] > case.bound},
        weight=weight,
        moved=moved,
        **norm_deviations(alone, several),
    )


def row_of(case: Case, size: int, *, failure: str = "", **figures: Any) -> dict[str, Any]:
    bound = WEIGHTS if not case.bfloat16 else case.bound
    within = not failure and (
        not case.exact
        or (
            max(figures["metric"] / case.bound, figures["weight"] / bound, figures.get("exact_norm", 0.0) / WEIGHTS)
            <= 1
            and figures["same_completions"]
        )
    )
    row = {"row": case.row, "case": case.name, "ranks": size, "within": within, "failure": failure}
    return row | {name: str(x) if isinstance(x, float) and not math.isfinite(x) else x for name, x in figures.items()}


def main() -> None:
    parser = harness.parser(__doc__, repeats=1)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name or row has this text (default: all)")
    parser.add_argument("--cases", type=int, help="the first so many alone (default: all)")
    parser.add_argument("--ranks", type=int, nargs="+", help="these numbers of ranks alone (default: 2 and 4)")
    parser.add_argument("--keep", type=Path, help="a folder for the runs, which are then kept")
    options = parser.parse_args()
    from benchmarks.ranks.dimensions import dimensions
    from benchmarks.ranks.resume import CASES, resumed  # which needs this module

    every = [*all_cases(), *dimensions(), *CASES]
    cases = [case for case in every if any(text in f"{case.row}: {case.name}" for text in options.only)]
    if options.ranks:
        cases = [replace(case, sizes=options.ranks) for case in cases]
    cases = cases[: options.cases]
    needs_model = any(case.model == "smollm2" for case in cases)
    model = None
    if needs_model:
        model = harness.need_model(options.model)
    with tempfile.TemporaryDirectory() as temporary:
        place = prepare(options.keep or Path(temporary), model)
        rows = []
        for case in cases:
            (place.root / "runs").mkdir(parents=True, exist_ok=True)
            if case.row == "resume":
                new = list(resumed(case, place))
            else:
                new = measure(case, place)
            if options.keep is None:
                shutil.rmtree(place.root / "runs")
            else:
                (place.root / "runs").rename(place.root / f"{len(rows):03d}")
            rows += new
            for row in new:
                print("  " + shown(row), file=sys.stderr, flush=True)
    if options.json_out is not None and options.json_out.exists() and len(cases) < len(every):
        measured = {row["case"] for row in rows}
        rows = [
            row
            for row in json.loads(options.json_out.read_text(encoding="utf-8"))["rows"]
            if row["case"] not in measured
        ] + rows
    report(rows, options.json_out)


def shown(row: dict[str, Any]) -> str:
    return f"{row['case']} on {row['ranks']}: " + (
        row["failure"]
        or ", ".join(f"{key} {x}" for key, x in row.items() if key not in ("row", "case", "ranks", "failure"))
    )


def report(rows: list[dict[str, Any]], out: Path | None) -> None:
    """Print the table and write the result."""

    def text(x: Any) -> str:
        if isinstance(x, float):
            return f"{x:.0e}"
        if x is None:
            return "-"
        return str(x)

    header = [
        "row",
        "case",
        "ranks",
        "loss",
        "grad norm",
        "in float64",
        "any metric",
        "weights",
        "of the way",
        "within",
    ]
    keys = ("row", "case", "ranks", "loss", "grad_norm", "exact_norm", "metric", "weight", "moved")
    cells = [[text(row.get(key)) for key in keys] + ["yes" if row["within"] else "NO"] for row in rows]
    print(harness.table(header, cells))
    harness.finish(
        {"claim": "ranks", "wrong": [f"{r['case']} on {r['ranks']}" for r in rows if not r["within"]], "rows": rows},
        out,
    )
