"""Run every claim with its default figures: `python -m benchmarks`."""

import argparse
import subprocess
import sys

from benchmarks.harness import HERE, result_name

#: quick ones first; the last two train several models each
CLAIMS = (
    "view",
    "simulate_vs_run",
    "shared_prompt",
    "shared_paths",
    "pruned_update",
    "math_reward",
    "sandbox",
    "vllm_throughput",
    "plan",
    "layouts",
    "balance",
    "early_stop",
    "rank_zero",
    "host_memory",
    "sync",
    "kernels",
    "rank_memory",
    "rank_speed",
    "served_clients",
    "kills",
    "nan_campaign",
    "ranks",
    "where",
    "busy_machine",
    "processors",
    "weight_ipc",
    "decode_vs_hf",
    "step_vs_trl",
    "offline_vs_trl",
    "async_vs_sync",
    "segment_wise",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("claims", nargs="*", default=CLAIMS, help=f"of {', '.join(CLAIMS)} (default: all)")
    parser.add_argument("--save", action="store_true", help="write the results into each claim's results/ folder")
    options = parser.parse_args()
    unknown = sorted(set(options.claims) - set(CLAIMS))
    if unknown:
        parser.error(f"no claim {', '.join(unknown)}; there are {', '.join(CLAIMS)}")
    failed = []
    for claim in options.claims:
        print(f"\n== {claim}", flush=True)
        if options.save:
            save = ["--json-out", str(HERE / claim / "results" / result_name())]
        else:
            save = []
        if subprocess.run([sys.executable, "-m", f"benchmarks.{claim}", *save], cwd=HERE.parent).returncode != 0:
            failed.append(claim)
    if failed:
        print(f"error: {', '.join(failed)} did not finish", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
