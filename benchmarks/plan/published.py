"""Published figures of other frameworks, and the settings that their pages and scripts name.

If a page leaves something open, `note` says what was assumed. `fitted`: the rates of `devices.toml` were fitted on this
row.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from proxima_plan.devices import device_rates
from proxima_plan.engine_settings import EngineSettings
from proxima_plan.model_size import known_models

NEMO = "NeMo-RL docs/about/performance-summary.md"
VERL = "verl verl/experimental/fully_async_policy/README.md"
SKYRL = "SkyRL docs/content/docs/examples/megatron.mdx"
TITAN = "torchtitan benchmarks/"
PRIME = "prime-rl benchmarks/baselines, 559b447"


@dataclass(frozen=True)
class Row:
    """One published row.

    Args:
        layout: fields of `DeviceLayout` and of its `Sharding`. load: fields of `Load`. rates: those that differ
            from the fitted ones, because the page describes a different method.
        adapter: weights of a LoRA adapter, the only trained ones.
        figures: seconds (`step`, `generate`, `forward`, `update`) or GiB (`memory`) as published.
        apart: figure → why it is not comparable: what its source leaves open, or a method that the plan doesn't model.
    """

    name: str
    source: str
    model: str
    devices: str
    layout: dict[str, Any]
    load: dict[str, Any]
    figures: dict[str, float]
    rates: dict[str, float] = field(default_factory=dict)
    chunk: int = 512
    adapter: int = 0
    fitted: bool = False
    note: str = ""
    apart: dict[str, str] = field(default_factory=dict)


def _nemo(
    name: str, model: str, devices: str, split: tuple[int, int, int, int], tensor: int, load: dict[str, Any],
    step: float, *, ranks: int, engines: int, lag: int = 0, fitted: bool = False, version: str = "v0.6", note: str = "",
) -> Row:  # fmt: skip
    """A row of NeMo-RL, with Megatron and vLLM. Its optimizer splits states over all ranks, which gather weights and
    sum gradients once per update, with the traffic of `replicate`; 150 tokens of the published means and maxima are
    assumed to be the prompt. Before engines generate on the ranks' devices, the ranks move the optimizer's 12 bytes per
    weight to the host, and back afterwards."""
    count, (tp, cp, ep, pp) = int(devices.partition("x")[0]), split
    layout = {
        "ranks": ranks, "engines": engines, "engine_devices": tensor, "colocated": ranks == count, "pipeline": pp,
        "tensor_parallel": tp, "context_parallel": cp, "expert_parallel": ep, "kind": "replicate",
    }  # fmt: skip
    lag = lag or (int(name.partition(", ")[2][:1]) if name.endswith(" off") else 0)
    steady = {"prompt": 150, "forwards": 2, "lag": lag}
    rates = {
        "publish": REFIT,
        "head": CROSS_ENTROPY,
        "step": STEP + (2 * 12 * known_models()[model].parameters / ranks / OFFLOAD if not lag else 0.0),
    }
    source = f"{NEMO} {version}"
    return Row(name, source, model, devices, layout, steady | load, {"step": step}, rates, fitted=fitted, note=note)


def _lengths(sequences: int, group: int, mean: float, longest: int, updates: int, *, again: bool) -> dict[str, Any]:
    sizes = {"sequences": sequences, "group": group, "mean": mean - 150, "longest": longest - 150}
    return sizes | {"updates": updates, "micro_tokens": longest, "checkpointing": again}


def _of_verl(count: int, beside: int, hours: float, means: tuple[float, float], *, fitted: bool = False) -> Row:
    """A row of verl: the mean of the first hundred steps, which start from the same model and prompts; later, lengths
    differ.

    Args:
        hours: duration of these steps. means: seconds of the whole run's mean step, with the work between steps, such
            as evaluations, and without it.
    """
    ranks = count - beside
    layout = {
        "ranks": ranks, "engines": (beside or count) // 4, "engine_devices": 4, "colocated": not beside,
        "context_parallel": 4, "kind": "hybrid", "param_dtype": "bfloat16",
    }  # fmt: skip
    load = {
        "sequences": 8192, "group": 16, "prompt": 150, "mean": MEAN_7B, "longest": 28_672, "updates": 16,
        "forwards": 0 if beside else 1, "micro_tokens": 4 * 61_440, "checkpointing": True,
        "lag": PARTIAL if beside else 0, "concurrent": 12_288 if beside else None,
    }  # fmt: skip
    if beside:
        where = f"{ranks} + {beside} asynchronous"
    else:
        where = f"{count}"
    note = "mean length not published: it was fitted on the row of 32"
    step = {"step": 36 * hours - (means[0] - means[1])}
    return Row(
        f"Qwen2.5-Math-7B, {where}", VERL, "qwen2.5-math-7b", f"{count}xH20-96G", layout, load, step,
        {"publish": VERL_SYNC, "head": CROSS_ENTROPY}, fitted=fitted, note=note,
    )  # fmt: skip


MEAN_7B = 1354.0  # tokens; fitted on the synchronous row of 32 devices
MEAN_30B = 1500.0
STEP = device_rates().step
CROSS_ENTROPY = 30.0  # bytes of a logit that one kernel over whole logits reads and writes, in place of `head`
# GB/s of new weights: DeepSeek-V3 takes 35 s and Qwen3-30B-A3B on GB200 1.9 s (pull requests 638 and 3461 of NeMo-RL);
# bytes per second from a device to its host and back: 20 s for DeepSeek-V3's states (638), assumed on 256 devices
REFIT, OFFLOAD = 38.0, 2 * 12 * known_models()["deepseek-v3"].parameters / 256 / 20
VERL_SYNC = 13.9  # GB/s: Qwen3-30B-A3B from 16 devices to 16 in 4.4 s
PARTIAL = 8  # steps: a completion continues with new weights, so that no step waits for the longest
SKYRL_NOTE = "prompt taken as 200 tokens; the script of the 30B row has micro-batches of one sequence"
LENGTHS = "the mean length is not published"
SEARCHED = "neither micro-batches nor tokens that searches return are published"
A3B, A22B, V3 = "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3"
_30B = {"sequences": 2048, "group": 32, "longest": 4096, "updates": 4, "again": False}
_235B = {"sequences": 512, "group": 32, "longest": 8192, "updates": 1, "again": True}
_V3 = {"sequences": 512, "group": 16, "longest": 1536, "updates": 1, "again": True}

ROWS: tuple[Row, ...] = (
    _nemo("Llama-3.1-8B", "llama-3.1-8b", "16xH100-80G", (1, 1, 1, 2), 1,
          _lengths(2048, 32, 1060, 4096, 4, again=True), 97.7, ranks=16, engines=16, fitted=True, version="v0.4"),
    _nemo("Llama-3.1-8B, 1 off", "llama-3.1-8b", "16xH100-80G", (1, 1, 1, 2), 1,
          _lengths(2048, 32, 1129, 4096, 4, again=True), 74.6, ranks=8, engines=8, version="v0.4"),
    _nemo("Qwen3-32B", "qwen3-32b", "32xH100-80G", (4, 1, 1, 4), 4,
          _lengths(2048, 32, 3206, 4096, 4, again=False), 393, ranks=32, engines=8, version="v0.4"),
    _nemo("Qwen3-32B, 1 off", "qwen3-32b", "64xH100-80G", (4, 1, 1, 4), 4,
          _lengths(2048, 32, 3207, 4096, 4, again=False), 215, ranks=32, engines=8, version="v0.4"),
    _nemo("Qwen3-30B-A3B", A3B, "32xH100-80G", (1, 1, 8, 1), 2, _lengths(mean=3203, **_30B), 192, ranks=32, engines=16,
          fitted=True),
    _nemo("Qwen3-30B-A3B, 1 off", A3B, "32xH100-80G", (1, 1, 8, 2), 2, _lengths(mean=3201, **_30B | {"updates": 1}),
          152, ranks=16, engines=8),
    _nemo("Qwen3-30B-A3B, 8 off", A3B, "192xH100-80G", (1, 1, 8, 1), 2, _lengths(mean=3206, **_30B), 34.5, ranks=128,
          engines=32),
    _nemo("Qwen3-30B-A3B, GB200", A3B, "16xGB200-186G", (1, 1, 16, 1), 1, _lengths(mean=3199, **_30B), 221, ranks=16,
          engines=16),
    _nemo("Qwen3-235B-A22B, 128", A22B, "128xH100-80G", (2, 2, 16, 8), 16, _lengths(mean=5698, **_235B), 395, ranks=128,
          engines=8),
    _nemo("Qwen3-235B-A22B, 256", A22B, "256xH100-80G", (2, 2, 16, 8), 16, _lengths(mean=5713, **_235B), 312, ranks=256,
          engines=16),
    _nemo("Qwen3-235B-A22B, 1 off", A22B, "256xH100-80G", (4, 1, 16, 8), 8, _lengths(mean=5721, **_235B), 231,
          ranks=128, engines=16),
    _nemo("DeepSeek-V3, 256", V3, "256xH100-80G", (1, 1, 16, 16), 32, _lengths(mean=701, **_V3), 134, ranks=256,
          engines=8),
    _nemo("DeepSeek-V3, 512", V3, "512xH100-80G", (1, 1, 16, 16), 32, _lengths(mean=697, **_V3), 111, ranks=512,
          engines=16),
    _nemo("DeepSeek-V3, 1 off", V3, "512xH100-80G", (1, 1, 16, 16), 32, _lengths(mean=710, **_V3), 64.1, ranks=256,
          engines=8),
    *(_nemo(f"{name}, v0.4", model, devices, split, tensor, _lengths(mean=mean, **load), step, ranks=ranks,
            engines=engines, version="v0.4", lag=lag)
      for name, model, devices, split, tensor, mean, load, step, ranks, engines, lag in (
          ("Qwen3-30B-A3B", A3B, "32xH100-80G", (2, 1, 8, 1), 4, 3154, _30B, 225, 32, 8, 0),
          ("Qwen3-30B-A3B, 1 off", A3B, "32xH100-80G", (1, 1, 8, 2), 2, 3158, _30B, 244, 16, 8, 1),
          ("Qwen3-235B-A22B, 128", A22B, "128xH100-80G", (2, 2, 16, 8), 16, 5671, _235B, 506, 128, 8, 0),
          ("Qwen3-235B-A22B, 1 off", A22B, "256xH100-80G", (4, 1, 16, 8), 8, 5691, _235B, 241, 128, 16, 1),
          ("DeepSeek-V3, 256", V3, "256xH100-80G", (1, 1, 16, 16), 32, 745, _V3, 154, 256, 8, 0),
          ("DeepSeek-V3, 1 off", V3, "512xH100-80G", (1, 1, 16, 16), 32, 744, _V3, 77.9, 256, 8, 1))),
    _of_verl(32, 0, 13 + 44 / 60, (801.8, 790.1), fitted=True),
    _of_verl(64, 0, 10 + 22 / 60, (373.8, 365.3)),
    _of_verl(128, 0, 8 + 36 / 60, (367.2, 356.3)),
    _of_verl(32, 16, 7 + 58 / 60, (300.9, 294.8)),
    _of_verl(64, 32, 4 + 57 / 60, (195.0, 189.3)),
    _of_verl(128, 64, 3 + 13 / 60, (156.3, 150.6)),
    Row("Qwen3-30B-A3B-Base, 128", VERL, A3B, "128xH20-96G",
        {"ranks": 128, "engines": 32, "engine_devices": 4, "tensor_parallel": 2, "context_parallel": 2,
         "expert_parallel": 8, "kind": "replicate"},
        {"sequences": 8192, "group": 16, "prompt": 150, "mean": MEAN_30B, "longest": 8192, "updates": 4, "forwards": 2,
         "micro_tokens": 20_480, "engine": EngineSettings(eager=True)},
        {"step": 498, "generate": 348, "forward": 50, "update": 86}, {"publish": VERL_SYNC, "head": CROSS_ENTROPY},
        note="generation depends on the longest alone: its script runs vLLM without CUDA graphs",
        apart=dict.fromkeys(("step", "forward", "update"), LENGTHS)),
    Row("Qwen3-30B-A3B-Base, 32 + 96", VERL, A3B, "128xH20-96G",
        {"ranks": 32, "engines": 24, "engine_devices": 4, "tensor_parallel": 2, "context_parallel": 2,
         "expert_parallel": 8, "kind": "replicate", "colocated": False},
        {"sequences": 8192, "group": 16, "prompt": 150, "mean": MEAN_30B, "longest": 8192, "updates": 4, "forwards": 1,
         "micro_tokens": 20_480, "lag": PARTIAL, "concurrent": 12_288, "engine": EngineSettings(eager=True)},
        {"step": 283}, {"publish": VERL_SYNC, "head": CROSS_ENTROPY}, apart={"step": LENGTHS}),
    *(Row(f"{model}, {backend}", SKYRL, model.lower(), devices,
          {"ranks": ranks, "param_dtype": "bfloat16", **split},
          {"sequences": 2560, "group": 5, "prompt": 200, "mean": mean, "longest": 4096, "updates": 2, "forwards": 2,
           "micro_tokens": micro},
          {"update": update, "forward": forward}, {"head": CROSS_ENTROPY}, note=SKYRL_NOTE,
          apart={"update": SEARCHED, "forward": SEARCHED})
      for model, backend, devices, ranks, split, mean, micro, update, forward in (
          ("Qwen2.5-3B", "FSDP", "8xH100-80G", 8, {}, 658, 16_384, 42, 28),
          ("Qwen2.5-7B", "FSDP", "8xH100-80G", 8, {}, 834, 16_384, 100, 33),
          ("Qwen3-30B-A3B", "Megatron", "32xH100-80G", 32, {"tensor_parallel": 2, "expert_parallel": 8,
           "kind": "replicate"}, 1158, 1358, 189, 145))),
)  # fmt: skip


def _titan(
    name: str, model: str, devices: int, batch: int, length: int, speed: float, memory: float | None,
    split: dict[str, Any], *, again: bool = False, file: str, fitted: bool = False, times: float = 1.0, note: str = "",
    kept: str = "",
) -> Row:  # fmt: skip
    """A row of torchtitan, which only trains: sequences of one length, tokens per second per device converted to
    seconds of an update."""
    groups = devices // (split.get("tensor_parallel", 1) * split.get("context_parallel", 1))
    tokens = batch * length * groups
    load = {
        "sequences": batch * groups, "group": 1, "prompt": 0, "mean": length, "longest": length, "forwards": 0,
        "micro_tokens": batch * length, "checkpointing": again,
    }  # fmt: skip
    figures = {"update": tokens / speed / devices} | ({} if memory is None else {"memory": memory})
    device = f"{devices}xH100-96G"
    layout = {"ranks": devices, "param_dtype": "bfloat16", **split}
    chunk = batch * length  # logits are computed in one piece
    rates = {"head": CROSS_ENTROPY} | ({"times": times} if times != 1 else {})
    apart = {"memory": kept} if kept else {}
    if split.get("context_parallel", 1) > 1:
        apart["update"] = "its ranks pass keys and values on, ours exchange heads"
    return Row(name, TITAN + file, model, device, layout, load, figures, rates, chunk, 0, fitted, note, apart)


LLAMA, ASYNC, CP = "llama3_h100_202412_torchtitan.md", "asyncTP_llama3_h100_2025-06_torchtitan.md", "of fp8 and compile"
SELECTED = "some operations of a layer are computed again there, here all or none"
FP8 = 8532 / 5762  # speedup of the first row by fp8 and torch.compile
ROWS += (
    _titan("Llama-3.1-8B, FSDP 8", "llama-3.1-8b", 8, 2, 8192, 5762, 82.4, {}, file=LLAMA, fitted=True, kept=SELECTED),
    _titan("Llama-3.1-8B, FSDP 128", "llama-3.1-8b", 128, 2, 8192, 5605, 67.0, {}, file=LLAMA, kept=SELECTED),
    _titan("Llama-3.1-8B, FSDP 8 × TP 8", "llama-3.1-8b", 64, 12, 8192, 4378, None, {"tensor_parallel": 8}, file=ASYNC),
    _titan("Llama-3.1-70B, FSDP 32 × TP 8", "llama-3.1-70b", 256, 16, 8192, 597, 71.9, {"tensor_parallel": 8},
           again=True, file=ASYNC, kept="states between layers are split over the tensor group there, here whole"),
    *(_titan(f"Llama-3.1-8B, CP {cp}, {cp * 32} K", "llama-3.1-8b", 8, 1, cp * 32_768, speed, 84.0,
             {"context_parallel": cp}, again=True, file=LLAMA, times=FP8, fitted=cp == 1,
             note="products faster by fp8 and compile as in its 8 K row; memory is what the allocator held")
      for cp, speed in ((1, 3890), (2, 2540), (4, 1071), (8, 548))),
)  # fmt: skip


def _prime(
    model: str, devices: str, length: int, seconds: float, memory: float, *, attention: str = "flash3",
    supervised: bool = False, adapter: int = 0, fitted: bool = False,
) -> Row:  # fmt: skip
    """A row of prime-rl: an update of two micro-batches a device, each one sequence, with layers that are compiled and
    recomputed. `step_time` of its files is that of the update; their throughput also counts the writing of weights in
    between. Memory is what the allocator held. Supervised training has the logits of a micro-batch at once, RL 2,048
    columns of the vocabulary at a time."""
    count, facts = int(devices.partition("x")[0]), known_models()[model]
    load = {
        "sequences": 2 * count, "group": 1, "prompt": 0, "mean": length, "longest": length, "forwards": 0,
        "micro_tokens": length, "checkpointing": True, "attention": attention, "compiled": True, "generates": False,
    }  # fmt: skip
    if supervised:
        chunk = length
    else:
        chunk = max(1, 2048 * length // facts.vocabulary)
    if supervised:
        kind = "SFT"
    elif adapter:
        kind = "LoRA"
    else:
        kind = "RL"
    name = f"{model}, {kind}, {length // 1024} K"
    figures = {"update": seconds, "memory": memory}
    if supervised:
        apart = {"memory": LOGITS}
    elif adapter:
        apart = {"update": ADAPTERS}
    else:
        apart = {}
    split = {"ranks": count, "param_dtype": "bfloat16"}
    rates = {"head": CROSS_ENTROPY} if supervised else {}
    return Row(name, PRIME, model, devices, split, load, figures, rates, chunk, adapter, fitted, apart=apart)


LOGITS = "all logits of a micro-batch in float32 at once, by a loss that proxima does not have"
ADAPTERS = "it has four adapters at once, which take it longer than the gradients of all weights (4.4 s at 16 K)"
RANK_16 = 33_030_144  # weights of an adapter of rank 16 on every projection of Qwen3-4B
H100, H200, FOUR = "8xH100-80G", "8xH200-141G", "qwen3-4b"
ROWS += (
    _prime(FOUR, H100, 16_384, 4.688, 17.10, fitted=True),
    _prime(FOUR, H100, 65_536, 30.286, 36.10, fitted=True),
    _prime(FOUR, H200, 16_384, 4.415, 17.10),
    _prime(FOUR, H200, 65_536, 29.889, 36.10),
    _prime(A3B, H100, 16_384, 8.174, 74.59),
    _prime(A3B, H200, 16_384, 7.401, 74.59),
    _prime(A3B, H200, 65_536, 42.891, 105.35),
    _prime("qwen3-0.6b", "1xH100-80G", 16_384, 1.992, 12.53, fitted=True),
    _prime("qwen3-0.6b", "1xH100-80G", 65_536, 12.176, 19.56),
    _prime(FOUR, H100, 16_384, 5.015, 54.63, attention="flash2", supervised=True),
    _prime(FOUR, H200, 16_384, 4.707, 54.63, attention="flash2", supervised=True),
    _prime(A3B, H200, 16_384, 7.173, 106.42, supervised=True),
    _prime("qwen3-0.6b", "1xH100-80G", 8_192, 0.623, 31.74, supervised=True),
    _prime("qwen3-0.6b", "1xH100-80G", 16_384, 1.282, 52.84, supervised=True, fitted=True),
    _prime(FOUR, H100, 16_384, 5.380, 10.26, adapter=RANK_16),
    _prime(FOUR, H100, 65_536, 32.001, 28.85, adapter=RANK_16),
    _prime(FOUR, H200, 16_384, 5.005, 10.26, adapter=RANK_16),
    _prime(FOUR, H200, 65_536, 31.425, 28.85, adapter=RANK_16),
)


def with_mean(row: Row, mean: float) -> Row:
    """Return the row with another mean length."""
    return replace(row, load=row.load | {"mean": mean})
