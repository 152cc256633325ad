"""Check a kind against the laws of its slot: `proxima check cppo`, `proxima check my_lab.losses:Topr slope=0.3`. Or
check the files of a run against their checksums: `proxima check runs/mine`.

Prints a line for each law: passed, skipped, or FAILED with the smallest counterexample found, its consequence for a
run, and the cure. If a first law fails (the call raises, or returns another type or NaN), the others are not tried. The
laws are also checked with the settings that a spec names in `test_fields`. Exit code 1 if a law failed, or a file of
the run is damaged; 2 if no law could be tried, as when a judge does not answer.
Slots: surrogate, correction, penalty, aggregate, distillation, advantage, selection, reward, engine."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from proxima.cli.parameters import Argument, print_json
from proxima.data import UserError
from proxima.runtime.state.folder import RunFolder, existing_run
from proxima.view.formatting import visible

if TYPE_CHECKING:
    from proxima.laws.law import LawResult

KIND = "a kind of `proxima list`, or package.module:Class, with its slot before it if need be; or a run folder"
MODEL = (
    "for an engine: the model that it runs. A server needs it. Without it, an engine that holds weights in this "
    "process gets a tiny one, and for any other the laws that need a model are skipped"
)


def check_target(
    kind: Annotated[str, Argument(KIND)],
    override: Annotated[Sequence[str], Argument("fields other than the defaults", "field=value", words="*")] = (),
    *,
    slot: Annotated[str | None, Argument("the slot, where its class does not say it")] = None,
    model: Annotated[str | None, Argument(MODEL)] = None,
    as_json: Annotated[bool, Argument("print every result for programs", flag="--json")] = False,
) -> int:
    """Check a kind against the laws of its slot, or the files of a run. Returns 1 if something is wrong.

    Raises:
        UserError: the slot, kind or field is unknown.
    """
    if kind.endswith(".json"):
        raise UserError(f"{kind} is neither a kind nor a run", remedy="proxima peers verify FILE compares records")
    if ("/" in kind and ":" not in kind) or RunFolder(kind).has_run:
        if override or slot or model:
            raise UserError(f"{kind} is a run, which has no fields to set", remedy="give it alone")
        return check_run(kind, as_json=as_json)
    from proxima.laws.spec_check import check_kind

    checked = check_kind(slot, kind, override, model)
    facts = {"slot": checked.slot, "kind": checked.kind, "fields": asdict(checked.spec)}
    return print_results(f"{checked.slot} {checked.kind}", facts, checked.results, as_json)


def print_results(what: str, facts: dict[str, Any], laws: Iterator["LawResult"], as_json: bool) -> int:
    """Print the results as they arrive, or all of them as JSON; return the exit code.

    Raises:
        UserError: all laws were skipped.
    """
    results = []
    for result in laws:
        results.append(result)
        if not as_json:
            show(result)
    passed = sum(result.status == "passed" for result in results)
    failed = sum(result.status == "FAILED" for result in results)
    if as_json:
        rows = [vars(r) | {"law": r.law.name, "so": r.law.consequence, "cure": r.law.cure} for r in results]
        print_json({**facts, "failed": failed, "results": rows})
    else:
        skipped = len(results) - passed - failed
        print(f"{what}: {passed} passed, {failed} FAILED, {skipped} skipped")
    if not passed and not failed:
        raise UserError(f"{what}: no law could be tried", remedy="see above why each was skipped, then check again")
    return int(failed > 0)


def check_run(folder: str, *, as_json: bool) -> int:
    """Check the files of a run and print a line for each kind of file. Returns 1 if one is damaged."""
    from proxima.runtime.state.folder_check import check_run_files

    findings = check_run_files(existing_run(folder))
    damaged = [finding for finding in findings if finding.status == "damaged"]
    if as_json:
        print_json({"folder": folder, "damaged": len(damaged), "files": [vars(finding) for finding in findings]})
        return int(bool(damaged))
    for finding in findings:
        status = "DAMAGED" if finding.status == "damaged" else finding.status
        line = f"{finding.kind:<17}{status:<12}"
        if finding.detail:
            line += f"  {visible(finding.detail)}"
        if finding.remedy:
            line += f"; {finding.remedy}"
        print(line)
    print(f"{len(damaged)} damaged" if damaged else "no damage")
    return int(bool(damaged))


def show(result: "LawResult") -> None:
    """Print a result: `passed   masked_nan`, `FAILED   scale (kl): …`; for a variant, only a failure."""
    law = result.law
    name = f"{law.name} ({result.variant})" if result.variant else law.name
    if result.status == "FAILED":
        text = f"FAILED   {name}: {result.detail}\n         so {law.consequence}"
        if law.cure and not result.detail.startswith("as "):
            text += f"\n         cure: {law.cure}"
        print(text, flush=True)
    elif not result.variant:
        text = f"{result.status:<8} {name}"
        if result.detail:
            text += f": {result.detail}"
        print(text, flush=True)


COMMAND = check_target
