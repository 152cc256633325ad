"""Compare the training time with the common beginning of an episode's paths run once, and once per path."""

from benchmarks.harness import Side, Spread, alternate, finish, need_model, parser, table

SIDES = {"once a path": False, "once": True}


def main() -> None:
    p = parser(__doc__, repeats=5)
    shapes = {"nargs": "+", "default": ["4x50x200", "8x50x100"], "metavar": "TURNSxTHOUGHTxANSWER"}
    p.add_argument("--shapes", help="turns, and tokens of each (default: %(default)s)", **shapes)
    p.add_argument("--prompt", type=int, default=100, help="tokens of the prompt (default: %(default)s)")
    p.add_argument("--message", type=int, default=40, help="tokens behind a thought (default: %(default)s)")
    p.add_argument("--completions", type=int, default=1, help="episodes in the batch (default: %(default)s)")
    o = p.parse_args()
    model, rows, measured = need_model(o.model), [], {}
    for shape in o.shapes:
        turns, thought, answer = map(int, shape.split("x"))
        settings = {"model": model, "threads": o.threads, "prompt_tokens": o.prompt, "completions": o.completions}
        settings |= {"turns": turns, "thought": thought, "message": o.message, "answer": answer}
        sides = [
            Side(name, "shared_paths.side", settings | {"share": share}, threads=o.threads)
            for name, share in SIDES.items()
        ]
        run = {side.name: side.about["tokens_run"] for side in sides}
        by_side = alternate(sides, o.repeats)
        times = {name: Spread([x["seconds"] for x in runs]) for name, runs in by_side.items()}
        slow, fast = times.values()
        norms = {name: by_side[name][0]["grad_norm"] for name in times}
        measured[shape] = {"ratio": round(slow.median / fast.median, 3), "tokens_run": run, "grad_norm": norms}
        measured[shape]["seconds"] = {name: t.json() for name, t in times.items()}
        rows += [
            [shape, name, f"{run[name]:,}", t.text(".2f"), f"{slow.median / t.median:.2f}", f"{norms[name]:.4f}"]
            for name, t in times.items()
        ]
    print(f"forward and backward, bf16, {o.threads} threads; median [min-max] of {o.repeats}, sides alternating\n")
    header = ["turns x thought x answer", "a beginning is run", "tokens run", "seconds", "times as fast"]
    print(table([*header, "gradient norm"], rows))
    print("\nEqual: weights, targets, losses; tests hold the gradients equal in float32.\n")
    ratio = measured[o.shapes[0]]["ratio"]
    finish({"claim": "shared_paths", "ratio": ratio, "shapes": measured, "threads": o.threads}, o.json_out)
