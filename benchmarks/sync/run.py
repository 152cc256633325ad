"""What rank 0 does for a weight sync of the large recipes in their layouts: bytes through host memory, what is held of
the model, calls, kernels, waits, and CPU seconds; needs no GPU.

The real modules, sharded over the layout's ranks, run on a fake device, which counts. CPU seconds are those of the same
code on a model with as many tensors, but narrow ones, whose bytes cost nothing: on a GPU that work is the device's.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import finish, parser, table

PAIRS = (("qwen3_4b_cppo", "qwen3_4b_8xH100"), ("qwen3_30b_cppo", "qwen3_30b_8xH100"), ("dapo_32b", "dapo_32b_8xH100"))
NARROW = {"intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 8, "vocab_size": 512}
PROBE = 8  # tokens of the proof: how many there are costs the device alone


def main() -> None:
    p = parser(__doc__, repeats=3)
    p.add_argument("--only", nargs="+", help="layouts (default: %(default)s)", default=[pair[1] for pair in PAIRS])
    p.add_argument("--layers", type=int, default=0, help="of the models (default: their own)")
    o = p.parse_args()
    pairs = [pair for pair in PAIRS if pair[1] in o.only]
    times = [timed(*pair, o.layers, o.repeats) for pair in pairs]  # before there is a fake device
    rows = []
    for pair, seconds in zip(pairs, times, strict=True):
        rows.append({"recipe": pair[0], "layout": pair[1], **counted(*pair, o.layers), **seconds})
    header = ["layout", "sent", "through the host", "held", "tensors", "calls", "kernels", "waits", "CPU", "first"]
    print(table(header, [cells(row) for row in rows]))
    result = {
        "claim": "sync",
        "rows": rows,
        "held": max(row["held"] / row["sent"] for row in rows),
        "through_host": max(row["through_host"] / row["own"] for row in rows),
        "seconds": max(row["seconds"] for row in rows),
        "first": max(row["first"] / row["seconds"] for row in rows),
    }
    finish(result, o.json_out)


def cells(row: dict[str, Any]) -> list[str]:
    return [
        row["layout"],
        f"{row['sent'] / 1e9:.1f} GB",
        f"{row['through_host']:,} bytes",
        f"{row['held'] / row['sent']:.3f} of it",
        f"{row['tensors']:,}",
        f"{row['calls']:,}",
        f"{row['kernels']:,}",
        f"{row['waits']}",
        f"{row['seconds']:.2f} s",
        f"{row['first']:.2f} s",
    ]


class Crossings(TorchDispatchMode):
    """Counts operations, and bytes that are copied between a device and the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {leaf.device.type for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)}
        if devices - {"cpu", "meta"} and not func.is_view:
            self.operations += 1
            if "cpu" in devices and func.__name__.startswith(("_to_copy", "copy_")):
                self.bytes += sum(leaf.nbytes for leaf in tree_leaves(out) if isinstance(leaf, Tensor))
        return out


@contextmanager
def sharded(recipe: str, layout: str, layers: int, device: torch.device, *, narrow: bool = False) -> Iterator[Any]:
    """The trained module of rank 0, as the ranks lend it, and the sync that is to send it."""
    from proxima.config.outcomes import decided_on_gpus
    from proxima.config.resolution import resolve
    from proxima.engine.http.vllm import Vllm
    from proxima.engine.http.weights.stream import StreamTransport
    from proxima.engine.http.weights.sync import WeightSync
    from proxima.engine.protocol import EngineSetup
    from proxima.model.parallel.sharding import Sharding
    from proxima_plan.rehearsal.fake_ranks import fake_ranks
    from proxima_plan.rehearsal.fake_training import FakeLoader, trainings
    from tests.tiny import tiny_tokenizer

    words = [f"@layouts/{layout}", "train.optimizer.offload=false"]
    with tempfile.TemporaryDirectory() as folder:
        config_of(resolve(recipe).config.model.path, layers, narrow=narrow).save_pretrained(folder)
        config = decided_on_gpus(resolve(recipe, [*words, f"model.path={folder}"]).config)
        ranks, sharding = config.placement.ranks, Sharding.of(config.placement)
        with fake_ranks(ranks, sharding.ranks_per_share) as group:
            stack = trainings(config, FakeLoader(folder, device, group, sharding))[0].stack
            setup = EngineSetup(model_path=folder, tokenizer=tiny_tokenizer(), load_weights=None, max_length=1024)
            spec = Vllm(probe_tokens=PROBE)
            sync = WeightSync(spec, setup)
            sync.transport = StreamTransport(spec, setup)
            yield stack, sync
            sync.transport._thread.shutdown()


def local_part(weight: Any) -> Tensor:
    """This rank's part of a weight."""
    part: Tensor
    if hasattr(weight, "to_local"):
        part = weight.to_local()
    else:
        part = weight
    return part


def send(weights: Any, device: torch.device) -> int:
    """Fill all buckets, and write what is said of each, as a call to the servers. Returns the number of calls."""
    calls = 0
    with weights.lent():
        for bucket, content in weights.filled(lambda size: torch.empty(size, dtype=torch.uint8, device=device)):
            assert content.device == device
            json.dumps(bucket.as_json)
            calls += 1
    return calls


def counted(recipe: str, layout: str, layers: int) -> dict[str, Any]:
    """What a later sync takes on a fake device: by the plan of the whole model, and of each layer what two of them take
    more than one. A layer is held at a time, so the most that is held is that of two."""
    from proxima.engine.http.weights.buckets import plan_of, weight_bytes
    from proxima.model.architecture import decoder_layers

    model, ranks = shape_of(recipe, layout, layers)
    plan = plan_of(model, torch.bfloat16, file_names=False)
    one, two = (counted_layers(recipe, layout, some) for some in (1, 2))
    more = len(list(decoder_layers(model))) - 1
    linear = {}
    for name in ("through_host", "kernels", "waits"):
        layer = max(0, two[name] - one[name])  # the first pass of a process copies some tables
        linear[name] = one[name] + more * layer
    return {
        "sent": weight_bytes(plan),
        "own": weight_bytes(plan) // ranks,
        "held": two["held"],
        "tensors": sum(len(bucket.places) for bucket in plan),
        "calls": len(plan),
        **linear,
    }


def shape_of(recipe: str, layout: str, layers: int) -> tuple[Any, int]:
    """The model without weights, and the number of ranks."""
    from transformers import AutoModelForCausalLM

    from proxima.config.resolution import resolve

    config = resolve(recipe, [f"@layouts/{layout}"]).config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(config.model.path, layers)), config.placement.ranks


def config_of(path: str, layers: int, *, narrow: bool = False) -> Any:
    """The published config of a model, with so many layers (0: its own); `narrow`: with narrow tensors."""
    from tests.recipes.shapes import SHAPES

    published = SHAPES[path][0]
    shape = published.to_dict()
    changed: dict[str, Any] = {}
    if layers:
        changed = {"num_hidden_layers": layers, "layer_types": None}
    if narrow:
        changed |= NARROW | {"hidden_size": NARROW["head_dim"] * published.num_attention_heads}
    known = {name: value for name, value in changed.items() if name in shape}
    config = type(published)(**shape | known)
    config.architectures = published.architectures
    return config


def counted_layers(recipe: str, layout: str, layers: int) -> dict[str, int]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from proxima.engine.protocol import WeightUpdate
    from proxima_plan.rehearsal.device_watch import DeviceWatch
    from proxima_plan.rehearsal.fake_device import fake_device

    device = fake_device()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        DeviceWatch() as watch,
        sharded(recipe, layout, layers, device) as (stack, sync),
    ):
        module = stack.lent_model().model
        rest = watch.bytes.total
        watch.restart()
        with Crossings() as crossed:
            staged = sync._stage(WeightUpdate(version=1, module=module), "v1", "bfloat16")
            waits = sum(watch.waits.values())
            watch.restart()
            send(staged.handover, device)
        return {
            "held": watch.bytes.most - rest,
            "through_host": crossed.bytes,
            "kernels": crossed.operations,
            "waits": waits + sum(watch.waits.values()),
        }


def timed(recipe: str, layout: str, layers: int, repeats: int) -> dict[str, Any]:
    """CPU seconds of the first sync, and the median of later ones, by part."""
    from proxima.engine.protocol import WeightUpdate

    torch.set_num_threads(1)
    device = torch.device("cpu")
    with sharded(recipe, layout, layers, device, narrow=True) as (stack, sync):
        module = stack.lent_model().model
        for parameter in stack.model.model.parameters():
            torch.nn.init.normal_(local_part(parameter), std=0.02)
        began = process_time()
        update = WeightUpdate(version=0, module=module)
        staged = sync._stage(update, "v0", "bfloat16")
        perturbed = sync._stage_perturbed(update, "v0-perturbed", "bfloat16")
        send(perturbed.handover, device)
        send(staged.handover, device)
        first = process_time() - began
        staging, sending = [], []
        for number in range(repeats):
            began = process_time()
            staged = sync._stage(WeightUpdate(version=number, module=module), f"v{number}", "bfloat16")
            between = process_time()
            send(staged.handover, device)
            staging.append(between - began)
            sending.append(process_time() - between)
    later = median(map(sum, zip(staging, sending, strict=True)))
    return {
        "seconds": round(later, 3),
        "first": round(first, 3),
        "staging": round(median(staging), 3),
        "sending": round(median(sending), 3),
    }
