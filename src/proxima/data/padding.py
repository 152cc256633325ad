"""Packs right-padded sequences, as other frameworks hold them."""

import torch
from torch import Tensor

from proxima.data.field_checks import check_shape, tensor_hints
from proxima.data.field_names import check_names


def without_padding(cls: type, mask: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The fields of a `PolicyBatch` (`cls`) from padded ones; arguments and errors as those of its `from_padded`."""
    check_names(cls, tensors, "from_padded", without=("loss_mask", "cu_seqlens", "host_counts"))
    sizes: dict[str, tuple[int, str]] = {}
    for name, value in {"mask": mask, **tensors}.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"from_padded.{name}: got {type(value).__name__}, expected a tensor.")
        of_rows = name == "group" or (name == "advantage" and value.dim() == 1)
        hint = tensor_hints(cls).get(name, "bool N")
        check_shape(f"from_padded.{name}", value, ("B",) if of_rows else ("B", "T", *hint.split()[2:]), sizes)
    loss_mask = _as_bool(mask, "mask")
    rows, width = loss_mask.shape
    sampled = _as_bool(tensors.pop("sampled"), "sampled") if "sampled" in tensors else loss_mask
    column = torch.arange(1, width + 1, device=mask.device)
    lengths = ((sampled | loss_mask) * column).amax(dim=1) if width else column.new_zeros(rows)
    inside = column <= lengths[:, None]
    packed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name == "advantage" and value.dim() == 1:
            value = value[:, None].expand(rows, width)
        packed[name] = value if name == "group" else value[inside]
    cut = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return {"loss_mask": loss_mask[inside], "sampled": sampled[inside], "cu_seqlens": cut, **packed}


def _as_bool(mask: Tensor, name: str) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"from_padded: {name} holds values other than 0 and 1.")
    return mask != 0
