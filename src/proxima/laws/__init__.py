"""The laws that every spec of a slot must satisfy, for our tests and for `proxima check`.

    spec_check    every law of a spec; `SLOTS`, the table of laws by slot
    law           the class of laws, and the search for the smallest counterexample
    batches       random batches with holes and garbage
    first_laws    a call returns what its slot expects (if that fails, no other law is tried) and reads what it declares
    by_hand       examples with numbers worked out by hand
    surrogate_laws  surrogates                      term_laws     corrections, penalties, aggregations, distillation
    outcome_laws    advantages, selections          reward_laws   rewards
    engine_laws     engines; sampling_laws: their draws
    engine_case   the engine and model under test

A spec declares the laws that its method breaks on purpose (`exempt_laws`, which are run anyway: an exemption that no
setting needs is a failure), and settings that switch on branches (`test_fields`); see `proxima.core.spec.Spec`. Cases
are drawn from fixed seeds, so that results are reproducible.
Imports: `proxima.data`, `core`, `engine`, `reward`, `model`, `config`, torch. Imported by `cli`, the tests and
`proxima_peers`.
To add a law: a function `(spec, case)` that raises `Violation`, and a line in the tuple of its slot, with `*BATCHES`,
`*OUTCOMES` or `*TEXTS` for its cases. A new slot also needs a line in `SLOTS`.
"""
