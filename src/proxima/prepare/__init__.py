"""Data preparation: published question sets into folders that a run trains on and an evaluation asks, with every row
accounted for.

`prepare` is the way of the data: each question once, answers that can be scored, no question of an evaluation set, a
card with counts and hashes. One file a step: `origin` (where the files are) → `rows`, `reader` (what they hold) →
`distinct` (repeats, conflicts, answers that are none) → `overlap` (contamination) → `make` (the split, and the whole
way) → `table`, `card`, `folder` (what is written).
Imports: torch, stdlib, `proxima.data`, `proxima.task`, `proxima.reward`; pyarrow, huggingface_hub and datasets when
files are opened.
Imported by `cli`.
To add one: (1) a line in `SOURCES`, and its folder in `proxima.task.prepared.PREPARED`; (2) a reader in `READERS` if
its columns have a new form, a kind in `ANSWERS` if its answers have; (3) real rows, right and broken, in
`tests/prepare`. Stable: `prepare`, `Options`, `SOURCES`, the columns of the tables and the keys of the card. Private:
`distinct`, `folder`.
"""

from proxima.prepare.catalog import SOURCES, Hub, Part
from proxima.prepare.dataset_card import check_folder, read_card
from proxima.prepare.decontaminate import EvalSet, Overlap
from proxima.prepare.eval_sets import beside, eval_set
from proxima.prepare.locate import Origin, find_origin
from proxima.prepare.pipeline import HELD_OUT, Options, Prepared, prepare
from proxima.prepare.prompt_template import TEMPLATES, Template, template_of

__all__ = [
    "HELD_OUT",
    "SOURCES",
    "TEMPLATES",
    "EvalSet",
    "Hub",
    "Options",
    "Origin",
    "Overlap",
    "Part",
    "Prepared",
    "Template",
    "beside",
    "check_folder",
    "eval_set",
    "find_origin",
    "prepare",
    "read_card",
    "template_of",
]
