"""The check that what is for mixtures of experts is asked of one."""

from typing import TYPE_CHECKING

from proxima.data import FieldError
from proxima.model.load import load_config
from proxima.model.routing import check_mixture

if TYPE_CHECKING:
    from proxima.config.schema import RunConfig


def check_routed(config: "RunConfig") -> None:
    """Before any weights load.

    Raises:
        FieldError: a field is for mixtures of experts, and the model is none, or its attention records no routes.
    """
    given = {
        "algorithm.routing_replay": config.algorithm.routing_replay != "off" and config.algorithm.routing_replay,
        "algorithm.router_balance": config.algorithm.router_balance and config.algorithm.router_balance.coefficient,
        "engine.routed_experts": getattr(config.engine, "routed_experts", False),
    }
    for field, value in given.items():
        if value:
            check_mixture(load_config(config.model.path, config.model.revision), field, value)
            if config.model.attention == "padded":
                raise FieldError("model.attention", "padded", f"has no routes for {field}", remedy="set it to auto")
