"""Conformance: the laws that every spec of a slot must obey, for our tests and for `proxima check`.

    laws          what a law is, and the search for the smallest counterexample
    batches       random batches with holes and garbage          needs_law    what a spec declares and what it reads
    first_laws    a call returns what its slot takes: where that fails, no other law is tried
    by_hand, by_hand_steps   examples with numbers worked out by hand: the parts of a loss, and the steps before it
    by_hand_records    files of such examples
    surrogate_laws     surrogates                        term_laws    corrections, penalties, aggregations
    outcome_laws  advantages, selections             distillation_laws    divergences from a teacher
    reward_laws   rewards                                         engine_laws    engines; sampling_laws: what they draw
    server_laws   servers of engines, each asked by itself        engine_case    what both are checked on
    enumerable_world  a world so small that expectations are sums: the bias of a loss as a number

A spec declares what its method breaks on purpose (`exempt_laws`, which are run all the same: an exemption that no
setting needs is a failure), and settings that switch on branches (`test_fields`);
see `proxima.core.spec.Spec`. Cases are drawn from fixed seeds: a result can be repeated.
Imports: `proxima.data`, `core`, `engine`, `reward`, `model`, `config`, torch. Imported by `cli`, the tests and
`proxima_peers`.
To add a law: a function `(spec, case)` that raises `Violation`, and a line in the tuple of its slot.
"""

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proxima.check.bare_server import BareServer, NoTokenizer
from proxima.check.by_hand import require_example
from proxima.check.distillation_laws import DISTILLATION_LAWS
from proxima.check.engine_case import EngineUnderTest, tiny_model
from proxima.check.engine_laws import ENGINE_LAWS
from proxima.check.enumerable_world import EnumerableWorld, ImprovementBound
from proxima.check.laws import (
    Law,
    LawResult,
    Violation,
    check_exemption,
    check_law,
    check_laws,
    described,
    not_tried,
    require_that,
)
from proxima.check.outcome_laws import GROUP_ADVANTAGE_LAWS, SELECTION_LAWS, TOKEN_ADVANTAGE_LAWS
from proxima.check.reward_laws import REWARD_LAWS
from proxima.check.sampling_laws import SAMPLING_LAWS
from proxima.check.server_laws import CONTROL_LAWS, SERVER_LAWS, ServerUnderTest
from proxima.check.surrogate_laws import SURROGATE_LAWS
from proxima.check.term_laws import AGGREGATE_LAWS, CORRECTION_LAWS, PENALTY_LAWS
from proxima.core.advantage import Advantage
from proxima.core.distillation import Distillation
from proxima.core.loss import Aggregate, Correction, Penalty, Surrogate
from proxima.core.selection import Selection
from proxima.engine.protocol import EngineSetup
from proxima.model.load import load, load_tokenizer
from proxima.reward.base import as_reward

PROTOCOLS: dict[str, type] = {
    "surrogate": Surrogate,
    "correction": Correction,
    "penalty": Penalty,
    "aggregate": Aggregate,
    "distillation": Distillation,
    "advantage": Advantage,
    "selection": Selection,
}
LAWS: dict[str, tuple[Law, ...]] = {
    "surrogate": SURROGATE_LAWS,
    "correction": CORRECTION_LAWS,
    "penalty": PENALTY_LAWS,
    "aggregate": AGGREGATE_LAWS,
    "distillation": DISTILLATION_LAWS,
    "selection": SELECTION_LAWS,
}


def laws_of(slot: str, spec: Any) -> tuple[Law, ...]:
    """The laws of a slot; an advantage has those of its kind."""
    if slot == "advantage":
        return TOKEN_ADVANTAGE_LAWS if spec.per_token else GROUP_ADVANTAGE_LAWS
    return LAWS[slot]


def variants_of(spec: Any) -> dict[str, Any]:
    """The spec itself under the name "", and one spec for each of its `test_fields`."""
    return {"": spec} | {name: dataclasses.replace(spec, **fields) for name, fields in spec.test_fields.items()}


def check_spec(slot: str, spec: Any) -> Iterator[LawResult]:
    """Check every law of the slot on a spec of `core` and its `test_fields`, and the examples that it holds."""
    yield (declaration := check_law(DECLARATION, (slot, spec)))
    if declaration.fails_all:
        yield not_tried((), DECLARATION)
        return
    exempt: dict[str, tuple[Law, list[Any]]] = {}
    for name, variant in variants_of(spec).items():
        laws = [law for law in laws_of(slot, variant) if not (name and law.defaults_only)]
        for law in laws:
            if law.name in variant.exempt_laws:
                exempt.setdefault(law.name, (law, []))[1].append(variant)
        results = []
        for result in check_laws([law for law in laws if law.name not in variant.exempt_laws], variant):
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


def check_reward(spec: Any) -> Iterator[LawResult]:
    """Check the laws of rewards; all are skipped where something that the reward needs is missing."""
    try:
        as_reward(spec).check()
    except ValueError as error:
        yield from (LawResult(law, "skipped", str(error)) for law in REWARD_LAWS)
        return
    except Exception as error:  # a stranger's code may raise anything
        yield LawResult(CHECKED, "FAILED", described(error))
        yield not_tried(REWARD_LAWS, CHECKED)
        return
    yield from check_laws(REWARD_LAWS, spec)


def check_engine(spec: Any, model: str | None = None) -> Iterator[LawResult]:
    """Check the laws of engines on a model, a tiny one made on the fly where no path is given."""
    holds = bool(getattr(type(spec), "needs_weights", False))
    loaded = functools.cache(tiny_model if model is None else functools.partial(load, model))
    if holds or model is None:
        setup = EngineSetup.of(loaded())
    else:
        setup = EngineSetup(model_path=model, tokenizer=load_tokenizer(model), load_weights=loaded)
    # An engine that holds no weights here and was given no model may answer anything: it is compared with nothing.
    compared = loaded if holds or model is not None else None
    yield from check_laws(ENGINE_LAWS, EngineUnderTest(spec, setup, compared, dtype=getattr(spec, "dtype", None)))


OF_BARE_SERVERS = {"columns", "log_probs", "determinism", *(law.name for law in SAMPLING_LAWS)}


def check_live_server(
    server: BareServer, model: str | None = None, *, control: bool = False, draws: int = 3000
) -> Iterator[LawResult]:
    """Check the laws of servers on one that answers.

    Args:
        model: folder with the weights that it should have; None: what needs them is skipped.
        control: pause it and load the weights of `model` too.
        draws: tokens that are drawn to compare their frequencies.
    """
    loaded = None if model is None else functools.cache(functools.partial(load, model))
    tokenizer = None if model is None else load_tokenizer(model)
    of_server = ServerUnderTest(server, tokenizer, None if model is None else Path(model))
    setup = EngineSetup(
        model_path=server.facts.model,
        tokenizer=tokenizer or NoTokenizer(),
        load_weights=loaded or tiny_model,
        max_length=server.facts.max_length,
    )
    quantized = server.facts.quantization is not None
    case = EngineUnderTest(server, setup, loaded, dtype=server.facts.dtype, quantized=quantized, draws=draws)
    for law in SERVER_LAWS:
        yield check_law(law, of_server)
    for law in ENGINE_LAWS:
        if law.name in OF_BARE_SERVERS:
            yield check_law(law, case)
    for law in CONTROL_LAWS:
        yield check_law(law, of_server) if control else LawResult(law, "skipped", "it disturbs others: give --control")


def _declared(slotted: tuple[str, Any], _: None) -> None:
    slot, spec = slotted
    if slot == "advantage":
        kinds = "subclass proxima.core.advantage.GroupAdvantage (a number a completion) or TokenAdvantage (one a token)"
        require_that(hasattr(spec, "per_token"), f"per_token is missing: {kinds}")
    parameters = getattr(type(spec), "__dataclass_params__", None)
    require_that(parameters is not None and parameters.frozen, "decorate the class with @dataclass(frozen=True)")
    for name, fields in spec.test_fields.items():
        try:
            dataclasses.replace(spec, **fields)
        except (TypeError, ValueError) as error:
            raise Violation(f"test_fields {name!r}: {error}") from None
    for name, variant in variants_of(spec).items():
        allowed = {law.name for law in laws_of(slot, variant) if law.exemptible}
        unknown = sorted(variant.exempt_laws - allowed)
        names = ", ".join(sorted(allowed)) or "no law"
        require_that(not unknown, f"{name}exempt_laws: {', '.join(unknown)}: a {slot} can be exempt from {names}")


DECLARATION = Law(
    *("declared", "recipes can't name its fields", _declared),
    cure="write the class like the example in CONTRIBUTING.md: a frozen dataclass that subclasses the slot's protocol",
    root=True,
)
CHECKED = Law("check", "a run ends before it begins", lambda spec, case: None, root=True)
CHECKED = dataclasses.replace(CHECKED, cure="raise from check() a UserError alone, with a line for the user")
__all__ = [
    "PROTOCOLS", "EnumerableWorld", "ImprovementBound", "Law", "LawResult", "Violation", "check_engine", "check_law",
    "check_reward", "check_spec", "laws_of", "variants_of",
]  # fmt: skip
