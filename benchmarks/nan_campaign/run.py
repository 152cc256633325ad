"""Make numbers of a run NaN or infinite; check for a one-line error, no bad checkpoint and an exact resume."""

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.nan_campaign.faults import Fault, faults, watch_steps

TWO_UPDATES: dict[str, Any] = {"train__steps": 4, "train__updates_per_step": 2}
LEARNING_RATES = (1e1, 1e3, 1e6, 1e20, 1e38)


class Runs:
    """Runs of one recipe in forked processes."""

    def __init__(self, root: Path) -> None:
        sys.path.insert(0, str(harness.HERE.parent))
        import torch

        from tests.runtime.tiny_run import recipe, traces
        from tests.tiny import tiny_factory

        torch.set_num_threads(1)
        (root / "model").mkdir(parents=True)
        self.root, self.model = root, tiny_factory(root / "model")("llama")
        self.recipe, self.traces = recipe, traces
        self.folder = root / "run"
        self.go(root / "whole")
        self.expected = traces(root / "whole")

    def forked(self, work: Callable[[], Any]) -> Any:
        """Run `work` in a forked process and return its result, which is passed as JSON."""
        answer = self.root / "answer.json"
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            return json.loads(answer.read_text(encoding="utf-8"))
        with (self.root / "log.txt").open("w", encoding="utf-8") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
            answer.write_text(json.dumps(work()), encoding="utf-8")
        os._exit(0)

    def go(self, folder: Path, *, fault: Fault | None = None, step: int = 0, **changes: Any) -> dict[str, Any]:
        """Start or resume a run and return how it ended and what it said."""
        from proxima.data import UserError
        from proxima.runtime.loop.training_loop import RunEnded
        from tests.runtime.tiny_run import go

        tree = self.recipe(changes.pop("model", self.model), **TWO_UPDATES, **changes)

        def work() -> dict[str, Any]:
            watch_steps()
            if fault is not None:
                fault(step)
            try:
                resume = (folder / "run.sqlite").exists()
                return {"status": go(folder, tree, resume=resume).status, "said": ""}
            except (UserError, RunEnded) as error:
                return {"status": "ended", "said": str(error)}
            except Exception as error:
                traceback.print_exc()
                return {"status": "bug", "said": f"{type(error).__name__}: {error}"}

        return self.forked(work)

    def problems(self, end: dict[str, Any]) -> list[str]:
        """List what is wrong with a run that should have ended with a one-line error and without a bad checkpoint."""
        from safetensors.torch import load_file

        if end["status"] == "ended":
            problems = []
        else:
            problems = [end["status"]]
        problems += ["several lines"] if "\n" in end["said"] else []
        for file in sorted((self.folder / "checkpoints").rglob("*.safetensors")):
            bad = [name for name, value in load_file(file).items() if not value.isfinite().all()]
            problems += [f"{name} of a checkpoint" for name in bad[:1]]
        return problems

    def resumed(self) -> list[str]:
        """Resume the run and list what is wrong with it."""
        again = self.go(self.folder)
        equal = again["status"] == "done" and self.traces(self.folder) == self.expected
        if equal:
            return []
        return [f"the resumed run differs ({again['said'] or again['status']})"]

    def row(self, place: str, step: Any, end: dict[str, Any], problems: list[str]) -> dict[str, Any]:
        """Return a row of the table, and delete the run."""
        shutil.rmtree(self.folder, ignore_errors=True)
        said = end["said"].replace(str(self.root), "")
        return {
            "place": place,
            "step": step,
            "ended": end["status"],
            "good": "; ".join(problems) or "yes",
            "said": said,
        }


def put_nan(file: Path, name: str) -> None:
    """Set one entry of a tensor of a file to NaN."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    tensor = next(value for key, value in tensors.items() if key.endswith(name))
    with torch.no_grad():
        tensor.view(-1)[5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})


def main() -> None:
    parser = harness.parser(__doc__, repeats=1)
    parser.add_argument("--places", type=int, help="the first so many alone (default: all)")
    options = parser.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        rows = campaign(Runs(Path(place)), options.places)
    print(
        harness.table(
            ["place", "step", "ended", "good"], [[r["place"], str(r["step"]), r["ended"], r["good"]] for r in rows]
        )
    )
    for row in rows:
        print(f"  {row['place']}: {row['said']}", file=sys.stderr)
    wrong = [row["place"] for row in rows if row["good"] != "yes"]
    harness.finish({"places": rows, "wrong": wrong}, options.json_out)


def campaign(runs: Runs, places: int | None) -> list[dict[str, Any]]:
    """Test all places, or the first `places`, one after the other."""
    rows: list[dict[str, Any]] = []
    for row in islice(chain(in_training(runs), in_files(runs), learning_rates(runs)), places):
        rows.append(row)
        print(f"  {len(rows)} {row['place']}: {row['ended']}, {row['good']}", file=sys.stderr, flush=True)
    return rows


def in_training(runs: Runs) -> Iterator[dict[str, Any]]:
    """Yield a row per fault: the run must end, and resume without the fault; a NaN reward only counts as invalid."""
    for place, (step, fault) in faults().items():
        end = runs.go(runs.folder, fault=fault, step=step)
        problems = runs.problems(end)
        if place == "reward":
            records = [
                json.loads(line) for line in (runs.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            ]
            lost = sum(r.get("reward/invalid", 0) for r in records if r["kind"] == "train")
            if (end["status"], lost) == ("done", 1):
                problems = []
            else:
                problems = [f"{end['status']}, {lost} rewards invalid"]
        else:
            problems += runs.resumed()
        yield runs.row(place, step, end, problems)


def in_files(runs: Runs) -> Iterator[dict[str, Any]]:
    """Yield a row for each damaged file: the run must fall back to the previous checkpoint, or refuse the model."""
    _, fault = faults()["gradient"]
    for name in ("model.safetensors", "optimizer.safetensors"):
        runs.go(runs.folder, fault=fault, step=3)
        put_nan(next((runs.folder / "checkpoints" / "000002").rglob(name)), "mlp.up_proj.weight")
        end = runs.go(runs.folder)
        same = end["status"] == "done" and runs.traces(runs.folder) == runs.expected
        yield runs.row(f"{name} of the last checkpoint", "resume", end, [] if same else ["the resumed run differs"])
    for name in ("mlp.up_proj.weight", "model.norm.weight", "embed_tokens.weight"):
        model = runs.root / "damaged"
        shutil.copytree(runs.model, model)
        put_nan(model / "model.safetensors", name)
        end = runs.go(runs.folder, model=model)
        shutil.rmtree(model)
        yield runs.row(f"model file, {name}", "start", end, runs.problems(end))


def learning_rates(runs: Runs) -> Iterator[dict[str, Any]]:
    """Yield a row for each learning rate, constant and without warmup."""
    for rate in LEARNING_RATES:
        changes = {"train__optimizer__lr": rate, "train__warmup_steps": 0, "train__schedule": "constant"}
        end = runs.go(runs.folder, **changes)
        yield runs.row(f"learning rate {rate:g}", "all", end, runs.problems(end))
