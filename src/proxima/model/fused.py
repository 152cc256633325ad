"""A training pass in C++ on a CPU, in bf16 on float32 weights: the decoder stack of plain Llama, Qwen2 and Qwen3, and
log-probs over the whole vocabulary in one pass over the logits each way. They compute what Hugging Face's modules and
torch compute under autocast, with few passes over memory between the products.

    x += delta;  h = norm(x);  qkv = h W_qkv;  a = attention(turn(qkv));  delta = a W_o
    x += delta;  h = norm(x);  [g, u] = h W_gu;  delta = (silu(g) u) W_down

The residual stream x is float32, as under autocast. Weights are cast once per pass, and the projections that read the
same states are one product. Fewer values are rounded to bf16 than by the modules: scores, silu(g) and the sums of the
gradients of q, k, v and of g, u stay float32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook as any_module_hook

from proxima.data.packed_batch import PackedBatch, indices_of
from proxima.kernels.train_pass import HEAD, LANES, PackedSegments, TrainKernels, Turns, train_kernels
from proxima.model.recompute import recomputed, recomputes

PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
FAMILIES = ("Llama", "Qwen2", "Qwen3")
COLUMNS = 128  # blocks of the vocabulary in a backward pass are multiples of this many tokens


def is_plain(backbone: nn.Module) -> bool:
    """True if the kernels of a training pass can run this stack, on a machine that has them."""
    model: Any = backbone
    family = next((name for name in FAMILIES if type(model).__name__ == f"{name}Model"), None)
    if family is None or not type(model).__module__.startswith("transformers.") or not len(model.layers):
        return False
    config = model.config
    head_dim = model.layers[0].self_attn.head_dim
    if config.hidden_size % LANES or config.intermediate_size % LANES or head_dim % HEAD:
        return False
    if config.hidden_act != "silu" or _hooked(model) or any_module_hook():
        return False
    if not all(_plain_layer(layer, family) for layer in model.layers):
        return False
    return bool(model.rotary_emb.inv_freq.numel() * 2 == head_dim)


def _plain_layer(layer: Any, family: str) -> bool:
    """True for a layer that is neither sharded nor adapted, windowed or hooked."""
    names = {"DecoderLayer", "Attention", "MLP", "RMSNorm"}
    for module in layer.modules():
        kind = type(module)
        expected = kind is nn.Linear or kind.__name__.removeprefix(family) in names or kind.__name__.startswith("SiLU")
        if not expected or _hooked(module):
            return False
    if any(p.dtype != torch.float32 or p.device.type != "cpu" for p in layer.parameters()):
        return False
    attention = layer.self_attn
    products = (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
    biased = any(product.bias is not None for product in products)
    windowed = hasattr(attention, "sliding_window") and attention.sliding_window
    return not (biased or windowed)


def _hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def fused_states(backbone: nn.Module, batch: PackedBatch) -> Tensor | None:
    """The states that predict the response tokens, [N, D] float32; None if the machine has no kernels. The stack is one
    that `is_plain` recognises."""
    model: Any = backbone
    attention = model.layers[0].self_attn
    kernels = train_kernels(attention.head_dim)
    if kernels is None:
        return None
    x = model.embed_tokens(batch.tokens)
    position = batch.position
    edges = torch.tensor(batch.edges, dtype=torch.long)
    parents = torch.tensor(batch.parents, dtype=torch.long)
    responses = _WholeResponses.of(batch)
    if responses is not None:
        position = position[responses.rows]
        edges = torch.tensor(responses.edges, dtype=torch.long)
        parents = torch.tensor(responses.parents, dtype=torch.long)
    cos, sin = model.rotary_emb(x, position[None])
    half = attention.head_dim // 2
    cos = cos[0, :, :half].contiguous()
    sin = sin[0, :, :half].contiguous()
    heads = attention.q_proj.out_features // attention.head_dim
    kv_heads = attention.k_proj.out_features // attention.head_dim
    segments = PackedSegments(edges, parents, heads, kv_heads, attention.scaling)
    delta: Tensor | None = None
    for layer in model.layers:
        run = partial(_layer_states, layer, kernels, cos, sin, segments, responses)
        if recomputes(layer):
            run = partial(recomputed, run)
        x, delta = run(x, delta)
    if delta is not None:
        x = x + delta
    states: Tensor = model.norm(x.index_select(0, batch.predict))
    return states


def _layer_states(
    layer: Any, kernels: TrainKernels, cos: Tensor, sin: Tensor, segments: PackedSegments,
    whole: "_WholeResponses | None", x: Tensor, delta: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The residual stream after attention, and what the MLP adds to it."""
    modules = {**dict(layer.self_attn.named_children()), **dict(layer.mlp.named_children())}
    qkv, out, gate_up, down = ([modules[name] for name in names] for names in PROJECTIONS)
    query_norm = None
    key_norm = None
    epsilon = 0.0
    if "q_norm" in modules:
        query_norm = modules["q_norm"].weight
        key_norm = modules["k_norm"].weight
        epsilon = modules["q_norm"].variance_epsilon
    turns = Turns(cos, sin, None, None, epsilon)
    x, h = _normed(kernels, x, delta, layer.input_layernorm)
    projected = _product(kernels, qkv, h)
    if whole is not None:
        projected = _laid_out(projected, whole.rows)
    seen = _attention(kernels, projected, query_norm, key_norm, turns, segments)
    if whole is not None:
        seen = seen.index_select(0, whole.own)
    x, h = _normed(kernels, x, _product(kernels, out, seen), layer.post_attention_layernorm)
    return x, _product(kernels, down, _product(kernels, gate_up, h), gated=True)


class _WholeResponses(NamedTuple):
    """A batch laid out for the attention kernel: prompts are whole, and each response continues only its own prompt;
    whatever prompts or responses share is repeated before each.

    rows: [E] index into L of each token of this layout. own: [L] index into E of each token of the batch. edges,
    parents: as in `PackedBatch`, of the same segments.
    """

    rows: Tensor
    own: Tensor
    edges: tuple[int, ...]
    parents: tuple[int, ...]

    @classmethod
    def of(cls, batch: PackedBatch) -> "_WholeResponses | None":
        """The layout of a batch; None where responses share only prompts."""
        if all(batch.parents[parent] < 0 for parent in batch.parents if parent >= 0):
            return None
        parents = list(batch.parents)
        prompts = dict(zip(batch.responses, batch.prompts, strict=True))
        rows = list[Tensor]()
        lengths = list[Tensor]()
        edges = [0]
        spans = pairwise(batch.edges)
        for g, (span, context) in enumerate(zip(spans, batch.contexts(), strict=True)):
            if g not in prompts:
                parents[g] = -1
            elif parents[g] in prompts:
                parents[g] = parents[parents[g]]  # which is a prompt by now
            prompt = prompts.get(g, ())
            rows.append(indices_of([*context[len(prompt) :], span]))
            end = edges[-1] + len(rows[-1])
            start, stop = span
            edges.append(end)
            lengths.append(torch.arange(end - (stop - start), end))
        return cls(torch.cat(rows), torch.cat(lengths), tuple(edges), tuple(parents))


class _LaidOut(torch.autograd.Function):
    """`x[rows]`; gradients of a row that occurs several times are summed in float32 before they are rounded."""

    apply: ClassVar[Callable[..., Tensor]]  # torch gives it no type

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (grad,) = gradients
        (rows,) = ctx.saved_tensors
        total = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        return total.index_add_(0, rows, grad.float()).to(grad.dtype), None


def _laid_out(x: Tensor, rows: Tensor) -> Tensor:
    return _LaidOut.apply(x, rows)


def _product(kernels: TrainKernels, layers: Sequence[nn.Linear], x: Tensor, *, gated: bool = False) -> Tensor:
    """x W' + b of linear layers that read the same states, as one product, in bf16; if `gated`, with silu(g) u for
    x = [g, u] in place of x."""
    weights: list[Tensor] = [layer.weight for layer in layers]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    with torch.no_grad():
        matrix = torch.cat([weight.bfloat16() for weight in weights])
        bias = torch.cat(biases).bfloat16() if biases else None
    out: Tensor = _apply_linear(x, kernels, matrix, bias, gated, len(weights), *weights, *biases)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernels: TrainKernels, matrix: Tensor, bias: Tensor | None, gated: bool, count: int,
        *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, matrix)
        ctx.kernels = kernels
        ctx.gated = gated
        ctx.rows = [len(each) for each in parameters[:count]]
        ctx.biased = len(parameters) > count
        if gated:
            x = kernels.swiglu(x)
        return F.linear(x, matrix, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        kernels: TrainKernels = ctx.kernels
        grad = grad.contiguous()
        grad_x = grad @ matrix
        if ctx.gated:
            grad_x, x = kernels.swiglu_backward(x, grad_x)
        grads: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 6)
        if any(ctx.needs_input_grad[6:]):
            of_matrix = _weight_grad(kernels, grad, x)
            grads = list(of_matrix.split(ctx.rows))
            if ctx.biased:
                grads += grad.float().sum(0).split(ctx.rows)
        return grad_x, None, None, None, None, None, *grads


_apply_linear: Any = _Linear.apply


def _weight_grad(kernels: TrainKernels, grad: Tensor, x: Tensor) -> Tensor:
    """[o, i] float32 = grad' x of [n, o] and [n, i]. A product that reads a transposed matrix takes twice as long as
    one that reads its copy: the smaller one is copied."""
    if grad.shape[1] <= x.shape[1]:
        return (kernels.transposed(grad) @ x).float()
    return kernels.transposed(kernels.transposed(x) @ grad, torch.empty(grad.shape[1], x.shape[1]))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, kernels: TrainKernels
    ) -> tuple[Tensor | None, Tensor]:
        ctx.set_materialize_grads(False)
        total, out, scale = kernels.norm(x, delta, weight, eps)
        ctx.save_for_backward(total, weight, scale)
        ctx.kernels = kernels
        ctx.added = delta is not None
        new_sum = total if ctx.added else None
        return new_sum, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor | None, grad: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, scale = ctx.saved_tensors
        if grad_sum is not None:
            grad_sum = grad_sum.contiguous()
        grads = ctx.kernels.norm_backward(grad.contiguous(), grad_sum, total, weight, scale, both=ctx.added)
        return *grads, None, None


def _normed(kernels: TrainKernels, x: Tensor, delta: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """x + delta, float32, and its norm."""
    apply: Any = _Norm.apply
    total, out = apply(x, delta, norm.weight, norm.variance_epsilon, kernels)
    if total is None:
        total = x
    return total, out


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, query_norm: Tensor | None, key_norm: Tensor | None, turns: Turns,
        segments: PackedSegments, kernels: TrainKernels,
    ) -> Tensor:  # fmt: skip
        turns = turns._replace(query_norm=query_norm, key_norm=key_norm)
        out, log_sum = kernels.attention(qkv, turns, segments)
        ctx.save_for_backward(qkv, out, log_sum, query_norm, key_norm)
        ctx.kernels = kernels
        ctx.turns = turns
        ctx.segments = segments
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, out, log_sum, query_norm, key_norm = ctx.saved_tensors
        turns = ctx.turns._replace(query_norm=query_norm, key_norm=key_norm)
        grad_qkv, norms = ctx.kernels.attention_backward(qkv, turns, ctx.segments, out, log_sum, grad.contiguous())
        of_query_norm = None
        of_key_norm = None
        if norms is not None:
            of_query_norm, of_key_norm = norms.unbind(0)
        return grad_qkv, of_query_norm, of_key_norm, None, None, None


def _attention(kernels: TrainKernels, qkv: Tensor, *more: Any) -> Tensor:
    apply: Any = _PackedAttention.apply
    out: Tensor = apply(qkv, *more, kernels)
    return out


def fused_log_prob(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: Tensor, entropy: bool, gradient: bool, chunk: int
) -> tuple[Tensor, Tensor] | None:
    """Log-probs and entropies, [N] float32 each, the latter empty unless wanted; None if the machine has no kernels.
    N > 0, inputs are float32, and the width of `weight` is a multiple of `LANES`.

    Raises:
        IndexError: a target is not a row of `weight`; kernels would read out of bounds.
    """
    kernels = train_kernels()
    if kernels is None:
        return None
    least, most = (int(end) for end in target.aminmax())
    if least < 0 or most >= len(weight):
        wrong = least if least < 0 else most
        raise IndexError(f"target {wrong} is not a token of a vocabulary of {len(weight)}")
    apply: Any = _FusedLogProb.apply
    result: tuple[Tensor, Tensor] = apply(
        hidden.contiguous(), weight, target.long().contiguous(), temperature.contiguous(), entropy, gradient, chunk,
        kernels,
    )  # fmt: skip
    return result


class _FusedLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor, temperature: Tensor, want_entropy: bool,
        entropy_gradient: bool, chunk: int, kernels: TrainKernels,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        h = hidden.bfloat16()
        w = _whole_lanes(weight)
        vocabulary = len(weight)
        log_z = torch.empty_like(temperature)
        log_prob = torch.empty_like(temperature)
        entropy = torch.empty_like(temperature) if want_entropy else temperature.new_empty(0)
        ctx.logits = None
        for at in range(0, len(h), chunk):
            span = slice(at, at + chunk)
            entropies = entropy[span] if want_entropy else None
            logits = _logits(h[span], w, vocabulary)
            kernels.log_prob(logits, temperature[span], target[span], log_z[span], log_prob[span], entropies)
            if len(h) <= chunk and any(ctx.needs_input_grad):  # the backward pass would compute the same ones
                ctx.logits = logits
            del logits
        kept_entropy = entropy if entropy_gradient else None
        ctx.save_for_backward(h, w, target, temperature, log_z, kept_entropy)
        ctx.chunk = chunk
        ctx.kernels = kernels
        ctx.vocabulary = vocabulary
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Over blocks of the vocabulary rather than of rows, so that no gradient of the head is added to another."""
        h, w, target, temperature, log_z, entropy = ctx.saved_tensors
        kernels: TrainKernels = ctx.kernels
        grad_h = torch.zeros(h.shape)
        grad_w = torch.empty(w.shape) if ctx.needs_input_grad[1] else None
        of_entropy = None if entropy is None else grad_entropy.contiguous()
        turned = kernels.transposed(h)
        grad = grad.contiguous()
        logits = ctx.logits
        ctx.logits = None  # overwritten by their gradient: a second pass computes them again
        block = max(1, ctx.chunk * len(w) // len(h) // COLUMNS) * COLUMNS
        for first in range(0, len(w), block):
            block_weight = w[first : first + block]
            if logits is None:
                d = _logits(h, block_weight, ctx.vocabulary - first)
            else:
                d = logits[:, first : first + block].contiguous()
            kernels.log_prob_backward(d, temperature, target, log_z, grad, entropy, of_entropy, first)
            grad_h.add_(d @ block_weight)
            if grad_w is not None:  # as [D, V]: a product that reads a transposed d takes twice as long
                kernels.transposed(turned @ d, grad_w[first : first + block])
        if grad_w is not None:
            grad_w = grad_w[: ctx.vocabulary]
        return grad_h, grad_w, None, None, None, None, None, None


def _whole_lanes(weight: Tensor) -> Tensor:
    """The head in bf16, with rows of 0 up to a multiple of LANES tokens, as kernels read the logits."""
    whole = weight.new_empty(-(-len(weight) // LANES) * LANES, weight.shape[1], dtype=torch.bfloat16)
    whole[: len(weight)] = weight
    whole[len(weight) :] = 0
    return whole


def _logits(hidden: Tensor, weight: Tensor, vocabulary: int) -> Tensor:
    """[n, W] of [n, D] and [W, D], -inf for those beyond the vocabulary: they have no probability and no gradient."""
    logits = F.linear(hidden, weight)
    logits[:, vocabulary:] = -torch.inf
    return logits
