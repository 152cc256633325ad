"""Updates at Qwen3-1.7B and 4B, their whole vocabulary: 16 prompts x 8 completions, 256 + 1,024 tokens, with and
without checkpointing, compiled layers, moments in 8 bits, and LoRA; against the plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.gpu.forecast import Forecast, kind_here, product_rate
from benchmarks.gpu.kernels import PRODUCTS
from benchmarks.gpu.record import Record, earlier, part_options
from benchmarks.gpu.sizes import SMALL, WHOLE, Batch, config_of, drawn_model
from benchmarks.harness import gemm_rate
from benchmarks.side import clock, device
from proxima.config.sections.model import ModelConfig
from proxima.config.sections.train import TrainConfig
from proxima.core import AGGREGATES, SURROGATES
from proxima.data.trajectory import Trajectory
from proxima.model.adapters.lora import Lora, attach
from proxima.model.attention import NAME, packed_attention
from proxima.model.parallel.shard import decoder_layers
from proxima.model.pretrained import LoadedModel
from proxima.runtime.launch.learning import make_stack
from proxima.training import OPTIMIZERS
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.ranks import ALONE, Ranks
from proxima.training.stack import TrainStack

BEGINNING, COMPILING = 8.0, 60.0  # seconds: to draw a model and warm up; to compile its layers as well
SLOWER = 1.5  # than planned, in the seconds that a case is taken to need


@dataclass(frozen=True)
class Case:
    """An update of a shape.

    Args:
        checkpointed, compiled, lora: whether it has them. optimizer: a kind of `OPTIMIZERS`.
        micro_tokens: tokens of a micro-batch.
    """

    shape: str
    micro_tokens: int = 16_384
    checkpointed: bool = True
    compiled: bool = False
    lora: bool = False
    optimizer: str = "adamw"

    def __str__(self) -> str:
        settings = {
            "checkpointed": self.checkpointed,
            "compiled": self.compiled,
            "LoRA": self.lora,
            "8 bits": self.optimizer == "adamw_8bit",
        }
        return ", ".join([self.shape, *(name for name, has in settings.items() if has)])

    def spec(self) -> ModelConfig:
        """The `model` section of a recipe."""
        lora = Lora() if self.lora else None
        return ModelConfig(path="", compute_dtype="bfloat16", gradient_checkpointing=self.checkpointed, lora=lora)

    def forecast(self, batch: Batch, *, rehearse: bool, sharding: Any = None) -> Forecast:
        """The plan of the update."""
        optimizer, tokens = OPTIMIZERS[self.optimizer](), 64 if rehearse else self.micro_tokens
        config = config_of(self.shape, rehearse=rehearse)
        return Forecast(config, self.spec(), batch, tokens, optimizer, sharding)


CASES = (
    Case("1.7B"),
    Case("4B"),
    Case("1.7B", 8192, checkpointed=False),
    Case("4B", compiled=True),
    Case("4B", optimizer="adamw_8bit"),
    Case("4B", lora=True),
    Case("4B", 4096, checkpointed=False),
    Case("1.7B", 8192, checkpointed=False, compiled=True),
    Case("1.7B", optimizer="adamw_8bit"),
    Case("1.7B", lora=True),
)


def compile_layers(loaded: LoadedModel) -> None:
    """Compile each layer of the decoder by itself, before a policy wraps it to be recomputed."""
    for layer in decoder_layers(loaded.model):
        layer.forward = torch.compile(layer.forward)


def spare_attention() -> None:
    """Leave attention out of what is compiled: its layout differs from batch to batch. After a policy was made."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))


def stack_of(case: Case, loaded: LoadedModel, *, rehearse: bool, ranks: Ranks = ALONE) -> TrainStack:
    """What trains the model of a case, as a run has it."""
    if case.compiled:
        compile_layers(loaded)
    policy = case.spec().source().policy(loaded)
    if case.compiled:
        spare_attention()
    tokens = 64 if rehearse else case.micro_tokens
    train = TrainConfig(tokens_per_micro_batch=tokens, optimizer=OPTIMIZERS[case.optimizer]())
    return make_stack(train, policy, 10, ranks)


def timed_update(stack: TrainStack, trajectories: Sequence[Trajectory], group: int) -> tuple[float, dict[str, float]]:
    """Seconds of an update and its metrics, after one of a single group."""
    objective = PolicyObjective(surrogate=SURROGATES["ppo_clip"](), aggregate=AGGREGATES["token_mean"]())
    stack.update(objective, [trajectories[:group]])
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    start = clock()
    metrics = stack.update(objective, [trajectories]).metrics
    return clock() - start, metrics


def tell_update(
    record: Record, name: str, plan: Forecast, seconds: float, metrics: dict[str, float], expected: float | None = None
) -> None:
    """Write what an update took; `expected` is the norm of its gradient, as another way has computed it."""
    rate = earlier(record.file, "kernels", PRODUCTS)
    if rate:
        peak = rate * 1e12
    else:
        peak = gemm_rate(torch.get_num_threads(), "bfloat16", 256)
    fed, share = plan.batch.fed, plan.flops / peak
    record.figure(f"{name}: tokens a second", fed / seconds, "tokens/s", predicted=fed / plan.seconds)
    record.figure(f"{name}: time", seconds, "s", predicted=plan.seconds, within=0.25)
    planned = plan.flops / plan.seconds / product_rate()
    record.figure(f"{name}: model FLOP/s over the product rate", share / seconds, "", predicted=planned, goal=0.4)
    allocated = reserved = None
    if torch.cuda.is_available():
        allocated, reserved = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    record.figure(f"{name}: allocated", allocated, "GiB", predicted=plan.allocated, within=0.1)
    record.figure(f"{name}: reserved", reserved, "GiB", predicted=plan.needed, within=0.1)
    record.figure(f"{name}: norm of the gradient", metrics["grad_norm"], "", predicted=expected)


def measure(record: Record, case: Case, batch: Batch, plan: Forecast, *, rehearse: bool) -> None:
    """Measure the update of a case."""
    loaded = drawn_model(plan.config)
    if case.lora:
        attach(loaded.model, Lora(), seed=1)
        loaded.model.to(device())
    stack = stack_of(case, loaded, rehearse=rehearse)
    trajectories = batch.trajectories(plan.config.vocab_size)
    seconds, metrics = timed_update(stack, trajectories, batch.completions)
    tell_update(record, str(case), plan, seconds, metrics)


def begin(record: Record, case: Case, *, rehearse: bool) -> None:
    """Measure a case that this machine can compute and that the time allows."""
    if case.optimizer == "adamw_8bit" and find_spec("torchao") is None:
        record.leave_out(str(case), "torchao is not installed")
        return
    batch = SMALL if rehearse else WHOLE
    plan = case.forecast(batch, rehearse=rehearse)
    if not plan.fits:
        has = f"{kind_here().memory:.0f} GiB of this device"
        record.leave_out(str(case), f"the plan needs {plan.needed:.0f} GiB, more than the {has}")
        return
    needed = BEGINNING + (COMPILING if case.compiled else 0) + SLOWER * (1 + 1 / batch.prompts) * plan.seconds
    record.case(str(case), needed, partial(measure, record, case, batch, plan, rehearse=rehearse))


def main() -> None:
    record, rehearse = part_options("updates")
    if rehearse:
        torch.set_num_threads(1)
    for case in CASES:
        record.case(str(case), 0, partial(begin, record, case, rehearse=rehearse))


if __name__ == "__main__":
    main()
