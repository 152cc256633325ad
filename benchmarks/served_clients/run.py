"""Compare two clients of one server of training at once with one after the other."""

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from benchmarks.harness import HERE, Side, Spread, finish, need_model, parser, table


def start_server(model: str, folder: Path, workers: int, dtype: str) -> tuple[subprocess.Popen, str]:
    words = ["serve-training", model, "--name", "served", "--folder", str(folder), "--port", "0", "--dtype", dtype]
    command = [sys.executable, "-m", "proxima", *words, "--workers", str(workers)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8", errors="replace", cwd=HERE.parent)
    line = server.stdout.readline().split()
    if "on" not in line:
        raise RuntimeError("the server did not start")
    return server, line[line.index("on") + 1]


def together(sides: list[Side]) -> tuple[float, list[int]]:
    """Seconds until all sides have answered, and what they saw."""
    answers: dict[int, dict] = {}
    threads = [threading.Thread(target=lambda i=i: answers.update({i: sides[i].once()})) for i in range(len(sides))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(answer["seconds"] for answer in answers.values()), [answers[i]["bits"] for i in range(len(sides))]


def measure(o, settings: dict, workers: int, folder: Path, *, at_once: bool) -> tuple[list[float], list[list[int]]]:
    """Turns a minute of two clients, and what each saw, for each repeat."""
    server, url = start_server(o.model, folder, workers, o.dtype)
    sides = []
    try:
        for seed in (1, 2):
            place = settings | {"url": url, "seed": seed}
            sides.append(Side(f"client {seed}", "served_clients.client", place, threads=1))
        rates, bits = [], []
        for _ in range(o.repeats):
            if at_once:
                seconds, seen = together(sides)
            else:
                alone = [together([side]) for side in sides]
                seconds, seen = sum(one for one, _ in alone), [bits for _, (bits,) in alone]
            rates.append(2 * o.turns * 60 / seconds)
            bits.append(seen)
            print(
                f"  workers={workers}, {'at once' if at_once else 'in turn'}: {rates[-1]:.1f} turns a minute",
                file=sys.stderr,
                flush=True,
            )
        return rates, bits
    finally:
        for side in sides:
            side.close()
        server.terminate()
        server.wait()


def main() -> None:
    p = parser(__doc__, repeats=3)
    p.add_argument("--turns", type=int, default=3, help="of each client in a measurement (default: %(default)s)")
    p.add_argument("--prompts", type=int, default=8, help="of a turn (default: %(default)s)")
    p.add_argument("--max-tokens", type=int, default=24, help="of a completion (default: %(default)s)")
    p.add_argument("--dtype", default="float32", help="of the server (default: %(default)s)")
    o = p.parse_args()
    need_model(o.model)
    settings = {"turns": o.turns, "prompts": o.prompts, "completions": 8, "prompt": 24, "max_tokens": o.max_tokens}
    from proxima.model.pretrained import load_config

    settings["vocabulary"] = min(40_000, load_config(o.model).vocab_size)
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as place:
        found = {
            name: measure(o, settings, workers, Path(place) / str(i), at_once=at_once)
            for i, (name, workers, at_once) in enumerate(
                [
                    ("one after the other, 1 worker", 1, False),
                    (f"one after the other, {cores} workers", cores, False),
                    (f"at once, {cores} workers", cores, True),
                    ("at once, 1 worker", 1, True),
                ]
            )
        }
    print(
        table(
            ["two clients", "turns a minute"], [[name, Spread(rates).text(".1f")] for name, (rates, _) in found.items()]
        )
    )
    best = max((name for name in found if name.startswith("one")), key=lambda name: Spread(found[name][0]).median)
    together_, alone = found[f"at once, {cores} workers"], found[f"one after the other, {cores} workers"]
    ratio, same = Spread(together_[0]).median / Spread(found[best][0]).median, together_[1] == alone[1]
    print(f"\nat once / {best}: {ratio:.2f}; the same bits as one after the other: {same}\n")
    rates = {name: [round(rate, 2) for rate in values] for name, (values, _) in found.items()}
    finish({"claim": "served_clients", "reached": ratio >= 1.3 and same, "ratio": round(ratio, 3), "same_bits": same,
            "turns_a_minute": rates, "settings": settings, "dtype": o.dtype}, o.json_out)  # fmt: skip
