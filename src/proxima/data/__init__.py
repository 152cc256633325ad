"""Data: the objects that flow through a run.

    flow           Prompt, Completion, Score, Group: host side, as the engine and the rewards see them
    trajectory     one completion on its way to the trainer; pairs of them, one preferred; labeled ones
    columns        the columns of a token, declared once: dtype, axes, who fills them, whether they are stored; and
                   `SamplingMask`, the ragged one
    episode        the messages of an episode as spans of its tokens
    pending        groups and prompts held for later steps; what a group says of its question
    players        the roles of an episode, and what each of its players contributed
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
To add a column of a token: a line in `columns`, and a field in the classes that carry it, None by default. Packing,
cutting, checks, Parquet, the viewer and the docs follow.
"""

from proxima.data.errors import (
    FieldError,
    FieldErrors,
    MissingDataError,
    MissingFileError,
    NoFieldError,
    NotFiniteError,
    OverLengthError,
    UserError,
    as_field_errors,
    renamed,
    require,
    require_threads,
    within,
)

__all__ = [
    "FieldError",
    "FieldErrors",
    "MissingDataError",
    "MissingFileError",
    "NoFieldError",
    "NotFiniteError",
    "OverLengthError",
    "UserError",
    "as_field_errors",
    "renamed",
    "require",
    "require_threads",
    "within",
]
