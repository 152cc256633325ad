"""Checks a kind against every law of its slot, and a spec of `core` also against its own examples; rewards and engines,
servers among them."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from proxima.config.describe import class_at, fields_of, table_of
from proxima.config.resolution import spec_from_words
from proxima.config.schema import CheckConfig
from proxima.core.advantage.protocol import Advantage
from proxima.core.distillation import Distillation
from proxima.core.loss import Aggregate, Correction, Penalty, Surrogate
from proxima.core.selection.protocol import Selection
from proxima.core.spec import names_in
from proxima.data import UserError
from proxima.data.errors import nearest
from proxima.laws.by_hand import require_example
from proxima.laws.engine_laws import check_engine
from proxima.laws.law import Law, LawResult, Violation, check_exemption, check_law, check_laws, not_tried, require_that
from proxima.laws.outcome_laws import GROUP_ADVANTAGE_LAWS, SELECTION_LAWS, TOKEN_ADVANTAGE_LAWS
from proxima.laws.reward_laws import check_reward
from proxima.laws.surrogate_laws import SURROGATE_LAWS
from proxima.laws.term_laws import AGGREGATE_LAWS, CORRECTION_LAWS, DISTILLATION_LAWS, PENALTY_LAWS

#: the protocol of each slot, and its laws; those of an advantage a number a completion, see `laws_of`
SLOTS: dict[str, tuple[type, tuple[Law, ...]]] = {
    "surrogate": (Surrogate, SURROGATE_LAWS),
    "correction": (Correction, CORRECTION_LAWS),
    "penalty": (Penalty, PENALTY_LAWS),
    "aggregate": (Aggregate, AGGREGATE_LAWS),
    "distillation": (Distillation, DISTILLATION_LAWS),
    "advantage": (Advantage, GROUP_ADVANTAGE_LAWS),
    "selection": (Selection, SELECTION_LAWS),
}


def laws_of(slot: str, spec: Any) -> tuple[Law, ...]:
    """The laws of a slot; for an advantage, those of its kind (per token or per group)."""
    if slot == "advantage" and spec.per_token:
        return TOKEN_ADVANTAGE_LAWS
    return SLOTS[slot][1]


def variants_of(spec: Any) -> dict[str, Any]:
    """The spec itself under the name "", and one spec for each of its `test_fields`."""
    return {"": spec} | {name: dataclasses.replace(spec, **fields) for name, fields in spec.test_fields.items()}


@dataclasses.dataclass(frozen=True)
class KindCheck:
    """A kind of a slot with its fields, and the results of its laws, which are checked as they are read."""

    slot: str
    kind: str
    spec: Any
    results: Iterator[LawResult]


def check_kind(slot: str | None, kind: str, fields: Sequence[str], model: str | None) -> KindCheck:
    """Check the laws of a kind.

    Args:
        slot: None: found by the kind; `surrogate cppo` may also be given as kind and first field.
        fields: `field=value` texts.
        model: the model that an engine runs, see `check_engine`.

    Raises:
        UserError: the slot, kind or field is unknown.
    """
    if kind in {info.name for info in fields_of(CheckConfig)} and fields and "=" not in fields[0]:
        slot = kind
        kind = fields[0]
        fields = fields[1:]
    slot = slot or slot_of_kind(kind)
    spec = spec_from_words(slot, kind, fields)
    if slot == "reward":
        return KindCheck(slot, kind, spec, check_reward(spec))
    if slot == "engine":
        return KindCheck(slot, kind, spec, check_engine(spec, model))
    return KindCheck(slot, kind, spec, check_spec(slot, spec))


def check_spec(slot: str, spec: Any) -> Iterator[LawResult]:
    """Check every law of the slot on a spec of `core` and its `test_fields`, and its examples."""
    declaration = check_law(DECLARATION, (slot, spec))
    yield declaration
    if declaration.fails_all:
        yield not_tried((), DECLARATION)
        return
    exempt: dict[str, tuple[Law, list[Any]]] = {}
    for name, variant in variants_of(spec).items():
        laws = [law for law in laws_of(slot, variant) if not (name and law.defaults_only)]
        for law in laws:
            if law.name in exempt_of(variant):
                exempt.setdefault(law.name, (law, []))[1].append(variant)
        results = []
        for result in check_laws([law for law in laws if law.name not in exempt_of(variant)], variant):
            results.append(result)
            yield dataclasses.replace(result, variant=name)
        if any(result.fails_all for result in results):
            return
    for law, variants in exempt.values():
        yield check_exemption(law, variants)
    if spec.examples:
        check = lambda spec, example: require_example(slot, spec, example)  # noqa: E731
        show = lambda example: f"inputs {example['inputs']}"  # noqa: E731
        yield check_law(Law("by_hand", "the code is not the formula", check, lambda: spec.examples, show=show), spec)


def _declared(slotted: tuple[str, Any], _: None) -> None:
    slot, spec = slotted
    if slot == "advantage":
        kinds = "subclass proxima.core.GroupAdvantage (a number a completion) or TokenAdvantage (one a token)"
        require_that(hasattr(spec, "per_token"), f"per_token is missing: {kinds}")
    parameters = getattr(type(spec), "__dataclass_params__", None)
    require_that(parameters is not None and parameters.frozen, "decorate the class with @dataclass(frozen=True)")
    _check_containers(spec)
    for name, fields in spec.test_fields.items():
        try:
            dataclasses.replace(spec, **fields)
        except (TypeError, ValueError) as error:
            raise Violation(f"test_fields {name!r}: {error}") from None
    for name, variant in variants_of(spec).items():
        allowed = {law.name for law in laws_of(slot, variant) if law.exemptible}
        unknown = sorted(exempt_of(variant) - allowed)
        names = ", ".join(sorted(allowed)) or "no law"
        require_that(not unknown, f"{name}exempt_laws: {', '.join(unknown)}: a {slot} can be exempt from {names}")


def exempt_of(spec: Any) -> frozenset[str]:
    """The laws that a spec is exempt from; a property may return any collection."""
    return names_in("exempt_laws", spec.exempt_laws)


def _check_containers(spec: Any) -> None:
    fields = spec.test_fields
    examples = spec.examples
    named = isinstance(fields, Mapping) and all(isinstance(values, Mapping) for values in fields.values())
    require_that(named, f"test_fields={fields!r} must map names to fields, as {{'wide': {{'epsilon': 0.4}}}} does")
    listed = isinstance(examples, Sequence) and not isinstance(examples, str)
    listed = listed and all(isinstance(each, Mapping) and {"inputs", "expected"} <= {*each} for each in examples)
    require_that(listed, "examples must be a tuple of mappings, each with `inputs` and `expected`")


DECLARATION = Law(
    *("declared", "recipes can't name its fields", _declared),
    cure="write the class like the example in CONTRIBUTING.md: a frozen dataclass that subclasses the slot's protocol",
    root=True,
)


def slot_of_kind(kind: str) -> str:
    """The slot whose table has the kind, or whose protocol a class subclasses."""
    tables = {info.name: table_of(info.slot.table) for info in fields_of(CheckConfig) if info.slot}
    if ":" not in kind:
        slots = [slot for slot, table in tables.items() if kind in table]
        if len(slots) == 1:
            return slots[0]
        if slots:
            raise UserError(f"{kind!r} is a kind of {' and '.join(slots)}", remedy="add --slot")
        near = nearest(kind, list(chain.from_iterable(tables.values())))
        remedy = "give a kind of `proxima list`, package.module:Class, or a run folder"
        if near:
            remedy = f"did you mean {near!r}?"
        raise UserError(f"{kind!r} is neither a kind nor a run", remedy=remedy)
    try:
        cls = class_at(kind)
    except Exception as error:  # importing runs arbitrary code
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{kind} can't be imported: {message}", remedy="write package.module:Class") from None
    return slot_of_class(cls, kind)


def slot_of_class(cls: type, kind: str) -> str:
    """The slot of a class outside the tables."""
    for slot, (protocol, _) in SLOTS.items():
        if protocol in cls.__mro__:
            return slot
    for method, slot in (("score", "reward"), ("build", "engine")):
        if callable(getattr(cls, method, None)):
            return slot
    names = ", ".join(f"{protocol.__module__}.{protocol.__name__}" for protocol, _ in SLOTS.values())
    raise UserError(f"{kind} subclasses no protocol of a slot", remedy=f"subclass one of {names}, or add --slot")
