"""Compare the blocked discounted sums of `gae` and `reinforce_pp` with the recursion over tokens."""

from benchmarks.harness import Side, Spread, alternate, finish, parser, table


def main() -> None:
    p = parser(__doc__, repeats=5)
    shapes = ["16x16384", "64x1024", "16x64", "16x4"]
    p.add_argument("--shapes", nargs="+", default=shapes, metavar="ROWSxTOKENS", help="(default: %(default)s)")
    o = p.parse_args()
    rows, measured = [], {}
    for shape in o.shapes:
        count, tokens = map(int, shape.split("x"))
        settings = {"threads": o.threads, "rows": count, "tokens": tokens}
        side = Side("scan", "advantage_scan.side", settings, threads=o.threads)
        runs = alternate([side], o.repeats)[side.name]
        loop, blocks = (Spread([x[name] for x in runs]) for name in ("loop", "blocks"))
        ratio, off = loop.median / blocks.median, max(x["off"] for x in runs)
        measured[shape] = {
            "ratio": round(ratio, 1),
            "off": off,
            "seconds": {"loop": loop.json(), "blocks": blocks.json()},
        }
        rows += [
            [shape, "loop", loop.text(".6f"), "1", ""],
            [shape, "blocks", blocks.text(".6f"), f"{ratio:.1f}", f"{off:.0e}"],
        ]
    print(f"float64, {o.threads} threads, seconds; median [min-max] of {o.repeats}, in one process, alternating\n")
    print(table(["rows x tokens", "side", "seconds", "times as fast", "largest difference"], rows))
    first = measured[o.shapes[0]]["ratio"]
    finish({"claim": "advantage_scan", "ratio": first, "shapes": measured, "threads": o.threads}, o.json_out)
