"""Pairs of log-probs, for the tests of preference losses."""

from typing import Any

import torch

from proxima.core import PreferencePairs


def pairs(chosen: Any, rejected: Any, **more: Any) -> PreferencePairs:
    chosen, rejected = (x if torch.is_tensor(x) else torch.tensor(x).double() for x in (chosen, rejected))
    zero, length = torch.zeros_like(chosen), torch.ones(len(chosen), dtype=torch.long)
    fields = {"reference_chosen": zero, "reference_rejected": zero, "chosen_length": length, "rejected_length": length}
    return PreferencePairs(chosen=chosen, rejected=rejected, **{**fields, **more})
