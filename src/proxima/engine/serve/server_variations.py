"""The settings of servers that may move their log-probs, by the kind of server; see `EngineSpec.variations`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from proxima.engine.serve.launch import Serve, devices_of_server, has_gpu
from proxima.engine.variations import NO_GRAPHS, Variation, variation

RUNNING = "the server is running already; give engine.serve, and proxima starts one for each setting"
NO_GPU = "this machine has no GPU"
ONE_DEVICE = "the recipe's server has one device"
PLAIN_CACHE = "the recipe's cache is not quantised"
PLAIN_WEIGHTS = "the recipe's weights are not quantised"


def vllm_variations(spec: Any) -> list[Variation]:
    """Those of `vllm serve`."""
    serve = spec.serve or Serve()
    given = serve.arguments
    backend = "TRITON_ATTN"
    if option_of(given, "--attention-backend") == "TRITON_ATTN":
        backend = "FLASH_ATTN"
    prefix_cache = _served("prefix cache: off", "--no-enable-prefix-caching")
    if "--no-enable-prefix-caching" in given:
        prefix_cache = _served("prefix cache: on", "--enable-prefix-caching")
    head = ("--hf-overrides", '{"head_dtype": "float32"}')
    of_kind = [
        prefix_cache,
        _served("chunked prefill: off", "--no-enable-chunked-prefill"),
        _served("batch: one sequence", "--max-num-seqs", "1"),
        _served("output head: float32", *head),
        _served(f"attention backend: {backend}", "--attention-backend", backend, why_not=_no_gpu()),
        _served("batch invariance: on", why_not=_no_gpu(), variables={"VLLM_BATCH_INVARIANT": "1"}),
        _served("TP: 1", "--tensor-parallel-size", "1", why_not=_one_device(given)),
    ]
    return _of_servers(spec, [*_of_any(serve), *of_kind, *_quantised(spec, given)])


def sglang_variations(spec: Any) -> list[Variation]:
    """Those of `sglang serve`."""
    serve = spec.serve or Serve()
    given = serve.arguments
    backend = "triton"
    if option_of(given, "--attention-backend") == "triton":
        backend = "flashinfer"
    cached = None
    if "--disable-radix-cache" in given:
        cached = "already off in the recipe"
    of_kind = [
        _served("prefix cache: off", "--disable-radix-cache", why_not=cached),
        _served("chunked prefill: off", "--chunked-prefill-size", "-1"),
        _served("batch: one sequence", "--max-running-requests", "1"),
        _served("output head: float32", "--enable-fp32-lm-head"),
        _served(f"attention backend: {backend}", "--attention-backend", backend, why_not=_no_gpu()),
        _served("batch invariance: on", "--enable-deterministic-inference", why_not=_no_gpu()),
        _served("TP: 1", "--tensor-parallel-size", "1", why_not=_one_device(given)),
    ]
    return _of_servers(spec, [*_of_any(serve), *of_kind, *_quantised(spec, given)])


def option_of(arguments: Sequence[str], name: str) -> str | None:
    """The last value of an option among a server's arguments; None if it is not there."""
    found = None
    for word, after in zip(arguments, [*arguments, ""][1:], strict=True):
        option, equals, value = word.partition("=")
        if option == name:
            found = value if equals else after
    return found


def _of_any(serve: Serve) -> list[Variation]:
    """Those of the fields that every server has."""
    dtype = "bfloat16" if serve.dtype == "float32" else "float32"
    graphs = _served("CUDA graphs: off", why_not=_no_graphs(), eager=True)
    if serve.eager:
        graphs = _served("CUDA graphs: on", why_not=_no_graphs(), eager=False)
    return [_served(f"dtype: {dtype}", dtype=dtype), graphs]


def _quantised(spec: Any, given: Sequence[str]) -> list[Variation]:
    """Those that undo a quantisation."""
    cache = option_of(given, "--kv-cache-dtype")
    plain_cache = PLAIN_CACHE if cache in (None, "auto") else None
    plain_weights = PLAIN_WEIGHTS if spec.quantization is None else None
    return [
        _served("quantised cache: off", "--kv-cache-dtype", "auto", why_not=plain_cache),
        variation("quantised weights: off", plain_weights, quantization=None),
    ]


def _served(
    name: str, *arguments: str, why_not: str | None = None, variables: dict[str, str] | None = None, **values: Any
) -> Variation:
    """A variation in `serve`: more arguments of the server, of which the last of an option counts, variables and
    fields."""

    def change(spec: Any) -> Any:
        serve: Serve = spec.serve
        every_variable = dict(serve.variables)
        if variables is not None:
            every_variable |= variables
        every_argument = (*serve.arguments, *arguments)
        changed = replace(serve, arguments=every_argument, variables=every_variable, **values)
        return replace(spec, serve=changed)

    return Variation(name=name, change=change, why_not=why_not)


def _of_servers(spec: Any, variations: Sequence[Variation]) -> list[Variation]:
    """The variations, with a reason for each if the servers are running: they can't be changed."""
    if spec.serve is not None:
        return list(variations)
    return [replace(each, why_not=RUNNING) for each in variations]


def _no_gpu() -> str | None:
    return None if has_gpu() else NO_GPU


def _no_graphs() -> str | None:
    return None if has_gpu() else NO_GRAPHS


def _one_device(given: Sequence[str]) -> str | None:
    return None if devices_of_server(given) > 1 else ONE_DEVICE
