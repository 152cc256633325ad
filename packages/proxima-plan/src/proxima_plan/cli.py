"""Forecast a recipe: does it fit, how long does a step take, and what binds?

For this machine, which is measured, or for devices that nobody has rented yet: an estimate; --exact counts its memory
by whole steps on a fake device. --lag simulates the run's own loop in virtual time for several lags, and --devices with
several numbers for more and more devices.

Reads no weights; runs only proxima's own code, unless --import-code is given. Exit code 1: it does not fit."""

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from proxima.cli.parameters import Argument, AsJson, ImportCode, Overrides, Recipe, print_json
from proxima.data import UserError

if TYPE_CHECKING:
    from proxima.config.resolved import Resolved

DEVICES = "other devices than this machine: 8xH100-80G; several numbers: 8,24xH20-96G, or 8-1024xH800-80G by doubling"
EXACT = "count the memory of a rank by whole steps on a fake device, in place of a formula"
LAG = "simulate these values of runtime.max_lag, 0,1,2,4; with several numbers of devices one value, by default 1"
MEAN = "mean tokens of a completion; without it a third of sampling.max_tokens"
FITTED = "a run folder, whose lengths and speed a simulation takes"
SCORE = "seconds until the rewards of a group are known, in a simulation; default 0.1, or as in the run"


def _numbers(text: str) -> list[int]:
    """Parse `0,1,4` into numbers, without repetition."""
    if not re.fullmatch(r"\d+(\s*,\s*\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers >= 0 with commas: 0,1,4")
    return list(dict.fromkeys(map(int, text.split(","))))


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
    # here, so that --help needs no torch
    from proxima_plan.answers import planned, proposed
    from proxima_plan.devices import read_devices
    from proxima_plan.forecast import devices_here
    from proxima_plan.simulation.fit import assumptions
    from proxima_plan.simulation.simulated_answers import lagging, scaled

    asked = None if devices is None else read_devices(devices)
    several = asked is not None and len(asked) > 1
    simulated = bool(lag) or fitted is not None or score is not None
    if propose and asked is None:
        raise UserError("--propose needs --devices; name some, as 8xH100-80G")
    if several and (len(lag) > 1 or 0 in lag):
        raise UserError(f"--lag {','.join(map(str, lag))}: must be one number >= 1 with several numbers of devices")
    if (exact or propose) and (several or simulated):
        option = "exact" if exact else "propose"
        raise UserError(f"--{option}: plans one number of devices, without --lag")
    if exact and propose:
        raise UserError("--exact: counts one layout, and --propose estimates many; leave one of the two out")
    if simulated and not lag and not several:
        option = "score" if fitted is None else "from"
        raise UserError(f"--{option}: is of a simulation", remedy="add --lag 0,1,2,4")
    if fitted is not None and mean_length is not None:
        raise UserError("--mean-length: the lengths are those of --from; leave out one of the two")
    if score is not None and not 0 <= score < 1e5:
        raise UserError(f"--score {score:g}: must be in [0, 100,000] seconds")
    resolved = _resolved(recipe, override, import_code=import_code)
    measured = None
    if asked is None:
        measured = devices_here(resolved.config)
        ours = measured
    else:
        ours = asked[0]
    if several or lag:
        assumed = assumptions(mean_length, fitted, score, measured, import_code=import_code)
    fits = True
    if several:
        assert asked is not None
        ahead = lag[0] if lag else 1
        facts, text = scaled(resolved, asked, assumed, ahead)
    elif lag:
        facts, text = lagging(resolved, ours, assumed, lag)
    elif propose:
        facts, text = proposed(resolved, ours, mean_length)
    else:
        facts, text = planned(resolved, override, ours, mean_length, exact=exact)
        fits = facts["fits"]
    if as_json:
        print_json(facts)
    else:
        print(text)
    return 0 if fits else 1


def _resolved(recipe: str, overrides: Sequence[str], *, import_code: bool) -> "Resolved[Any]":
    """Resolve the recipe; a placeholder that is left to fill in, or data that are not here, don't matter."""
    from proxima.config.problems import ConfigError
    from proxima.config.resolution import resolve
    from proxima.config.validate import check, to_do

    resolved = resolve(recipe, overrides, root=None, import_code=import_code)
    left = to_do(resolved)
    problems = [problem for problem in check(resolved) if problem not in left]
    if problems:
        raise ConfigError(problems)
    return resolved


COMMAND = plan
