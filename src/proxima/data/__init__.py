"""Data: what flows through a run, and what every room shares.

    flow           Prompt, Completion, Score, Group: host side, as the engine and the rewards see them
    trajectory     one completion on its way to the trainer
    outcomes       tensors, one row a completion: what advantages and selections look at
    packed_batch   tensors, what the model is fed                policy_batch   tensors, what the loss reads
    errors         UserError, FieldError                         random         every random draw, by counter
    jsonl          JSON lines that survive a kill                atomic_files   files that appear whole or not at all

Host objects are frozen, so that they can be written, sent and compared. Tensor objects check the shape and dtype of
each field at construction and name the field that is wrong; nothing in the house is padded.
The tensor classes are imported on first use, so that a command that needs no torch does not load it.
Imports: torch, numpy, stdlib. Imported by every other room.
To add a field: give it a default of None, an annotation "dtype axes" and a line in the class docstring; validation
follows from those.
"""

import importlib
from typing import TYPE_CHECKING, Any

from proxima.data.errors import FieldError, UserError, require, within
from proxima.data.flow import Completion, FinishReason, Group, Message, Prompt, Score

if TYPE_CHECKING:
    from proxima.data.check import check_choices, check_fields
    from proxima.data.outcomes import Outcomes
    from proxima.data.packed_batch import PackedBatch, pack
    from proxima.data.policy_batch import PolicyBatch
    from proxima.data.trajectory import Trajectory

_TENSOR_MODULES = {
    "Outcomes": "outcomes",
    "PackedBatch": "packed_batch",
    "PolicyBatch": "policy_batch",
    "Trajectory": "trajectory",
    "check_choices": "check",
    "check_fields": "check",
    "pack": "packed_batch",
}


def __getattr__(name: str) -> Any:
    if name not in _TENSOR_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_TENSOR_MODULES[name]}"), name)


__all__ = [
    "Completion",
    "FieldError",
    "FinishReason",
    "Group",
    "Message",
    "Outcomes",
    "PackedBatch",
    "PolicyBatch",
    "Prompt",
    "Score",
    "Trajectory",
    "UserError",
    "check_choices",
    "check_fields",
    "pack",
    "require",
    "within",
]
