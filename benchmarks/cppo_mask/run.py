"""Compare the packed cumulative prefix-divergence mask with a plain loop over sequences."""

from benchmarks.harness import Side, Spread, alternate, finish, parser, table


def main() -> None:
    p = parser(__doc__, repeats=5)
    p.add_argument(
        "--shapes",
        nargs="+",
        default=["4096x256", "256x16384"],
        metavar="SEQUENCESxTOKENS",
        help="(default: %(default)s)",
    )
    o = p.parse_args()
    rows, measured = [], {}
    for shape in o.shapes:
        sequences, tokens = map(int, shape.split("x"))
        settings = {"threads": o.threads, "sequences": sequences, "tokens": tokens}
        side = Side("cppo", "cppo_mask.side", settings, threads=o.threads)
        runs = alternate([side], o.repeats)[side.name]
        loop, packed = (Spread([x[name] for x in runs]) for name in ("loop", "packed"))
        wrong, memory = runs[0]["disagree"], runs[0]["copies"]
        ratio = loop.median / packed.median
        measured[shape] = {"ratio": round(ratio, 2), "seconds": {"loop": loop.json(), "packed": packed.json()}}
        measured[shape] |= {"disagree": wrong, "peak_float32_copies": memory}
        rows += [[shape, "plain loop", loop.text(".4f"), "1", "", ""]]
        rows += [[shape, "packed", packed.text(".4f"), f"{ratio:.1f}", str(wrong), f"{memory:.2f}"]]
    print(f"float32, {o.threads} threads; median [min-max] of {o.repeats}, both in one process, alternating\n")
    print(
        table(
            ["sequences x tokens", "side", "seconds", "times as fast", "masks that differ", "peak float32 copies"], rows
        )
    )
    print(
        "\nA token counts as different if the two masks disagree although neither threshold is within 1e-6 of the "
        "token's divergence.\n"
    )
    finish(
        {"claim": "cppo_mask", "ratio": measured[o.shapes[0]]["ratio"], "shapes": measured, "threads": o.threads},
        o.json_out,
    )
