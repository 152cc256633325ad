"""Update the measured figures of README.md, of recipes/ and of benchmarks/, each from a committed result.

    python scripts/figures.py            writes them into the pages
    python scripts/figures.py --check    writes nothing; exit 1 if a page says something else

An entry of FIGURES is a page, words of it with `{}` in place of each number, and for each of these a benchmark, or a
file below benchmarks/, the path of the number in it, and its format. Of a benchmark, every result counts,
`results/DATE_2-cores.json`: the page shows the range of these, `5.2 to 8.6`. Results with other names (`…_ray.json`)
are of other settings, or of a GPU. The paths `runs` and `machines` count them and their machines; `dates` is the first
and the last day of measuring, from the names of their files.
"""

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
Number = tuple[str, str, str]
Figure = tuple[str, str, tuple[Number, ...]]
MUTANTS = "results/mutants/core_signs.json"
README, BENCHMARKS, RESULTS = "README.md", "benchmarks/README.md", "benchmarks/results/README.md"

STEP, BARE = ("step_vs_trl", "ratio", ".1f"), ("step_vs_trl", "ratio_nothing_skipped", ".1f")
DECODE, LONG = ("decode_vs_hf", "ratio", ".1f"), ("shared_prompt", "shapes/256x64/ratio", ".1f")
VLLM = ("vllm_throughput/results/2026-11-23_2-cores.json", "ratios/local engine", ".1f")
GRADED = ("math_reward", "per_second/0", ".0f")
PRODUCTS = "limits/products"
PRUNED = ("pruned_update", "ratio/P=0.875", ".1f")


def measured(words: str, *numbers: Number) -> Figure:
    """Return a row of the README's table, which ends with the number of results and of machines, and the dates."""
    source = numbers[0][0]
    counts = ((source, "runs", ""), (source, "machines", ""), (source, "dates", ""))
    return README, words + " {} on {} | {} |", numbers + counts


def share(*phases: str, least: str = "limit") -> Number:
    """Return the limit on this machine, or another least time, as a share of the time of some phases."""
    paths = (" plus ".join(f"phases/{phase}/{key}" for phase in phases) for key in (least, "seconds/0"))
    return "where", " over ".join(paths), ".0%"


FIGURES: tuple[Figure, ...] = (
    measured("| a whole step of the demo | TRL 1.16 GRPOTrainer | {} ({} with nothing skipped) |", STEP, BARE),
    measured("| decode, 64 rows x 64 tokens | `generate` of transformers 5.23 | {} |", DECODE),
    measured("| generation, 32 at once, one thread | a vLLM 0.32 server on the CPU | {} |", VLLM),
    measured("| the prompt computed for each completion | {} |", LONG),
    measured("| an update with 7 of 8 completions pruned | all completions | {} |", PRUNED),
    (
        README,
        "would take {} of the time of\ndecoding and {} of that of an update ({}).",
        (share("decode", least=PRODUCTS), share("forward", "backward", least=PRODUCTS), ("where", "dates", "")),
    ),
    (BENCHMARKS, "| {} × as fast, {} × with nothing skipped |", (STEP, BARE)),
    (
        BENCHMARKS,
        "| SFT {} × as fast, DPO {} × ({} rows a step) |",
        (
            ("offline_vs_trl", "ratio_sft", ".1f"),
            ("offline_vs_trl", "ratio_dpo", ".1f"),
            ("offline_vs_trl", "settings/rows", ".0f"),
        ),
    ),
    (
        BENCHMARKS,
        "times as fast as `generate` | {} ×, {} of the GEMM limit |",
        (DECODE, ("decode_vs_hf", "tok_per_s/local engine/0 over gemm_limit_tok_per_s", ".0%")),
    ),
    (BENCHMARKS, "| {} × (40 + 12 tokens), {} × (256 + 64) |", (("shared_prompt", "shapes/40x12/ratio", ".1f"), LONG)),
    (
        BENCHMARKS,
        "| {} × (4 turns), {} × (8 turns; ",
        (("shared_paths", "shapes/4x50x200/ratio", ".1f"), ("shared_paths", "shapes/8x50x100/ratio", ".1f")),
    ),
    (
        BENCHMARKS,
        "| {} a second; math-verify alone in one process {} |",
        (GRADED, ("math_reward", "alone/per_second/0", ".0f")),
    ),
    (
        BENCHMARKS,
        "| {} ×; the local engine {} × | 7, plus the environment of vLLM",
        (("vllm_throughput", "ratio", ".2f"), VLLM),
    ),
    (BENCHMARKS, "5 times less | {} × and {} × | 2 |", (("pruned_update", "ratio/P=0.5", ".1f"), PRUNED)),
    (
        BENCHMARKS,
        "| the limit is {} of the time of decoding (long: {}), {} of an update's passes, {} of the optimizer |",
        (share("decode"), share("decode, long"), share("forward", "backward"), share("optimizer")),
    ),
    (
        RESULTS,
        "what notices them: golden records, laws and tests catch {} of {}, {} |",
        (
            (MUTANTS, "count/golden plus count/laws plus count/tests", ".0f"),
            (MUTANTS, "count/golden plus count/laws plus count/tests plus count/missed", ".0f"),
            (MUTANTS, "share", ".1%"),
        ),
    ),
)


LAYOUTS = {  # recipe whose header has the figures → its layouts
    name: (f"{family}_{cluster}", f"{family}_8xH100")
    for family, cluster, names in (
        ("qwen3_30b", "128xH800", ("qwen3_30b_cppo",)),
        ("qwen3_4b", "32xH800", ("qwen3_4b_grpo",)),
        ("dapo_32b", "128xH800", ("dapo_32b", "dapo_32b_early", "dapo_32b_no_dynamic", "dapo_32b_tis")),
    )
    for name in names
}


def layout_figures() -> Iterator[Figure]:
    """Yield the figures of recipes in their layouts: a planned step, and the rehearsed memory of a rank."""
    for recipe, layouts in LAYOUTS.items():
        for layout, words in zip(layouts, (" {} s a step and {} GiB a rank", " {} s and {} GiB."), strict=True):
            place = f"rows/{recipe}/{layout}"
            step = ("layouts", f"{place}/step_seconds", ",.0f")
            numbers = (step, ("layouts", f"{place}/rehearsal/needed_gib", ".0f"))
            yield f"recipes/{recipe}.yaml", f"@layouts/{layout}{words}", numbers
            if not recipe.endswith(("_early", "_no_dynamic", "_tis")):
                yield "recipes/README.md", f"(layouts/{layout}.yaml) | {recipe} | {{}} s | {{}} GiB |", numbers


FIGURES += tuple(layout_figures())


PLANNED = ("layouts",)  # whose numbers are not this machine's
PLAIN = re.compile(
    r"\d{4}-\d\d-\d\d_\d+-(?:core|thread)s?\.json"
)  # a result with the benchmark's own settings, on a CPU


@functools.cache
def results(source: str) -> list[Any]:
    """Return the result in a file, or all of a benchmark, the newest last."""
    if source.endswith(".json"):
        files = [ROOT / "benchmarks" / source]
    else:
        named = sorted((ROOT / "benchmarks" / source / "results").glob("*.json"))
        files = [file for file in named if PLAIN.fullmatch(file.name)]
    return [{"date": file.name.partition("_")[0]} | json.loads(file.read_text(encoding="utf-8")) for file in files]


def figure(source: str, path: str, form: str) -> str:
    """Return the number as the page shows it: `8.6`, or over several results `5.2 to 8.6`."""
    found = results(source)
    if path in COUNTS:
        return str(COUNTS[path](found))
    if source in PLANNED:
        found = found[-1:]
    texts = [f"{value:{form}}" for value in sorted(number(each, path) for each in found)]
    if texts[0] == texts[-1]:
        span = texts[:1]
    else:
        span = [texts[0].removesuffix("%"), texts[-1]]
    return " to ".join(span).replace("%", " %")


def machines(results: list[Any]) -> int:
    """Return the number of machines, told apart by processor and system."""
    return len({(each["machine"]["processor"], each["machine"]["system"]) for each in results})


def dates(results: list[Any]) -> str:
    """Return the first and the last day of measuring: `2026-11-20 to 2026-11-25`."""
    days = sorted(each["date"] for each in results)
    return " to ".join(dict.fromkeys((days[0], days[-1])))


COUNTS: dict[str, Callable[[list[Any]], int | str]] = {"runs": len, "machines": machines, "dates": dates}


def number(result: Any, path: str) -> float:
    """Return the number at `a/b/0` of a result, the sum of `a plus b`, or the quotient of such sums, `a over b`."""

    def at(path: str) -> float:
        value = result
        for key in path.split("/"):
            if isinstance(value, list):
                value = value[int(key)]
            else:
                value = value[key]
        return float(value)

    above, *below = (sum(map(at, part.split(" plus "))) for part in path.split(" over "))
    return above / below[0] if below else above


def updated(text: str, words: str, numbers: tuple[Number, ...]) -> str:
    """Return the page with these numbers. Raise ValueError unless the words occur once."""
    pattern = r"[\d.,-]+(?: to [\d.,-]+)?(?: %)?".join(re.escape(part) for part in words.split("{}"))
    new, count = re.subn(pattern, lambda _: words.format(*(figure(*arguments) for arguments in numbers)), text)
    if count != 1:
        raise ValueError(f"{words!r} occurs {count} times")
    return new


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page says something else")
    options = parser.parse_args()
    wrong = []
    for page in dict.fromkeys(page for page, _, _ in FIGURES):
        before = text = (ROOT / page).read_text(encoding="utf-8")
        for _, words, numbers in (line for line in FIGURES if line[0] == page):
            text = updated(text, words, numbers)
        wrong += [page] if text != before else []
        if not options.check:
            (ROOT / page).write_text(text, encoding="utf-8")
    print(
        "\n".join(f"{page}: {'differs from' if options.check else 'has the figures of'} the results" for page in wrong)
    )
    return 1 if wrong and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
