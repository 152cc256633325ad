"""One rank: run two updates of a recipe's policy and measure the second."""

import json
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the live storages that operations have created, now and at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, tuple[int, Any]] = {}

    def add(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            tensor = getattr(tensor, "_local_tensor", tensor)
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._sizes:
                    self._sizes[key] = storage.nbytes(), weakref.ref(storage, partial(self._freed, key))
                    self._count(storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it comes again, as the operations on this rank's part
        outputs = func(*args, **(kwargs or {}))
        self.add(outputs)
        return outputs

    def __enter__(self) -> "LiveTensors":
        storage: Any = torch.UntypedStorage
        self._resize = storage.resize_
        storage.resize_ = lambda own, size: self._resized(own, size)  # how FSDP frees what it has gathered
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        storage: Any = torch.UntypedStorage
        storage.resize_ = self._resize

    def _resized(self, storage: Any, size: int) -> Any:
        result, key = self._resize(storage, size), storage._cdata
        if key in self._sizes:
            before, reference = self._sizes[key]
            self._sizes[key] = storage.nbytes(), reference
            self._count(storage.nbytes() - before)
        return result

    def _freed(self, key: int, _: Any) -> None:
        self._count(-self._sizes.pop(key)[0])

    def _count(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


def resident(name: str) -> int:
    """Return VmRSS or VmHWM in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def resting(stack: Any) -> int:
    """Return the bytes of this rank's weights, gradients and moments, which offloading keeps in host memory. Gradients,
    already freed after an update, count with the size of the weights."""
    held = [p.detach() for p in stack.parameters] * 2
    held += [tensor for slots in stack.optimizer.state.values() for tensor in slots.values() if tensor.dim()]
    frozen = [p.detach() for p in stack.model.model.parameters() if not p.requires_grad]
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in [*held, *frozen]]
    return sum(tensor.nbytes for tensor in local)


def main() -> None:
    from proxima.config.batch_arithmetic import BatchArithmetic
    from proxima.config.resolution import resolve
    from proxima.model import log_prob
    from proxima.runtime.launch.learning import make_objective, make_stack
    from proxima.runtime.placement.follower import RankModels
    from proxima.runtime.placement.rendezvous import ranks_of
    from proxima_plan.rehearsal.fake_training import VERSION, StepShape, Training, fake_items
    from proxima_plan.rehearsal.rehearsal import shape_of

    torch.set_num_threads(1)
    settings = json.loads(sys.argv[1])
    resolved = resolve(settings["recipe"], settings["overrides"], root=None)
    config: Any = resolved.config
    log_prob.ROWS = config.model.log_prob_chunk  # as on a GPU; on a CPU eight rows of a chunk are in float32 at once
    with ranks_of(config) as ranks:
        batch = BatchArithmetic(resolved).batch
        shape = shape_of(config, batch, ranks.size)
        first = StepShape(groups=1, size=2, prompt=4, length=4)  # makes the moments
        before, live = resident("VmRSS"), LiveTensors()
        with live:
            loaded = config.model.source(config.seed, config.placement).load()
            policy = config.model.source().policy(loaded)
            stack = make_stack(config.train, policy, config.train.updates, ranks)
            live.add([p.detach() for _, p in policy.named_parameters()])
            objective = make_objective(config).at_version(VERSION)
            training = Training(stack, objective)
            answer: dict[str, int] = {}
            for sizes in (first, shape):
                live.most = live.now
                # the peak of the resident set is that from now on
                Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
                if ranks.rank == 0:
                    stack.update(objective, [fake_items(config, training, sizes, ranks.size)])
                    answer = {"tensors": live.most, "resident": resident("VmHWM") - before}
                    if getattr(getattr(config.placement, "sharding", None), "offload", False):
                        answer["tensors"] -= resting(stack)
                else:
                    RankModels(stacks={"policy": stack}).take_part(ranks.receive())
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
