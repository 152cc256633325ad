"""A sharded model's weights for a reader on rank 0, one decoder layer at a time: nothing holds a whole copy of them.

`LayerLender.module` is a plain model on rank 0 without weights. Before a layer of it computes, or its weights are read,
they are gathered, and those of the layer before it are dropped. So it computes what a whole plain copy computes, to the
bit, also with gradients: the backward pass gathers each layer again and recomputes it. Only rank 0 knows what is
gathered next, and tells the other ranks, so an error of the reader leaves none of them waiting.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from proxima.model.parallel.gather import empty_like, whole_tensor
from proxima.model.parallel.lending import LENDER
from proxima.model.parallel.shard import decoder_layers
from proxima.model.perturbation import perturbed_weights

OUTER = 0  # the unit of the weights outside of decoder layers; the first layer is unit 1


@dataclass(frozen=True)
class GatherUnit:
    """Gather the weights of a unit."""

    unit: int


@dataclass(frozen=True)
class Perturb:
    """Perturb the weights until `Restore` or the end, see `perturbed_weights`."""

    amounts: list[float]


@dataclass(frozen=True)
class Restore:
    """Restore the weights."""


Order = GatherUnit | Perturb | Restore | None  # None: the end


class LayerGathering:
    """What every rank does with its part of the weights while they are lent.

    Args:
        sharded: the model; every rank has its part of the same.
        share: returns rank 0's argument on every rank; collective.
    """

    def __init__(self, sharded: nn.Module, share: Callable[[Order], Order]) -> None:
        self.sharded, self.unit_of = sharded, unit_of_parameter(sharded)
        self._share = share
        self.broken = False  # an order failed half-way: the ranks are no longer at the same point

    def follow(self) -> None:
        """On the other ranks: obey rank 0 until its end."""
        with ExitStack() as perturbed:
            while (order := self._share(None)) is not None:
                if isinstance(order, GatherUnit):
                    self._gathered(order.unit)
                elif isinstance(order, Perturb):
                    perturbed.enter_context(perturbed_weights(self.sharded, order.amounts))
                else:
                    perturbed.close()

    def gather(self, unit: int) -> dict[str, Tensor]:
        """On rank 0: the whole weights of a unit, by name."""
        self.broken = True
        self._share(GatherUnit(unit))
        weights = self._gathered(unit, keep=True)
        self.broken = False
        return weights

    @contextmanager
    def perturbed(self, amounts: list[float]) -> Iterator[None]:
        """On rank 0: perturb the weights of every rank within the block."""
        self.tell(Perturb(amounts))
        with perturbed_weights(self.sharded, amounts):
            yield
            self.tell(Restore())  # after an error the end restores them

    def tell(self, order: Order) -> None:
        """On rank 0: send an order to the other ranks."""
        self.broken = True
        self._share(order)
        self.broken = False

    @torch.no_grad()
    def _gathered(self, unit: int, *, keep: bool = False) -> dict[str, Tensor]:
        weights = dict[str, Tensor]()
        for name, parameter in self.sharded.named_parameters():
            if self.unit_of[name] == unit:
                whole = whole_tensor(parameter)
                if keep:
                    weights[name] = whole.to("cpu")
        return weights


class LayerLender:
    """Lends the weights of a sharded model on rank 0; see the top of this file.

    Args:
        gathering: of the sharded model.
        announced: returns a block during which each other rank is in `LayerGathering.follow`.
        dtype: of the lent weights; None: their own.
    """

    def __init__(
        self,
        gathering: LayerGathering,
        announced: Callable[[], AbstractContextManager[None]],
        dtype: torch.dtype | None = None,
    ) -> None:
        self._gathering, self._announced, self._dtype = gathering, announced, dtype
        self._loaded = set[int]()  # units; one layer at most
        self.module: Any = empty_like(gathering.sharded, torch.device("cpu"), weights=False)
        self.module.eval()
        for buffer in self.module.buffers():
            buffer.data = self._converted(buffer)
        self._empty(self.module.named_parameters())
        setattr(self.module, LENDER, self)
        for unit, layer in enumerate(decoder_layers(self.module), OUTER + 1):
            layer.forward = partial(self._compute, unit, layer.forward)

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Within the block the weights can be read. An error in it is raised once the other ranks have been told the
        end."""
        problem: BaseException | None = None
        with self._announced():
            try:
                yield
            except BaseException as error:
                if self._gathering.broken:
                    raise
                problem = error
            self.drop()
            self._gathering.tell(None)
        if problem is not None:
            raise problem

    def load(self, unit: int = OUTER) -> None:
        """Gather the weights of a unit; those of another layer are dropped."""
        if unit in self._loaded:
            return
        if unit != OUTER:
            self._drop(self._loaded - {OUTER})
        targets = dict(self.module.named_parameters())
        for name, whole in self._gathering.gather(unit).items():
            targets[name].data = self._converted(whole)
        self._loaded.add(unit)

    def load_parameter(self, name: str) -> None:
        """Gather the weights of the unit with this parameter."""
        self.load(self._gathering.unit_of[name])

    def drop(self) -> None:
        """Drop all weights."""
        self._drop(set(self._loaded))

    @contextmanager
    def perturbing(self, amounts: list[float]) -> Iterator[None]:
        """Within the block the lent weights, and those of every rank, are perturbed; see `perturbed_weights`."""
        self.drop()
        with self._gathering.perturbed(amounts):
            yield
            self.drop()

    def in_dtype(self, dtype: torch.dtype) -> nn.Module:
        """The module in another dtype, which can be read within the same `lending`."""
        self.drop()
        module: nn.Module = LayerLender(self._gathering, self._announced, dtype).module
        return module

    def _compute(self, unit: int, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        def compute(*arguments: Any, **options: Any) -> Any:
            self.load(unit)
            return forward(*arguments, **options)

        if not torch.is_grad_enabled():
            return compute(*arguments, **options)
        return checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False, **options)

    def _converted(self, tensor: Tensor) -> Tensor:
        return tensor if self._dtype is None or not tensor.is_floating_point() else tensor.to(self._dtype)

    def _drop(self, units: set[int]) -> None:
        unit_of = self._gathering.unit_of
        self._empty((name, p) for name, p in self.module.named_parameters() if unit_of[name] in units)
        self._loaded -= units

    def _empty(self, parameters: Iterator[tuple[str, nn.Parameter]]) -> None:
        for _, parameter in parameters:
            one = self._converted(torch.zeros((), dtype=parameter.dtype))
            parameter.data = one.expand(parameter.shape)  # has a shape and takes no memory


def unit_of_parameter(model: nn.Module) -> dict[str, int]:
    """The unit of each parameter by its names. Parameters that layers share are outside of them."""
    units = dict[int, set[int]]()
    for unit, layer in enumerate(decoder_layers(model), OUTER + 1):
        for parameter in layer.parameters():
            units.setdefault(id(parameter), set()).add(unit)
    owners = {key: next(iter(own)) if len(own) == 1 else OUTER for key, own in units.items()}
    named = model.named_parameters(remove_duplicate=False)
    return {name: owners.get(id(parameter), OUTER) for name, parameter in named}
