"""Selections: the choice of completions for the update. Each spec sees only what the specs before it kept.

    protocol    `Selection`, and `select`, which applies several
    dropping    whole groups and truncated completions: drop_uniform_groups, drop_truncated; all but a part of a group:
                prune, balance, best_and_worst

A selection is a frozen dataclass that subclasses `Selection`, with `__call__(Outcomes, advantage) -> [S] bool`.
Imports: torch, stdlib, `proxima.data`, the rest of `proxima.core`. Imported by `training` and the rooms above.
To add one: (1) a dataclass; (2) a line in `SELECTIONS`; (3) a golden file in `tests/golden`. The conformance tests find
it in the table. Out of tree: `{kind: my_lab.selections:Hardest}`.
"""

from proxima.data.kinds import Kinds

SELECTIONS = Kinds(
    {
        "balance": "proxima.core.selection.dropping:Balance",
        "best_and_worst": "proxima.core.selection.dropping:BestAndWorst",
        "drop_truncated": "proxima.core.selection.dropping:DropTruncated",
        "drop_uniform_groups": "proxima.core.selection.dropping:DropUniformGroups",
        "prune": "proxima.core.selection.dropping:Prune",
    }
)
