"""What attention costs beside the products with the weights, by the sizes in a config."""

from typing import Any

from proxima.model.pass_flops import pass_flops


def pair_cost(config: Any) -> float:
    """Return the cost of one token's attention to one other, in passes of a token through all weights that it uses.

        4 · layers · heads · head_dim  /  (2 · weights a token uses)        FLOP over FLOP

    See `PassFlops` for what is not taken into account; 0 for a model whose config names no heads.
    """
    flops = pass_flops(config)
    if flops.pair:
        return flops.pair / (flops.token + flops.row)
    return 0.0
