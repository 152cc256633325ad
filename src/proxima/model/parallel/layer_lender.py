"""A sharded model's weights for a reader on rank 0, one decoder layer at a time: nothing holds a whole copy of them.

`LayerLender.module` is a plain model on the rank's own device, without weights. Before its weights are read, those of
their layer are gathered there, and those of the layer before it are dropped. Only rank 0 knows what happens next, and
tells the other ranks, so an error of the reader leaves none of them waiting.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from proxima.model.architecture import decoder_layers
from proxima.model.parallel.gather import empty_like, whole_tensors
from proxima.model.parallel.lending import LENDER
from proxima.model.perturbation import perturbed_weights

OUTER = 0  # the unit of the weights outside of decoder layers; the first layer is unit 1


class SharingRanks(Protocol):
    """The ranks that hold the model."""

    size: int

    @property
    def shares(self) -> int:
        """The groups of ranks that each compute a batch of their own."""
        ...

    def share_value(self, value: Any) -> Any:
        """Rank 0's value, on every rank; collective."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on rank 0; collective."""
        ...


class LayerLender:
    """Every rank has one, of the same model; on rank 0 it lends the weights. See the top of this file.

    Args:
        policy: the `PackedModel` that computes with the sharded model.
        ranks: that hold it.
        announced: on rank 0: returns a block during which each other rank is in `follow`.

    dtype: of the weights from now on, which are rounded to it before they are gathered; None: their own. Adapters are
        merged in their own dtype, so a model that has some ignores it.
    """

    def __init__(self, policy: Any, ranks: SharingRanks, announced: Callable[[], AbstractContextManager[None]]) -> None:
        self.policy = policy
        self.sharded = policy.model
        self.ranks = ranks
        self.unit_of = unit_of_parameter(self.sharded)
        self.places = places_of_units(self.sharded, self.unit_of)
        self._dtypes = {name: parameter.dtype for name, parameter in self.sharded.named_parameters()}
        self.dtype: torch.dtype | None = None
        self._announced = announced
        self._loaded = set[int]()  # units; one layer at most
        self._together = False  # every rank is in the same function
        self._broken = False  # a function failed half-way: the ranks are no longer at the same point
        self._perturbed = ExitStack()

    @cached_property
    def module(self) -> Any:
        """The plain model that holds what has been gathered."""
        module: Any = empty_like(self.sharded, self.policy.device, weights=False).eval()
        self._empty(module.named_parameters())
        setattr(module, LENDER, self)
        return module

    @cached_property
    def _own_places(self) -> "Places":
        return places_of_units(self.module, self.unit_of)

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Within the block the weights can be read. An error in it is raised once the other ranks have been told the
        end."""
        problem: BaseException | None = None
        with self._announced():
            try:
                yield
            except BaseException as error:
                if self._broken:
                    raise
                problem = error
            finally:
                self._perturbed.close()
            self.drop()
            self._tell(None)
        if problem is not None:
            raise problem

    def follow(self) -> None:
        """On the other ranks: do what rank 0 says until its end."""
        self._together = True
        with self._perturbed:
            while (work := self.ranks.share_value(None)) is not None:
                work(self)
        self.drop()

    def everywhere(self, work: Callable[..., Any], *own: Any) -> Any:
        """On rank 0: every rank calls `work(lender)`, and this one `work(lender, *own)`. Returns its result.

        Args:
            work: a function that pickle can name, or a `partial` of one.
        """
        self._tell(work)
        self._broken = self._together = True
        try:
            result = work(self, *own)
        finally:
            self._together = False
        self._broken = False
        return result

    def load(self, unit: int = OUTER) -> None:
        """Gather the weights of a unit; those of another layer are dropped."""
        if unit in self._loaded:
            return
        if unit != OUTER:
            self._drop(self._loaded - {OUTER})
        gather = partial(_gather_unit, unit=unit, dtype=self.dtype)
        weights = gather(self, True) if self._together else self.everywhere(gather, True)
        for name, parameter in parameters_at(self._own_places[unit]):
            parameter.data = weights[name]
        self._loaded.add(unit)

    def load_parameter(self, name: str) -> None:
        """Gather the weights of the unit with this parameter."""
        self.load(self.unit_of[name])

    def drop(self) -> None:
        """Drop all weights."""
        self._drop(set(self._loaded))

    @contextmanager
    def perturbing(self, amounts: list[float]) -> Iterator[None]:
        """On rank 0: within the block the weights of every rank are perturbed; see `perturbed_weights`."""
        self.drop()
        self.everywhere(partial(_perturb, amounts=amounts))
        yield
        self.drop()
        self.everywhere(_restore)  # after an error the end restores them

    def _tell(self, work: Callable[..., Any] | None) -> None:
        self._broken = True
        self.ranks.share_value(work)
        self._broken = False

    def _drop(self, units: Collection[int]) -> None:
        if units:
            for unit in units:
                self._empty(parameters_at(self._own_places[unit]))
            self._loaded -= set(units)

    def _empty(self, parameters: Iterator[tuple[str, nn.Parameter]]) -> None:
        for name, parameter in parameters:
            one = torch.zeros((), dtype=self._dtypes[name], device=parameter.device)
            parameter.data = one.expand(parameter.shape)  # has a shape and takes no memory


@torch.no_grad()
def _gather_unit(lender: LayerLender, keep: bool = False, *, unit: int, dtype: torch.dtype | None) -> dict[str, Tensor]:
    weights = whole_tensors(dict(parameters_at(lender.places[unit])), dtype)
    return weights if keep else {}


def _perturb(lender: LayerLender, *, amounts: list[float]) -> None:
    lender._perturbed.enter_context(perturbed_weights(lender.sharded, amounts))


def _restore(lender: LayerLender) -> None:
    lender._perturbed.close()


Places = dict[int, list[tuple[str, nn.Module, str]]]


def places_of_units(model: nn.Module, unit_of: Mapping[str, int]) -> Places:
    """The parameters of each unit: their name, and the module and the attribute that hold each. To look for a unit's
    among all names takes as long as to send its weights."""
    places: Places = {unit: [] for unit in {OUTER, *unit_of.values()}}
    owners = dict(model.named_modules())
    for name, _ in model.named_parameters():
        owner, _, attribute = name.rpartition(".")
        places[unit_of[name]].append((name, owners[owner], attribute))
    return places


def parameters_at(places: Iterable[tuple[str, nn.Module, str]]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are there now, by name: a sharded model exchanges its own while it computes."""
    for name, owner, attribute in places:
        yield name, getattr(owner, attribute)


def unit_of_parameter(model: nn.Module) -> dict[str, int]:
    """The unit of each parameter by its names. Parameters that layers share are outside of them."""
    units = dict[int, set[int]]()
    for unit, layer in enumerate(decoder_layers(model), OUTER + 1):
        for parameter in layer.parameters():
            units.setdefault(id(parameter), set()).add(unit)
    owners = {}
    for key, own in units.items():
        owners[key] = next(iter(own)) if len(own) == 1 else OUTER
    named = model.named_parameters(remove_duplicate=False)
    return {name: owners.get(id(parameter), OUTER) for name, parameter in named}
