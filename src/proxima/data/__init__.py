"""Data: what flows through a run. Host side: `Prompt`, `Completion`, `Score`, `Group`, `Trajectory`;
tensors: `Outcomes`, `PackedBatch`, `PolicyBatch`.

Host objects are frozen and hold plain Python values, so that they can be written, sent and compared. Tensor objects check the shape
and dtype of each field at construction and name the field that is wrong; nothing in the house is padded.
Imports: torch, stdlib. Imported by every other room.
To add a field: give it a default of None, an annotation "dtype axes" and a line in the class docstring; validation follows from those.
"""

from proxima.data.check import check_fields, require
from proxima.data.flow import Completion, FinishReason, Group, Message, Prompt, Score
from proxima.data.outcomes import Outcomes
from proxima.data.packed_batch import PackedBatch, pack
from proxima.data.policy_batch import PolicyBatch
from proxima.data.trajectory import Trajectory

__all__ = [
    "Completion",
    "FinishReason",
    "Group",
    "Message",
    "Outcomes",
    "PackedBatch",
    "PolicyBatch",
    "Prompt",
    "Score",
    "Trajectory",
    "check_fields",
    "pack",
    "require",
]
