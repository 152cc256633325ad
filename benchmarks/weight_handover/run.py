"""Measure which weights an update changes, and the cost of copying all or only those to the engine's process."""

from time import perf_counter

from benchmarks.harness import Spread, finish, need_model, parser, table

BLOCKS = (64, 4096, 1 << 20)  # bytes


def main() -> None:
    p = parser(__doc__, repeats=5)
    p.add_argument("--lr", type=float, default=1e-6, help="of AdamW (default: %(default)s)")
    p.add_argument("--steps", type=int, default=3, help="updates before the one measured (default: %(default)s)")
    p.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of the weights (default: %(default)s)")
    o = p.parse_args()
    rows, measured = [], {}
    for dtype in o.dtypes:
        measurement = measure(need_model(o.model), dtype, o.lr, o.steps, o.repeats, o.threads)
        measured[dtype] = measurement
        shares = [f"{measurement['changed'][str(block)]:.3f}" for block in (0, *BLOCKS)]
        times = [f"{measurement[side][0]:.3f}" for side in ("memcpy", "publish", "compare", "delta")]
        rows.append([dtype, f"{measurement['bytes'] / 2**20:.0f}", *shares, *times])
    header = ["weights", "MiB", "values changed", "64 B", "4 KiB", "1 MiB", "memcpy s", "publish s", "compare s"]
    print(
        f"AdamW, lr {o.lr:g}, update {o.steps + 1}; shares of values and of blocks that changed; {o.threads} threads\n"
    )
    print(table([*header, "delta s"], rows))
    first = measured[o.dtypes[0]]
    finish({"claim": "weight_handover", "ratio": first["ratio"], "dtypes": measured, "lr": o.lr}, o.json_out)


def measure(model_path: str, dtype: str, lr: float, steps: int, repeats: int, threads: int) -> dict:
    """Make an update, then time copies of all parameters and of the changed blocks in turn."""
    import torch

    from proxima.engine.shared_weights import SharedWeights
    from proxima.model import load

    torch.set_num_threads(threads)
    model = load(model_path, dtype=getattr(torch, dtype), device="cpu").model
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, betas=(0.9, 0.99))
    draws = torch.Generator().manual_seed(0)
    weights = SharedWeights.allocate(model)
    for step in range(steps + 1):
        if step == steps:
            weights.write(model, 0)
        tokens = torch.randint(0, model.config.vocab_size, (4, 64), generator=draws)
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    names = dict(model.named_parameters())
    new = torch.cat([names[place.name].detach().flatten().view(torch.uint8) for place in weights.places])
    old = torch.cat([weights.tensors[place.name].flatten().view(torch.uint8) for place in weights.places])
    size = getattr(torch, dtype).itemsize
    unlike = new.view(torch.int16 if size == 2 else torch.int32) != old.view(torch.int16 if size == 2 else torch.int32)
    changed = {"0": float(unlike.float().mean())}
    for block in BLOCKS:
        whole = unlike[: len(unlike) // (block // size) * (block // size)].view(-1, block // size)
        changed[str(block)] = float(whole.any(1).float().mean())
    times: dict[str, list[float]] = {"memcpy": [], "publish": [], "compare": [], "delta": []}
    target = torch.empty_like(old)
    for version in range(1, repeats + 2):
        target.copy_(old)
        for side, work in (
            ("memcpy", lambda: target.copy_(new)),
            ("publish", lambda version=version: weights.write(model, version)),
            ("compare", lambda: differing(new, old)),
            ("delta", lambda: delta(new, target, old)),
        ):
            target.copy_(old)
            start = perf_counter()
            work()
            if version > 1:
                times[side].append(perf_counter() - start)
    spreads = {side: Spread(seconds) for side, seconds in times.items()}
    ratio = round(spreads["publish"].median / spreads["memcpy"].median, 2)
    return {"bytes": len(new), "changed": changed, "ratio": ratio} | {k: spread.json() for k, spread in spreads.items()}


def differing(new, old, block: int = 4096):
    """Return which blocks of bytes differ, [blocks] bool."""
    import torch

    end = len(new) // block * block
    return (new[:end].view(torch.int64).view(-1, block // 8) != old[:end].view(torch.int64).view(-1, block // 8)).any(1)


def delta(new, target, old, block: int = 4096) -> None:
    """Copy the blocks that differ."""
    end = len(new) // block * block
    which = differing(new, old, block).nonzero().squeeze(1)
    target[:end].view(-1, block)[which] = new[:end].view(-1, block)[which]
    target[end:] = new[end:]
