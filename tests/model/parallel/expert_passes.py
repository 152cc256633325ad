"""What ranks that split experts do beside `passes.compare`, against one process."""

from itertools import pairwise

from proxima.model.packed_model import PackedModel
from proxima.model.parallel.shard import decoder_layers
from tests.model.parallel.passes import compare


def few_chosen(plain: PackedModel, sharded: PackedModel) -> None:
    """All tokens go to two experts, of one rank or of two; the rest gets none."""
    for first, busy in ((0, None), (6, 1)):
        hooks = [
            module.register_forward_hook(lambda module, given, out, first=first: (*out[:2], out[2] % 2 + first))
            for model in (plain, sharded)
            for module in model.model.modules()
            if type(module).__name__.endswith("TopKRouter")
        ]
        compare(plain, sharded, busy=busy)
        for hook in hooks:
            hook.remove()


def gathers_ahead(plain: PackedModel, sharded: PackedModel) -> None:
    """A layer and its experts are gathered before the layer that comes first, or in a backward pass last, computes."""

    def states(*modules):
        return [module._get_fsdp_state() for module in modules]

    layers = list(decoder_layers(sharded.model))
    assert len(layers) > 1
    for one, after in pairwise(layers):
        (ahead,) = states(one)
        (behind,) = states(after)
        assert ahead._states_to_forward_prefetch == states(after, after.mlp.experts)
        assert behind._states_to_backward_prefetch == states(one.mlp.experts, one)


def same_loop(plain: PackedModel, sharded: PackedModel) -> None:
    """A loop over experts computes what grouped products do."""
    sharded.model.set_experts_implementation("eager")
    compare(plain, sharded)
    compare(plain, sharded, busy=1)
