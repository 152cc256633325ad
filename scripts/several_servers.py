"""Train on two ranks with three real vLLM servers, one of which joins late, and measure how versions reach them.

    python -m scripts.several_servers --environment .venv-vllm --json-out FILE

Ends when all three servers have computed with two versions; the results are in `benchmarks/results/several_servers`.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from benchmarks.harness import command, finish, need_model, parser, table
from tests.engine.http.plain_servers import until
from tests.warm import LAUNCHER, WarmPopen

FIGURES = ("replicas", "probe_mean", "probe_max", "seconds", "prepare_seconds")


def main() -> None:
    p = parser(__doc__, repeats=1)
    p.add_argument("--environment", default=".venv-vllm", help="of vLLM (default: %(default)s)")
    p.add_argument("--ranks", type=int, default=2, help="of the trainer (default: %(default)s)")
    p.add_argument("--dtype", default="float32", help="of the servers (default: %(default)s)")
    o = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps, joined = measure(need_model(o.model), o, Path(folder))
    rows = [
        [str(step["version"]), *(f"{step.get(f'sync/{name}', float('nan')):.4g}" for name in FIGURES)] for step in steps
    ]
    print(f"{o.ranks} ranks; the third server was started after step 2, and answered {joined:.0f} s later\n")
    published = [{"version": step["version"], **{n: step.get(f"sync/{n}") for n in FIGURES}} for step in steps]
    rows = [["–" if value is None else f"{value:.4g}" for value in sync.values()] for sync in published]
    print(table(["version", *FIGURES], rows) + "\n")
    counts = [sync["replicas"] for sync in published]
    reached = counts[0] == 2 and counts[-1] == 3 and max(sync["probe_max"] for sync in published) < 5e-3
    finish(
        {
            "claim": "several_servers",
            "reached": reached,
            "published": published,
            "third_answered_seconds": round(joined, 1),
            "bytes": steps[-1]["sync/bytes"],
            "ranks": o.ranks,
            "dtype": o.dtype,
        },
        o.json_out,
    )


def measure(model: str, o: Any, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Return the metrics of the steps, and the seconds until the third server answered."""
    from proxima.engine.serve.launch import Serve
    from proxima.engine.serve.servers import start_servers
    from tests.ports import kept_port

    port, arguments = kept_port(), {"model": os.path.abspath(model), "max_length": 256, "key": ""}
    serve = {"environment": o.environment, "dtype": o.dtype, "threads": 1}
    with closing(start_servers("vllm", Serve(**serve, replicas=2), log=folder / "two.log", **arguments)) as two:
        urls = ", ".join([*two.urls, f"http://127.0.0.1:{port}"])
        words = [
            *("quickstart", f"model.path={arguments['model']}", "model.device=cpu", "model.max_length=256"),
            *("runtime.threads=1", "train.steps=1000", "train.prompts_per_step=4", "train.completions_per_prompt=4"),
            *("eval.task=null", "checkpoint.every=0", f"engine={{kind: vllm, url: [{urls}]}}"),
        ]
        run = RankedRun(folder / "run", words, o.ranks)
        try:
            run.until(lambda steps: len(steps) >= 2)
            start = time.monotonic()
            with closing(start_servers("vllm", Serve(**serve, port=port), log=folder / "third.log", **arguments)):
                joined = time.monotonic() - start
                run.until(lambda steps: [step["sync/replicas"] for step in steps[-2:]] == [3, 3])
                steps = run.steps()
        finally:
            run.kill()
    return [step | {"version": step["step"]} for step in steps], joined


class RankedRun:
    """`proxima train ... placement=torchrun` on some ranks, in the background."""

    def __init__(self, folder: Path, words: list[str], ranks: int = 2) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        command = [*LAUNCHER, "--nproc-per-node", str(ranks), "--standalone", "-m", "proxima.cli.main", "train", *words]
        with self.log.open("wb") as log:
            self.process = WarmPopen(
                [*command, "placement=torchrun", f"folder={folder}"],
                stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip

    def steps(self) -> list[dict[str, Any]]:
        """The metrics so far."""
        file = self.folder / "metrics.jsonl"
        if file.exists():
            records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        else:
            records = []
        return [record for record in records if record["kind"] == "train"]

    def until(self, condition: Callable[[list[dict[str, Any]]], Any]) -> None:
        """Wait until the metrics of the steps, of which there is one, are so."""

        def holds() -> bool:
            assert self.process.poll() is None, self.log.read_text(encoding="utf-8", errors="replace")[-6000:]
            steps = self.steps()
            return bool(steps and condition(steps))

        until(holds, self.log)

    def kill(self) -> None:
        self.process.terminate()  # the launcher ends the ranks, which are in sessions of their own
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(40)
        self.process.kill()
        self.process.wait()


if __name__ == "__main__":
    command(main)
