"""Compare the training time with a group's prompt run once, and once per completion; and with the common opening of all
prompts run once."""

from benchmarks.harness import Side, Spread, alternate, finish, need_model, parser, table


def main() -> None:
    p = parser(__doc__, repeats=5)
    p.add_argument(
        "--shapes",
        nargs="+",
        default=["40x12", "256x64"],
        metavar="[OPENING+]PROMPTxRESPONSE",
        help="tokens; an opening, of all prompts, is run once a group or once (default: %(default)s)",
    )
    p.add_argument("--prompts", type=int, default=2, help="groups in the batch (default: %(default)s)")
    p.add_argument("--completions", type=int, default=8, help="completions a group (default: %(default)s)")
    o = p.parse_args()
    model, rows, measured = need_model(o.model), [], {}
    for shape in o.shapes:
        prompt, tokens = shape.split("x")
        *opening, prompt_tokens = map(int, prompt.split("+"))
        if opening:
            names = ("once a group", "openings once")
        else:
            names = ("once a completion", "once a group")
        settings = {"model": model, "threads": o.threads, "prompts": o.prompts, "completions": o.completions}
        settings |= {"prompt_tokens": prompt_tokens, "tokens": int(tokens), "opening": sum(opening)}
        sides = [Side(name, "shared_prompt.side", settings | {"run": name}, threads=o.threads) for name in names]
        about = {side.name: side.about for side in sides}
        by_side = alternate(sides, o.repeats)
        times = {name: Spread([x["seconds"] for x in runs]) for name, runs in by_side.items()}
        slow, fast = (times[name] for name in names)
        norms = [by_side[name][0]["grad_norm"] for name in times]
        measured[shape] = {
            "ratio": round(slow.median / fast.median, 3),
            "seconds": {name: t.json() for name, t in times.items()},
            "grad_norm": norms,
        }
        rows += [
            [
                shape,
                name,
                f"{about[name]['tokens_run']:,}",
                t.text(".2f"),
                f"{slow.median / t.median:.2f}",
                f"{by_side[name][0]['grad_norm']:.4f}",
            ]
            for name, t in times.items()
        ]
    batch = f"{o.prompts} groups of {o.completions}"
    print(
        f"forward and backward, bf16, {o.threads} threads, {batch}; median [min-max] of {o.repeats}, sides "
        "alternating\n"
    )
    print(
        table(
            ["prompt x response", "the prompt is run", "tokens run", "seconds", "times as fast", "gradient norm"], rows
        )
    )
    print("\nEqual: weights, tokens, losses (but for one token of prompts that would begin alike).")
    print("Tests hold the gradients equal in float32.\n")
    finish(
        {"claim": "shared_prompt", "ratio": measured[o.shapes[-1]]["ratio"], "shapes": measured, "threads": o.threads},
        o.json_out,
    )
