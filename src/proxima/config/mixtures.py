"""The check that settings for mixtures of experts are used with such a model."""

from typing import Any

from proxima.data import FieldError
from proxima.model.pretrained import load_config
from proxima.model.routing import check_mixture


def check_routed(config: Any) -> None:
    """Check the settings for mixtures of experts, before any weights are loaded.

    Raises:
        FieldError: a field is for mixtures of experts, and the model is not one, or its attention records no routes.
    """
    algorithm, model = config.algorithm, config.model
    given = {
        "algorithm.routing_replay": algorithm.routing_replay != "off" and algorithm.routing_replay,
        "algorithm.router_balance.coefficient": algorithm.router_balance and algorithm.router_balance.coefficient,
        "engine.routed_experts": getattr(config.engine, "routed_experts", False),
    }
    for field, value in given.items():
        if value:
            check_mixture(load_config(model.path, model.revision), field, value)
            if model.attention == "padded":
                raise FieldError("model.attention", "padded", f"has no routes for {field}", remedy="set it to auto")
