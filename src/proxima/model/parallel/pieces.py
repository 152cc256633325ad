"""Locates each weight of a model in its files, including those that transformers stacks from a tensor per expert."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proxima.model.parallel.sharded import fill_weight, local_part


@dataclass(frozen=True)
class FilePiece:
    """A tensor of a file: a whole weight, or with `place` = (i, j, n) part j of n equal parts of the rows of expert i
    in a weight [experts, rows, …]."""

    name: str
    file: Path
    place: tuple[int, int, int] | None = None

    def among(self, whole: Tensor) -> int:
        """The number of pieces of a weight."""
        return 1 if self.place is None else self.place[2] * len(whole)

    def fits(self, whole: Tensor, shape: list[int]) -> bool:
        """True if a tensor of this shape can be this piece of a weight."""
        if self.place is None:
            return shape == list(whole.shape)
        expert, _, parts = self.place
        return expert < len(whole) and [parts * shape[0], *shape[1:]] == list(whole.shape[1:])

    def fill(self, weight: Tensor, piece: Any) -> None:
        """Copy `piece`, a tensor or a slice of a safetensors file, to its place in a weight, plain or sharded."""
        if self.place is None:
            return fill_weight(weight, piece)
        local, offset = local_part(weight)
        expert, part, parts = self.place
        height = weight.shape[1] // parts
        above, row = part * height, expert - offset[0]
        start, stop = max(offset[1], above), min(offset[1] + local.shape[1], above + height)
        if 0 <= row < len(local) and start < stop and local.numel():
            rest = tuple(slice(at, at + size) for at, size in zip(offset[2:], local.shape[2:], strict=True))
            with torch.no_grad():
                local[row, start - offset[1] : stop - offset[1]].copy_(piece[slice(start - above, stop - above), *rest])
        return None


def pieces_of_weights(model: Any, files: Mapping[str, Path]) -> dict[str, list[FilePiece]]:
    """The pieces of each weight by its name. Where transformers would stack some, the conversions between the model's
    names and those in files are stored on the model, as by `from_pretrained`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    pieces = {name: [FilePiece(name, file)] for name, file in files.items()}
    mapping = get_model_conversion_mapping(model)
    stacking = [entry for entry in mapping if isinstance(entry, WeightConverter) and _stacks(entry)]
    if not stacking:
        return pieces
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    patterns = {pattern: entry.source_patterns for entry in stacking for pattern in entry.source_patterns}
    stacked = dict[str, dict[str, list[str]]]()
    for name in sorted(files, key=dot_natural_key):
        weight, pattern = rename_source_key(name, renamings, stacking)
        if pattern is not None:
            stacked.setdefault(weight, {name: [] for name in patterns[pattern]})[pattern].append(name)
        elif weight not in pieces:
            pieces[weight] = [FilePiece(name, files[name])]
    for weight, parts in stacked.items():
        pieces[weight] = list(_placed(parts, files))
    if used := [entry for entry in mapping if entry.was_used()]:
        model._weight_conversions = used
    return pieces


def _placed(parts: Mapping[str, list[str]], files: Mapping[str, Path]) -> Iterator[FilePiece]:
    for part, names in enumerate(parts.values()):
        yield from (FilePiece(name, files[name], (expert, part, len(parts))) for expert, name in enumerate(names))


def _stacks(entry: Any) -> bool:
    """True if a conversion stacks the experts' matrices and then at most joins them by rows."""
    operations = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in entry.operations]
    return operations in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
