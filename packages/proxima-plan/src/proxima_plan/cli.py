"""Forecast a recipe: does it fit, how long does a step take, and what binds?

For this machine, which is measured, or for devices that nobody has rented yet: an estimate; --exact counts its memory
by whole steps on a fake device. --lag simulates the run's own loop in virtual time for several lags, and --devices with
several numbers for more and more devices.

Reads no weights; runs only proxima's own code, unless --import-code is given. Exit code 1: it does not fit."""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from proxima.cli.output import AsJson, ImportCode, Overrides, Recipe, print_json
from proxima.cli.parameters import Argument
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.config.resolved import Resolved
    from proxima_plan.devices import Devices
    from proxima_plan.simulation.times import Assumptions

DEVICES = "other devices than this machine: 8xH100-80G; several numbers: 8,24xH20-96G, or 8-1024xH800-80G by doubling"
EXACT = "count the memory of a rank by whole steps on a fake device, in place of a formula"
LAG = "simulate these values of runtime.max_lag, 0,1,2,4; with several numbers of devices one value, by default 1"
MEAN = "mean tokens of a completion; without it a third of sampling.max_tokens"
FITTED = "a run folder, whose lengths and speed a simulation takes"
SCORE = "seconds until the rewards of a group are known, in a simulation; default 0.1, or as in the run"
Cells = TypeVar("Cells")
Output = tuple[Any, str]  # of --json, and as text


def _numbers(text: str) -> list[int]:
    """Parse `0,1,4` into numbers, without repetition."""
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers with commas: 0,1,4") from None
    if min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers >= 0")
    return list(dict.fromkeys(numbers))


def plan(
    recipe: Recipe,
    override: Overrides = (),
    *,
    devices: Annotated[str | None, Argument(DEVICES, "NxNAME")] = None,
    exact: Annotated[bool, Argument(EXACT)] = False,
    propose: Annotated[bool, Argument("the fastest layouts that fit --devices, as words to paste")] = False,
    lag: Annotated[Sequence[int], Argument(LAG, "N,N", read=_numbers)] = (),
    mean_length: Annotated[float | None, Argument(MEAN, "TOKENS")] = None,
    fitted: Annotated[str | None, Argument(FITTED, "RUN", flag="--from")] = None,
    score: Annotated[float | None, Argument(SCORE, "SECONDS")] = None,
    import_code: ImportCode = False,
    as_json: AsJson = False,
) -> int:
    """Print the plan; return 1 if it does not fit."""
    from proxima_plan.devices import read_devices
    from proxima_plan.forecast import devices_here

    asked = None if devices is None else read_devices(devices)
    several, simulated = asked is not None and len(asked) > 1, bool(lag) or fitted is not None or score is not None
    if propose and asked is None:
        raise UserError("--propose needs --devices; name some, as 8xH100-80G")
    if several and (len(lag) > 1 or 0 in lag):
        raise UserError(f"--lag {','.join(map(str, lag))}: must be one number >= 1 with several numbers of devices")
    if (exact or propose) and (several or simulated):
        raise UserError(f"--{'exact' if exact else 'propose'}: plans one number of devices, without --lag")
    if simulated and not lag and not several:
        raise UserError(f"--{'score' if fitted is None else 'from'}: is of a simulation", remedy="add --lag 0,1,2,4")
    if score is not None and not 0 <= score < 1e5:
        raise UserError(f"--score {score:g}: must be in [0, 100,000] seconds")
    resolved = _resolved(recipe, override, import_code=import_code)
    ours, fits = devices_here(resolved.config) if asked is None else asked[0], True
    if several or lag:
        assumed = _assumptions(mean_length, fitted, score, ours if asked is None else None, import_code=import_code)
    if several:
        assert asked is not None
        facts, text = _scale(resolved, asked, assumed, lag[0] if lag else 1)
    elif lag:
        facts, text = _lags(resolved, ours, assumed, lag)
    elif propose:
        facts, text = _proposals(resolved, ours, mean_length)
    else:
        facts, text = _plan(resolved, override, ours, mean_length, exact=exact)
        fits = facts["fits"]
    if as_json:
        print_json(facts)
    else:
        print(text)
    return 0 if fits else 1


def _resolved(recipe: str, overrides: Sequence[str], *, import_code: bool) -> "Resolved[Any]":
    """Resolve the recipe; a placeholder that is left to fill in, or data that are not here, don't matter."""
    from proxima.config import check, resolve
    from proxima.config.problems import ConfigError
    from proxima.config.validate import to_do

    resolved = resolve(recipe, overrides, root=None, import_code=import_code)
    left = to_do(resolved)
    if problems := [problem for problem in check(resolved) if problem not in left]:
        raise ConfigError(problems)
    return resolved


def _assumptions(
    mean: float | None, folder: str | None, score: float | None, here: "Devices | None", *, import_code: bool
) -> "Assumptions":
    """Return what a simulation takes beside a plan; of a run its speed only on this machine, `here`."""
    from dataclasses import replace

    from proxima_plan.simulation.fit import observed_run, with_speed
    from proxima_plan.simulation.times import Assumptions

    assumed = Assumptions(mean=mean)
    if folder is not None:
        assumed, steps, resolved = observed_run(folder, import_code=import_code)
        if here is not None:
            assumed = with_speed(assumed, steps, resolved, here)
    return assumed if score is None else replace(assumed, score=score)


def _plan(
    resolved: "Resolved[Any]", overrides: Sequence[str], devices: "Devices", mean: float | None, *, exact: bool
) -> Output:
    from proxima.cli.explain import trained_block
    from proxima_plan.forecast import plan_recipe
    from proxima_plan.plan_text import text_of_plan, text_of_rehearsal

    planned, waits, notes = plan_recipe(resolved, devices, mean=mean), dict[str, Any](), list[str]()
    if exact:
        from proxima.config.validate import fetch_demo_model
        from proxima_plan.rehearsal.rehearsal import rehearse_recipe

        fetch_demo_model(resolved)
        estimated = sum(planned.memory.trainer.values())
        ranks, code = planned.layout.ranks, resolved.import_code
        rehearsal = rehearse_recipe(str(resolved.recipe), overrides, ranks, import_code=code)
        waits["waits"] = rehearsal.waits
        notes.append(text_of_rehearsal(rehearsal, estimated))
        planned = plan_recipe(resolved, devices, mean=mean, counted=rehearsal.peak_bytes)
    steps = getattr(resolved.config.train, "steps", 0) or 0
    notes += [f"note     {note}" for note in planned.notes]
    return planned.as_json() | waits, "\n".join([trained_block(resolved), "", text_of_plan(planned, steps), *notes])


def _proposals(resolved: "Resolved[Any]", devices: "Devices", mean: float | None) -> Output:
    from proxima.cli.explain import trained_block
    from proxima_plan.plan_text import text_of_proposals
    from proxima_plan.proposals import proposals

    proposed = proposals(resolved, devices, mean)
    facts = [{"words": proposal.words, **proposal.plan.as_json()} for proposal in proposed]
    return facts, f"{trained_block(resolved)}\n\n{text_of_proposals(proposed)}"


def _lags(resolved: "Resolved[Any]", devices: "Devices", assumed: "Assumptions", lags: Sequence[int]) -> Output:
    from proxima_plan.plan_text import lag_row
    from proxima_plan.simulation.lags import simulate_lags

    cells = _with_progress("runs", lambda progress: simulate_lags(resolved, devices, assumed, lags, progress))
    steps = len(cells[0].run.steps)
    facts = {"devices": str(devices), "steps": steps, "cells": [cell.as_json() for cell in cells]}
    return facts, _table([lag_row(cell) for cell in cells], [f"{steps} simulated steps each, on {devices}"])


def _scale(resolved: "Resolved[Any]", devices: "Sequence[Devices]", assumed: "Assumptions", lag: int) -> Output:
    from proxima_plan.plan_text import scale_row
    from proxima_plan.simulation.scale import conclusions, simulate_scale

    pairs = _with_progress("numbers of devices", partial(simulate_scale, resolved, devices, assumed, lag))
    runs = [{"synchronous": sync.as_json(), "asynchronous": beside.as_json()} for sync, beside in pairs]
    rows, summary = [scale_row(run) for pair in pairs for run in pair], conclusions(pairs)
    return {"runs": runs, "summary": summary}, _table(rows, summary)


def _with_progress(unit: str, simulate: Callable[[Callable[[int, int], None]], Cells]) -> Cells:
    """Simulate, and show how far it is."""
    from proxima.view.terminal import StageProgress

    progress = StageProgress(sys.stderr)
    cells = simulate(lambda done, total: progress.update("simulate", done, total, unit))
    progress.clear()
    return cells


def _table(rows: "Sequence[dict[str, str]]", below: Sequence[str]) -> str:
    from proxima.view.terminal import table_text

    return "\n".join([table_text(rows, sys.stdout, left=("run", "binds")), "", *below])


COMMAND = plan
