"""What ranks that split experts do beside `passes.compare`, against one process."""

from proxima.model.packed_model import PackedModel
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


def same_loop(plain: PackedModel, sharded: PackedModel) -> None:
    """A loop over experts computes what grouped products do."""
    sharded.model.set_experts_implementation("eager")
    compare(plain, sharded)
    compare(plain, sharded, busy=1)
