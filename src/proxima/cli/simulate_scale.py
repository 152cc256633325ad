"""`proxima simulate RECIPE --devices`: synchronous and asynchronous runs on increasing numbers of devices."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxima.cli.output import print_json
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.config.resolved import Resolved, ResolvedValue
    from proxima.lab.plan.devices import DeviceKind
    from proxima.lab.simulate.times import Times

MOST = 65_536  # devices


def read_counts(text: str) -> "tuple[list[int], DeviceKind]":
    """Parse `8-1024xH800-80G` or `8,24xH20-96G` into numbers in ascending order, and the kind.

    Raises:
        UserError: the text is not of that form, a number is out of range, or the device is unknown.
    """
    from proxima.lab.plan.devices import read_devices

    match = re.fullmatch(r"(\d[\d,-]*)[x×](.+)", text.strip())
    if match is None:
        raise UserError(
            f"--devices {text}: must be numbers and a kind of device", remedy="8-1024xH800-80G, 8,24xH20-96G"
        )
    kind, counts = read_devices(f"1x{match[2]}").kind, set[int]()
    for part in match[1].split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        low, high = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if not 1 <= low <= high <= MOST:
            raise UserError(
                f"--devices {text}: {part!r} must be a number in [1, {MOST:,}], or two, the larger one last"
            )
        counts.update(low * 2**i for i in range((high // low).bit_length()))
    return sorted(counts), kind


def simulate_on_devices(
    resolved: "Resolved[Any]",
    devices: str,
    times: "Times",
    entries: "Sequence[ResolvedValue]",
    *,
    lags: Sequence[int],
    steps: int | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Print the table, and write the page.

    Args:
        entries: the times with their sources.
        lags: the lag of the asynchronous runs, at most one; none: 1.
    """
    from proxima.lab.simulate.planned_times import PLANNED
    from proxima.lab.simulate.scale import STEPS, simulate_scale
    from proxima.view.scale_page import scale_rows, sentences, write_scale
    from proxima.view.terminal import StageProgress, rendered, table_of_rows

    counts, kind = read_counts(devices)
    lag = lags[0] if lags else 1
    if len(lags) > 1 or lag < 1:
        raise UserError(f"--lag {','.join(map(str, lags))}: must be one number >= 1 with --devices")
    given = [entry.path.split(".")[1] for entry in entries if entry.origin != "default"]
    if planned := next((name for name in given if name in PLANNED), None):
        raise UserError(f"times.{planned}: --devices has it from the plan; leave it out")
    progress = StageProgress(sys.stderr)
    pairs = simulate_scale(
        resolved,
        kind,
        counts,
        times,
        given=given,
        lag=lag,
        steps=steps or STEPS,
        progress=lambda done, total: progress.update("simulate", done, total, "numbers of devices"),
    )
    progress.clear()
    title = f"{resolved.config.model.path} on {devices}"
    if html is not None:
        write_scale(html, title, pairs, [entry for entry in entries if entry.path.split(".")[1] not in PLANNED])
    if as_json:
        runs = [{"synchronous": sync.as_json(), "asynchronous": beside.as_json()} for sync, beside in pairs]
        facts: dict[str, Any] = {"devices": devices, "steps": steps or STEPS, "lag": lag, "runs": runs}
        print_json({**facts, "summary": sentences(pairs), "page": None if html is None else str(html)})
        return
    print(rendered(table_of_rows(scale_rows(pairs), left=("run", "binds")), sys.stdout))
    if said := sentences(pairs):
        print("\n".join(["", *said]))
    if html is not None:
        print(f"\n{html}")
