"""Weights that are changed at random for a while, to show that whoever reads them reads all of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from proxima.model.architecture import base_layer, parts
from proxima.model.parallel.sharding import local_part, own_slice

ROW_GAIN = 0.25  # of a token's row in embedding and head, up or down: moves log-probs by more than rounding


@contextmanager
def perturbed_weights(module: nn.Module, amounts: Sequence[float]) -> Iterator[None]:
    """Inside this context a normal draw of this standard deviation is added to each parameter, and each token's row in
    embedding and head is scaled by 1 + or - `ROW_GAIN`; afterwards all are restored exactly. On each rank of a sharded
    module, its own slices change as the whole weights do on one; no collective.

    Args:
        amounts: of each of `module.parameters()`, in their order; one whose amount is 0 is left as it is.
    """
    changed = [(n, p, amount) for n, (p, amount) in enumerate(zip(module.parameters(), amounts, strict=True)) if amount]
    moved = {id(parameter) for _, parameter, _ in changed}
    saved = [own_slice(parameter).to("cpu", copy=True) for _, parameter, _ in changed]
    try:
        with torch.no_grad():
            for number, parameter, amount in changed:
                draws = torch.Generator().manual_seed(number)
                local, index = _own_part(parameter)
                local.add_(torch.randn(parameter.shape, generator=draws).mul_(amount)[index].to(local))
            for number, rows in enumerate(_token_rows(module)):
                if id(rows) not in moved:
                    continue
                draws = torch.Generator().manual_seed(-1 - number)
                gains = 1 + ROW_GAIN * (2 * torch.randint(0, 2, (len(rows), 1), generator=draws) - 1)
                local, index = _own_part(rows)
                local.mul_(gains[index[:1]].to(local))
        yield
    finally:
        for (_, parameter, _), values in zip(changed, saved, strict=True):
            own_slice(parameter).copy_(values)


def _own_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's part of a weight, to be changed in place, and where it lies in the whole."""
    local, offset = local_part(parameter)
    return local.detach(), tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True))


def _token_rows(module: nn.Module) -> list[nn.Parameter]:
    """The weights with one row per token: the input embedding, and the output head if it is not tied to it."""
    embedding = module.get_input_embeddings().weight  # type: ignore[operator]
    head = base_layer(parts(module)[1]).weight
    return [weight for weight in {id(w): w for w in (embedding, head)}.values() if isinstance(weight, nn.Parameter)]
