"""Data: the objects that flow through a run.

    flow           Prompt, Completion, Score, Group: host side, as the engine and the rewards see them
    trajectory     one completion on its way to the trainer; pairs of them, one preferred; labeled ones
    columns        the numpy columns that these hold, one value per token
    episode        the messages of an episode as spans of its tokens
    sampling_mask  the ragged column: the tokens that could be sampled
    routed_experts the experts of a mixture that each token was sent to
    outcomes       tensors, one entry per completion: the input of advantages and selections
    packed_batch   tensors, the input of the model               policy_batch   tensors, the input of the loss
    transfer       asynchronous copies between host and device   field_checks   checks at construction
    image_tokens   images among token ids                        json_reader    JSON from files and strangers
    errors         UserError, FieldError; what the user may have meant
    random         all random draws
    kinds          tables of kinds, and the annotation of fields that hold one

Host objects are frozen dataclasses of numpy columns. Tensor objects check the shape and dtype of each field at
construction. Nothing is padded. Classes are imported on first use, so that torch and numpy load only when needed.
Imports: torch, numpy, stdlib. Imported by every other room.
To add a field: give it a default of None, an annotation (`Floats`, or "dtype axes" of a tensor) and a line in the
class docstring; conversion and checks follow from those, and `pack` passes on columns that trajectory and batch share.
"""

from proxima.data.errors import (
    FieldError,
    FieldErrors,
    NoFieldError,
    NotFiniteError,
    OverLengthError,
    UserError,
    renamed,
    require,
    require_threads,
    within,
)

__all__ = [
    "FieldError",
    "FieldErrors",
    "NoFieldError",
    "NotFiniteError",
    "OverLengthError",
    "UserError",
    "renamed",
    "require",
    "require_threads",
    "within",
]
