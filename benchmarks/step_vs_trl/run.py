"""Compare a whole training step of the demo's job with TRL's GRPOTrainer, or with verl's trainer on a GPU."""

import tempfile
from pathlib import Path

from benchmarks.harness import HERE, Side, Spread, alternate, finish, need_model, parser, peer_python, table

PEERS = {  # title, side, and the difference to mention
    "trl": ("TRL GRPOTrainer", "step_vs_trl.trl_side", "TRL saves and logs nothing"),
    "verl": ("verl, FSDP and vLLM", "step_vs_trl.verl_side", "verl logs to its console"),
}


def main() -> None:
    p = parser(__doc__, repeats=5)
    p.add_argument("--peer", choices=PEERS, default="trl", help="verl needs a GPU (default: %(default)s)")
    p.add_argument("--prompts", type=int, default=16, help="prompts a step (default: %(default)s)")
    p.add_argument(
        "--updates",
        type=int,
        default=2,
        help="optimizer updates a step; must divide the prompts (default: %(default)s)",
    )
    p.add_argument("--completions", type=int, default=8, help="completions a prompt (default: %(default)s)")
    p.add_argument("--max-tokens", type=int, default=12, help="new tokens (default: %(default)s)")
    p.add_argument(
        "--algorithm", default="cppo", help="our preset; the peer runs its default loss (default: %(default)s)"
    )
    p.add_argument("--float32", action="store_true", help="both sides in float32 instead of bf16")
    p.add_argument(
        "--peer-checkpointing", action="store_true", help="the peer's own default, gradient checkpointing; slower: off"
    )
    p.add_argument("--peer-micro-batch", type=int, help="completions TRL forwards at once (default: all, its fastest)")
    p.add_argument(
        "--peer-python", help="an interpreter that has the peer (default: that of .venv-verl, or of peer.lock for TRL)"
    )
    o = p.parse_args()
    if o.peer == "verl" and o.peer_micro_batch:
        p.error("--peer-micro-batch is TRL's; verl's micro-batches are as large as its tokens allow")
    if o.prompts % o.updates:
        p.error(f"--updates {o.updates} does not divide --prompts {o.prompts}")
    discard = 1
    settings = {
        "model": need_model(o.model),
        "threads": o.threads,
        "prompts": o.prompts,
        "completions": o.completions,
        "updates": o.updates,
        "max_tokens": o.max_tokens,
        "bf16": not o.float32,
        "lr": 1e-5,
        "seed": 1,
        "steps": discard
        + o.repeats
        + 1,  # one more than requested: the last one also ends the run, which is not part of a step
        "system": "Reply with only the number.",
        "high": 99,
        "second_high": 9,
    }
    with tempfile.TemporaryDirectory() as folder:
        theirs = settings | {
            "folder": folder,
            "gradient_checkpointing": o.peer_checkpointing,
            "micro_batch": o.peer_micro_batch or o.prompts * o.completions // o.updates,
        }
        title, side, note = PEERS[o.peer]
        peer = Side(title, side, theirs, threads=o.threads, python=o.peer_python or python_with(o.peer))
        mine = settings | {"algorithm": o.algorithm}
        ours = Side("proxima", "step_vs_trl.proxima_side", mine | {"skip": True}, threads=o.threads)
        full = Side("proxima, nothing skipped", "step_vs_trl.proxima_side", mine | {"skip": False}, threads=o.threads)
        measured = alternate([peer, ours, full], o.repeats, discard=discard)
    seconds = {name: Spread([x["seconds"] for x in runs]) for name, runs in measured.items()}
    length = {name: Spread([x["length"] for x in runs]) for name, runs in measured.items()}
    base = seconds[peer.name].median
    rows = [[name, s.text(".2f"), f"{base / s.median:.2f}", length[name].text(".1f")] for name, s in seconds.items()]
    name, dtype, versions = (
        Path(o.model).name,
        "float32" if o.float32 else "bf16 on float32 weights",
        peer.about["versions"],
    )
    batch = f"{o.prompts} prompts x {o.completions} completions x {o.max_tokens} tokens, {o.updates} updates a step"
    print(f"{name}, {batch}, {dtype}, {o.threads} threads, {o.peer} {versions[o.peer]};")
    print(f"median [min-max] of {o.repeats} steps, sides alternating, the first step discarded\n")
    print(table(["side", "seconds a step", "times as fast", "tokens a completion"], rows))
    print(
        "\nEqual: checkpoint, form of the questions, batch, temperature 1, AdamW at 1e-5, no KL, updates a step. "
        "Not equal: the draw"
    )
    print(
        f"of the questions, and so the lengths; ours includes what the run writes to disk, {note}. `proxima` leaves out"
    )
    print(
        "completions whose advantage is exactly 0, which changes no gradient; `nothing skipped` runs them all, as "
        f"{o.peer} does.\n"
    )
    ratio, ratio_full = (round(base / seconds[side.name].median, 3) for side in (ours, full))
    skipped = Spread([x["skipped"] for x in measured[ours.name]])
    result = {
        "claim": f"step_vs_{o.peer}",
        "ratio": ratio,
        "ratio_nothing_skipped": ratio_full,
        "skipped_completions": skipped.json(),
    }
    result |= {
        "seconds": {name: s.json() for name, s in seconds.items()},
        "tokens_a_completion": {name: s.json() for name, s in length.items()},
    }
    kept = {key: value for key, value in theirs.items() if key not in ("model", "folder")}
    finish(
        result | {"model": name, "settings": kept | {"algorithm": o.algorithm}, "peer_versions": versions}, o.json_out
    )


def python_with(peer: str) -> str:
    """Return an interpreter that has the peer."""
    if peer == "trl":
        return peer_python(Path(__file__).parent)
    python = HERE.parent / ".venv-verl" / "bin" / "python"
    if not python.exists():
        raise RuntimeError("no verl here: README.md of benchmarks/step_vs_trl says how to install it into .venv-verl")
    return str(python)
