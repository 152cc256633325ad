"""Compare the time of an update with and without pruned completions."""

from benchmarks.harness import Side, Spread, alternate, finish, need_model, parser, table


def main() -> None:
    p = parser(__doc__, repeats=3)
    p.add_argument(
        "--rates", type=float, nargs="+", default=[0.0, 0.5, 0.75, 0.875], help="shares to prune (default: %(default)s)"
    )
    p.add_argument("--shape", default="96x192", metavar="PROMPTxRESPONSE", help="tokens (default: %(default)s)")
    p.add_argument("--prompts", type=int, default=1, help="groups in the batch (default: %(default)s)")
    p.add_argument("--completions", type=int, default=16, help="completions a group (default: %(default)s)")
    o = p.parse_args()
    prompt_tokens, tokens = map(int, o.shape.split("x"))
    settings = {"model": need_model(o.model), "threads": o.threads, "prompts": o.prompts, "completions": o.completions}
    settings |= {"prompt_tokens": prompt_tokens, "tokens": tokens}
    sides = [
        Side(f"P={rate:g}", "pruned_update.side", settings | {"rate": rate}, threads=o.threads) for rate in o.rates
    ]
    about = {side.name: side.about for side in sides}
    measured = alternate(sides, o.repeats)
    times = {name: Spread([x["seconds"] for x in runs]) for name, runs in measured.items()}
    whole = times["P=0"].median
    rows = [
        [
            name,
            f"{about[name]['completions']}",
            f"{about[name]['tokens_run']:,}",
            t.text(".2f"),
            f"{whole / t.median:.2f}",
            f"{about['P=0']['tokens_run'] / about[name]['tokens_run']:.2f}",
        ]
        for name, t in times.items()
    ]
    batch = f"{o.prompts} groups of {o.completions}, {o.shape} tokens"
    print(
        f"whole update (forward, backward, AdamW), bf16, {o.threads} threads, {batch}; median [min-max] of "
        f"{o.repeats}, in turn\n"
    )
    print(table(["pruned", "completions", "tokens run", "seconds", "times as fast", "bound by tokens"], rows))
    ratios = {name: round(whole / t.median, 3) for name, t in times.items()}
    print(
        "\nThe prompt is run once a group however few completions are left, and AdamW steps once: so not 1 / (1 - P).\n"
    )
    seconds = {name: t.json() for name, t in times.items()}
    finish(
        {"claim": "pruned_update", "ratio": ratios, "seconds": seconds, "shape": o.shape, "threads": o.threads},
        o.json_out,
    )
