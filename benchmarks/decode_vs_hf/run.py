"""Compare the local engine's tokens per second with `generate` of transformers, and both with the machine's limit."""

from pathlib import Path

from benchmarks.harness import Side, Spread, alternate, finish, need_model, parser, peer_python, table


def main() -> None:
    p = parser(__doc__, repeats=5)
    p.add_argument("--rows", type=int, default=64, help="completions at once (default: %(default)s)")
    p.add_argument(
        "--prompts",
        type=int,
        default=8,
        help="different prompts among them; must divide the rows (default: %(default)s)",
    )
    p.add_argument("--tokens", type=int, default=64, help="new tokens a row (default: %(default)s)")
    p.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    p.add_argument("--peer-python", help="an interpreter that has transformers, instead of that of peer.lock")
    o = p.parse_args()
    if o.rows % o.prompts:
        p.error(f"--prompts {o.prompts} does not divide --rows {o.rows}")
    settings = {
        "model": need_model(o.model),
        "threads": o.threads,
        "rows": o.rows,
        "prompts": o.prompts,
        "tokens": o.tokens,
        "dtype": o.dtype,
    }
    python = o.peer_python or peer_python(Path(__file__).parent)
    peer = Side("HF generate", "decode_vs_hf.hf_side", settings, threads=o.threads, python=python)
    ours = Side("local engine", "decode_vs_hf.proxima_side", settings, threads=o.threads)
    limit = Side("GEMM", "gemm", {"threads": o.threads, "dtype": o.dtype}, threads=o.threads)
    measured = alternate([peer, ours, limit], o.repeats)
    short = {name: {x["tokens"] for x in measured[name]} - {o.rows * o.tokens} for name in (peer.name, ours.name)}
    if any(short.values()):
        raise RuntimeError(f"not every completion has {o.tokens} tokens, the rates can't be compared: {short}")
    rates = {name: Spread([x["rate"] for x in measured[name]]) for name in (peer.name, ours.name)}
    flops = Spread([x["flops"] for x in measured["GEMM"]])
    most = flops.median / (2 * ours.about["parameters"])
    base = rates[peer.name].median
    rows = [
        [name, rate.text(), f"{rate.median / base:.2f}", f"{rate.median / most:.2f}"] for name, rate in rates.items()
    ]
    name, version = Path(o.model).name, peer.about["versions"]["transformers"]
    print(
        f"{name}, {o.dtype}, {o.rows} rows of {o.prompts} prompts x {o.tokens} tokens, {o.threads} threads, "
        f"transformers {version};"
    )
    print(f"median [min-max] of {o.repeats}, sides alternating\n")
    print(table(["side", "tok/s", "against HF", f"share of the GEMM limit, {most:,.0f} tok/s"], rows))
    print(
        "\nEqual: checkpoint, prompts, temperature 1, no truncation, new tokens. Not equal: HF returns no "
        "log-probs and runs"
    )
    print("each prompt once a row; the local engine returns two log-probs a token and runs each prompt once.\n")
    ratio = rates[ours.name].median / base
    result = {
        "claim": "decode_vs_hf",
        "ratio": round(ratio, 3),
        "tok_per_s": {name: rate.json() for name, rate in rates.items()},
    }
    result |= {
        "gemm_limit_tok_per_s": round(most),
        "gemm_gflops": round(flops.median / 1e9),
        "decoder": ours.about["decoder"],
    }
    settings.pop("model")
    finish(result | {"model": name, "settings": settings, "peer_versions": peer.about["versions"]}, o.json_out)
