"""Measure the quickstart's generation and update beside other work, by how long OpenMP threads spin for each other."""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.harness import Side, Spread, finish, need_model, parser, table
from proxima.system.openmp import SPINS


@dataclass(frozen=True)
class Beside:
    """Other work: busy loops at nice 10 and at nice 0."""

    polite: int
    equal: int

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the loops."""
        loop = [sys.executable, "-c", "while True: pass"]
        loops = [subprocess.Popen(["nice", "-n", "10", *loop]) for _ in range(self.polite)]
        loops += [subprocess.Popen(loop) for _ in range(self.equal)]
        try:
            yield
        finally:
            for process in loops:
                process.kill()
                process.wait()


BESIDE = {
    "nothing": Beside(0, 0),
    "two loops at nice 10": Beside(2, 0),
    "one loop at nice 0": Beside(0, 1),
    "two loops at nice 0": Beside(0, 2),
    "ten loops at nice 10, four at nice 0": Beside(10, 4),
}


def variables(spins: str) -> dict[str, str]:
    """The environment of a side: libgomp's own spinning for `default`, else this number of spins."""
    if spins in ("default", "one thread"):
        return {}
    return {"GOMP_SPINCOUNT": spins}


def main() -> None:
    p = parser(__doc__, repeats=5)
    p.add_argument("--spins", nargs="+", default=["default", "0", str(SPINS)], help="GOMP_SPINCOUNT of each side")
    p.add_argument("--parts", nargs="+", choices=["decode", "update"], default=["decode", "update"])
    p.add_argument("--beside", nargs="+", choices=list(BESIDE), default=list(BESIDE))
    p.add_argument("--tokens", type=int, default=12, help="new tokens a row (default: %(default)s)")
    p.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    o = p.parse_args()
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):  # set for each side
        os.environ.pop(name, None)
    names = [*dict.fromkeys([*o.spins, "one thread"])]
    rates: dict[str, dict[str, dict[str, list[float]]]] = {}
    for part in o.parts:
        settings = {"model": need_model(o.model), "dtype": o.dtype, "part": part, "tokens": o.tokens}
        sides = []
        for name in names:
            count = 1 if name == "one thread" else o.threads
            module, own = "busy_machine.work_side", settings | {"threads": count}
            sides.append(Side(name, module, own, threads=count, variables=variables(name)))
        try:
            for side in sides:
                side.once()
            for beside in o.beside:
                rates.setdefault(part, {})[beside] = measured(sides, BESIDE[beside], o.repeats, beside)
        finally:
            for side in sides:
                side.close()
    for part, by_work in rates.items():
        rows = [[beside, *(Spread(of[name]).text(",.0f") for name in names)] for beside, of in by_work.items()]
        heads = [f"{name} spins" if name.isdigit() else name for name in names]
        print(f"\n{part}, tokens a second; median [min-max] of {o.repeats}, sides alternating\n")
        print(table(["beside", *heads], rows))
    result = {
        "claim": "busy_machine",
        "threads": o.threads,
        "rates": {
            part: {beside: {name: Spread(values).json() for name, values in of.items()} for beside, of in by.items()}
            for part, by in rates.items()
        },
        "of_default": {
            part: {
                beside: {name: round(paired(of[name], of["default"]), 3) for name in names if name != "default"}
                for beside, of in by.items()
            }
            for part, by in rates.items()
            if "default" in names
        },
    }
    finish(result, o.json_out)


def paired(rates: list[float], of: list[float]) -> float:
    """The median ratio of the measurements of one round."""
    return statistics.median(a / b for a, b in zip(rates, of, strict=True))


def measured(sides: list[Side], work: Beside, repeats: int, name: str) -> dict[str, list[float]]:
    """Tokens a second of each side, in rounds."""
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    with work.running():
        for _ in range(repeats):
            for side in sides:
                rate = side.once()["rate"]
                print(f"  beside {name}, {side.name}: {rate:,.0f}", file=sys.stderr, flush=True)
                rates[side.name].append(rate)
    return rates
