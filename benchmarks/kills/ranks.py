"""Kill one of several ranks at random moments, half of them during a checkpoint; resume with the same command; compare
with a run that was not killed:

python -m benchmarks.kills.ranks --kills 40 --ranks 2 --seed 0
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.runtime.placement.launched import ROOT, environment, processes, ranked, started
from tests.tiny import make_tiny
from tests.warm import run_warm

STEPS = 8
AT_MOST = 4  # kills of one run, each during the resume after the previous one


def rank_pid(words: list[str], rank: int) -> int | None:
    """Return the process of a rank, or None if it has exited or not started."""
    for pid in processes(words):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"RANK={rank}".encode() in variables:
            return pid
    return None


def weights(folder: Path) -> dict[str, list[bytes]]:
    """Return the bytes of the last checkpoint's tensors by name and shard, sorted because their order in files may
    vary."""
    from safetensors.torch import load_file

    last = sorted((folder / "checkpoints").iterdir())[-1]
    parts: dict[str, list[bytes]] = {}
    for file in last.rglob("*.safetensors"):
        for name, tensor in load_file(file).items():
            parts.setdefault(f"{file.parent.name}/{name}", []).append(tensor.numpy().tobytes())
    return {name: sorted(shards) for name, shards in parts.items()}


def unfinished(checkpoints: Path) -> list[Path]:
    """Return the folders of checkpoints that are being written."""
    return [*checkpoints.glob(".*.part")]


def check(folder: Path) -> None:
    """Raise RuntimeError if `proxima check` finds anything lost or duplicated."""
    words = [sys.executable, "-m", "proxima.cli.main", "check", str(folder)]
    code, out, err = run_warm(words, cwd=ROOT, env=environment(), encoding="utf-8", errors="replace")
    if code:
        raise RuntimeError(out + err)


def finish(words: list[str], ranks: int, output: Path) -> None:
    with started([words[0], "--resume", *words[1:]], ranks=ranks, output=output) as process:
        if process.wait(300):
            raise RuntimeError(output.read_text(encoding="utf-8")[-3000:])


def kill(words: list[str], ranks: int, output: Path, rank: int, seconds: float, checkpoints: Path | None) -> bool:
    """Start or resume the run and kill a rank `seconds` after it began or, with the folder `checkpoints`, in the middle
    of the next checkpoint after that. Return False if the run had already ended. Its own line about the dead rank must
    precede torchrun's."""
    with started([words[0], "--resume", *words[1:]], ranks=ranks, output=output) as process:
        while "step = " not in output.read_text(encoding="utf-8") and process.poll() is None:
            time.sleep(0.02)
        time.sleep(seconds)
        while checkpoints is not None and not unfinished(checkpoints) and process.poll() is None:
            time.sleep(0.001)
        pid = rank_pid(words, rank)
        if pid is None or process.poll() is not None:
            return False
        os.kill(pid, signal.SIGKILL)
        if checkpoints is None:
            saving = ""
        elif unfinished(checkpoints):
            saving = ", in the middle of a checkpoint"
        else:
            saving = ""
        died = time.monotonic()
        process.wait(120)
        took = time.monotonic() - died
        text = output.read_text(encoding="utf-8")
        named = f"rank {rank} on " in text and text.index(f"rank {rank} on ") < text.index("Root Cause")
        if (
            rank and not named and "exitcode  : -9" in text and "  done: " not in text
        ):  # else it was killed after the end
            raise RuntimeError(f"rank {rank} died and nobody said so:\n{text[-3000:]}")
        left = processes(words)
        if left:
            raise RuntimeError(f"processes {left} are left")
        print(f"  rank {rank} after {seconds:.2f} s{saving}; all had ended {took:.1f} s later", flush=True)
    return True


def campaign(kills: int, ranks: int, seed: int, root: Path) -> None:
    draw = random.Random(seed)
    model = make_tiny("llama", root / "model")
    changes = {"train__steps": STEPS, "checkpoint__keep_last": 2}
    reference = ranked(model, root / "reference", **changes)
    finish(reference, ranks, root / "reference.txt")
    expected = weights(root / "reference")
    span = 1.2 * float((root / "reference.txt").read_text(encoding="utf-8").split(" steps in ")[1].split(" s")[0])
    done = run = 0
    while done < kills:
        run += 1
        folder = root / f"run{run}"
        words = ranked(model, folder, **changes)
        for _ in range(min(AT_MOST, kills - done)):
            saving = None
            if draw.random() < 0.5:
                saving = folder / "checkpoints"
            done += kill(words, ranks, root / "out.txt", draw.randrange(ranks), draw.uniform(0, span), saving)
        finish(words, ranks, root / "out.txt")
        check(folder)
        if weights(folder) != expected:
            raise RuntimeError(f"{folder}: other weights than those of a run that nobody killed")
        print(f"run {run}: {done} of {kills} kills so far, the journal is whole, the weights are equal", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kills-") as root:
        campaign(arguments.kills, arguments.ranks, arguments.seed, Path(root))


if __name__ == "__main__":
    main()
