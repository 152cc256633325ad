"""Check a kind against the laws of its slot: `proxima check cppo`, `proxima check my_lab.losses:Topr slope=0.3`. Or
check the files of a run against their checksums: `proxima check runs/mine`.

Prints a line for each law: passed, skipped, or FAILED with the smallest counterexample found, its consequence for a
run, and the cure. If a first law fails (the call raises, or returns another type or NaN), the others are not tried. The
laws are also checked with the settings that a spec names in `test_fields`. Exit code 1 if a law failed, or a file of
the run is damaged.
Slots: surrogate, correction, penalty, aggregate, distillation, advantage, selection, reward, engine."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from proxima.cli.output import print_json
from proxima.cli.parameters import Argument
from proxima.data import UserError
from proxima.data.kinds import Slot
from proxima.runtime.state.folder import RunFolder, existing_run

if TYPE_CHECKING:
    from proxima.laws.law import LawResult


@dataclass(frozen=True)
class CheckConfig:
    """The slots whose kinds have laws, one spec each."""

    surrogate: Annotated[Any, Slot("proxima.core.surrogate:SURROGATES")] = None
    correction: Annotated[Any, Slot("proxima.core.correction:CORRECTIONS")] = None
    penalty: Annotated[Any, Slot("proxima.core:PENALTIES")] = None
    aggregate: Annotated[Any, Slot("proxima.core:AGGREGATES")] = None
    distillation: Annotated[Any, Slot("proxima.core:DISTILLATIONS")] = None
    advantage: Annotated[Any, Slot("proxima.core.advantage:ADVANTAGES")] = None
    selection: Annotated[Any, Slot("proxima.core:SELECTIONS")] = None
    reward: Annotated[Any, Slot("proxima.reward:REWARDS", many=True)] = ()
    engine: Annotated[Any, Slot("proxima.engine:ENGINES")] = None


KIND = "a kind of `proxima list`, or package.module:Class, with its slot before it if need be; or a run folder"
MODEL = (
    "of an engine: the model that it runs. Without it, an engine that holds weights in this process gets a tiny one; "
    "a server needs it; any other is compared with none, so laws that need one are skipped"
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
    if kind in CheckConfig.__dataclass_fields__ and override and "=" not in override[0]:
        slot, kind, override = kind, override[0], override[1:]  # `check surrogate cppo`
    slot = slot or slot_of_kind(kind)
    spec = spec_from_words(slot, kind, override)
    facts = {"slot": slot, "kind": kind, "fields": asdict(spec)}
    return print_results(f"{slot} {kind}", facts, results_of(slot, spec, model), as_json)


def print_results(what: str, facts: dict[str, Any], laws: Iterator["LawResult"], as_json: bool) -> int:
    """Print the results as they arrive, or all of them as JSON; return the exit code."""
    results = []
    for result in laws:
        results.append(result)
        if not as_json:
            show(result)
    failed = sum(result.status == "FAILED" for result in results)
    if as_json:
        rows = [vars(r) | {"law": r.law.name, "so": r.law.consequence, "cure": r.law.cure} for r in results]
        print_json({**facts, "failed": failed, "results": rows})
    else:
        passed = sum(result.status == "passed" for result in results)
        skipped = len(results) - passed - failed
        print(f"{what}: {passed} passed, {failed} FAILED, {skipped} skipped")
    return int(failed > 0)


def check_run(folder: str, *, as_json: bool) -> int:
    """Check the files of a run and print a line for each kind of file. Returns 1 if one is damaged."""
    from proxima.runtime.state.folder_check import check_run_files
    from proxima.view.formatting import visible

    findings = check_run_files(existing_run(folder))
    damaged = [finding for finding in findings if finding.status == "damaged"]
    if as_json:
        print_json({"folder": folder, "damaged": len(damaged), "files": [vars(finding) for finding in findings]})
        return int(bool(damaged))
    for finding in findings:
        detail = f"  {visible(finding.detail)}" if finding.detail else ""
        status = "DAMAGED" if finding.status == "damaged" else finding.status
        print(f"{finding.kind:<17}{status:<12}{detail}" + (f"; {finding.remedy}" if finding.remedy else ""))
    print(f"{len(damaged)} damaged" if damaged else "no damage")
    return int(bool(damaged))


def spec_from_words(slot: str, kind: str, fields: Sequence[str]) -> Any:
    """Build the spec of a kind from `field=value` texts.

    Raises: ConfigError for an unknown slot, kind or field, or a value that the field can't take.
    """
    from proxima.config.resolution import resolve

    path = "reward.0" if slot == "reward" else slot
    words = [f"{path}.{text}" for text in (f"kind={kind}", *fields)]
    specs = getattr(resolve({}, words, root=CheckConfig).config, slot)
    return specs[0] if slot == "reward" else specs


def show(result: "LawResult") -> None:
    """Print a result: `passed   masked_nan`, `FAILED   scale (kl): …`; for a variant, only a failure."""
    name = f"{result.law.name} ({result.variant})" if result.variant else result.law.name
    if result.status == "FAILED":
        cure = f"\n         cure: {result.law.cure}" if result.law.cure and not result.detail.startswith("as ") else ""
        print(f"FAILED   {name}: {result.detail}\n         so {result.law.consequence}{cure}", flush=True)
    elif not result.variant:
        print(f"{result.status:<8} {name}" + (f": {result.detail}" if result.detail else ""), flush=True)


def results_of(slot: str, spec: Any, model: str | None) -> Iterator["LawResult"]:
    """Check the laws of a spec and yield the results."""
    from proxima.laws.engine_laws import check_engine
    from proxima.laws.reward_laws import check_reward
    from proxima.laws.spec_check import check_spec

    if slot == "reward":
        return check_reward(spec)
    if slot == "engine":
        return check_engine(spec, model)
    return check_spec(slot, spec)


def slot_of_kind(kind: str) -> str:
    """The slot whose table has the kind, or whose protocol a class subclasses."""
    from proxima.config.describe import class_at, fields_of, table_of
    from proxima.data.errors import nearest

    tables = {info.name: table_of(info.slot.table) for info in fields_of(CheckConfig) if info.slot}
    if ":" not in kind:
        slots = [slot for slot, table in tables.items() if kind in table]
        if len(slots) == 1:
            return slots[0]
        if slots:
            raise UserError(f"{kind!r} is a kind of {' and '.join(slots)}", remedy="add --slot")
        kinds = [name for table in tables.values() for name in table]
        near, known = nearest(kind, kinds), "give a kind of `proxima list`, package.module:Class, or a run folder"
        raise UserError(f"{kind!r} is neither a kind nor a run", remedy=f"did you mean {near!r}?" if near else known)
    try:
        cls = class_at(kind)
    except Exception as error:  # importing runs arbitrary code
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{kind} can't be imported: {message}", remedy="write package.module:Class") from None
    return slot_of_class(cls, kind)


def slot_of_class(cls: type, kind: str) -> str:
    """The slot of a class outside the tables."""
    from proxima.laws.spec_check import SLOTS

    for slot, (protocol, _) in SLOTS.items():
        if protocol in cls.__mro__:
            return slot
    for method, slot in (("score", "reward"), ("build", "engine")):
        if callable(getattr(cls, method, None)):
            return slot
    names = ", ".join(f"{protocol.__module__}.{protocol.__name__}" for protocol, _ in SLOTS.values())
    raise UserError(f"{kind} subclasses no protocol of a slot", remedy=f"subclass one of {names}, or add --slot")


COMMAND = check_target
