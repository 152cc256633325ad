"""Verifies that a server computes with the trainer's weights, by comparing log-probs of known tokens.

A server with the right weights differs only by rounding. As weights change little from step to step, a part of them
that is not updated can go unnoticed within that rounding. So the first weights that a server gets are a perturbed copy,
in which every tensor is moved so far that it alone moves the log-probs by about 0.1 to 0.3 nats. It shows that the
server loads all tensors; at later syncs vLLM's worker checks that every parameter was given, and the bound finds a
server that has stayed at weights too far from the trainer's.

Detected on SmolLM2-135M (272 tensors, 30 layers). float32, against vLLM 0.32 on a CPU: a tied head and each of six
single tensors that were not updated. bfloat16: bound and noise of the perturbed copy are 0.20 and 0.15 nats on average,
so a part is detected if it moves the log-probs by more than 0.13. Computed from the trainer's model, not tested on a
server: 67 of 74 single tensors do (median 0.22, least 0.10). Each token's row of embedding and head is scaled too
(`ROW_GAIN`): a stale head moves them by 3 to 4, a stale embedding by about 0.9.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from proxima.data import NotFiniteError, UserError
from proxima.data.columns import Floats, Ints
from proxima.data.image_tokens import PROBE
from proxima.data.packed_batch import pack
from proxima.data.trajectory import Trajectory
from proxima.engine.http.dialect import ServerFacts
from proxima.model.architecture import decoder_layers, parts, vision_parameters, weight_of
from proxima.model.attention import ATTENTION, hugging_face_name
from proxima.model.chat.encode import image_store_of
from proxima.model.images.image_inputs import ImageReader
from proxima.model.images.image_store import ImageStore
from proxima.model.log_prob import token_log_prob
from proxima.model.parallel.lending import lender_of, perturbing
from proxima.model.parallel.sharding import copies, own_slice

# Every model reads it with its own tokenizer: prose, numbers, code, other scripts, so that many rows of the embedding
# and all kinds of contexts are involved.
TEXT = """The committee met on the 14th of March 1987 and, after three hours, agreed on nothing but the date of its next
meeting. What is 17 + 26? 17 + 26 = 43, and 43 * 2 = 86. Water boils at 100 °C at sea level; on a mountain of 3,000 m it
boils at about 90 °C. def mean(values): return sum(values) / len(values)  # raises ZeroDivisionError for []
Der Zug nach Köln fährt um 8:15 Uhr. Le chat dort sur la chaise. 今日はいい天気です。 Привет, мир! {"name": "x"}
SELECT city, COUNT(*) FROM people WHERE age >= 18 GROUP BY city ORDER BY 2 DESC; Once upon a time there was a small,
curious fox who lived at the edge of a dark forest. Every evening she watched the lights of the village and asked
herself what people did with so much light. One night she went to see. Therefore, if x^2 = 9, then x = 3 or x = -3."""
CONTEXT = 8  # tokens of it at the start that only condition the others
MOVED = 2.0  # nats, root mean square: between the log-probs of the perturbed copy and the original
SMALLEST, LARGEST = 1e-3, 3.0  # perturbation of a tensor, in units of its root mean square
PERTURBED = 2.0  # factor of the bounds for the perturbed copy
ROUNDING, LARGEST_ROUNDING = 1.6, 3.0  # factors of `rounding`: the allowed distance of a server that rounds


@dataclass(frozen=True)
class Bound:
    """The allowed distance of the log-probs of a server with the right weights from the trainer's, nats over the
    tokens."""

    mean: float
    largest: float


# Measured over 256 tokens of SmolLM2-135M against vLLM 0.32 on a CPU (mean / largest, nats): float32 1e-5 / 1e-4,
# bfloat16 0.040 / 0.27. Four to ten times as much is allowed.
BOUNDS = {"float32": Bound(1e-3, 2e-2), "bfloat16": Bound(0.15, 1.5), "float16": Bound(0.05, 0.5)}
QUANTISED = Bound(0.5, 5.0)


def probe_tokens(tokenizer: Any, count: int, longest: int | None) -> Ints:
    """[T] int32: the ids of `TEXT`, repeated so that `count` are compared, or fewer if `longest` does not allow
    more; after those of an image, if prompts show images."""
    store: ImageStore | None = image_store_of(tokenizer)
    image = np.zeros(0, np.int32) if store is None else store.tokens(PROBE)
    ids = list(tokenizer(TEXT, add_special_tokens=False).input_ids)
    length = CONTEXT + count
    if longest is not None:
        length = min(length, longest - 1 - len(image))
    if length <= CONTEXT:
        reason = f"is too short for the {len(image) + CONTEXT + 2} tokens of the probe"
        raise UserError(f"a maximum length of {longest} {reason}", remedy="set a larger model.max_length")
    text = list(islice(cycle(ids), length))
    return np.concatenate([image, np.asarray(text, np.int32)])


def first_compared(tokens: Ints) -> int:
    """The place of the first token whose log-prob is compared; those before it are an image and its context."""
    places = np.flatnonzero(tokens < 0)
    if not len(places):
        return CONTEXT
    return int(places[-1]) + 1 + CONTEXT


def trainer_log_prob(module: nn.Module, tokens: Ints, images: Any = None, *, other: bool = False) -> Floats:
    """[T - first_compared] float32, nats: log-probs of the compared tokens under the module.

    A module of this process computes in the precision of its weights, without autocast. Of a sharded one they are a
    packed pass of the ranks, on their devices, in the precision in which they train.

    Args:
        images: the `ImageStore` of the prompts, if they show any.
        other: compute in bfloat16 what is otherwise in float32, and the other way round; see `rounding`.

    Raises:
        NotFiniteError: the module computes NaN or infinity.
    """
    lender = lender_of(module)
    with torch.no_grad():
        if lender is not None:
            log_prob = lender.everywhere(partial(_pass_of_ranks, tokens=tokens, other=other))
        elif other:
            with _in_other_dtype(module):
                log_prob = _log_prob(module, tokens, images)
        else:
            log_prob = _log_prob(module, tokens, images)
        values: Floats = log_prob.float().cpu().numpy()
    if not np.isfinite(values).all():
        raise NotFiniteError("the trainer's model gives log-probs that are not finite")
    return values


def precision_of(module: nn.Module) -> torch.dtype:
    """That of `trainer_log_prob`."""
    lender = lender_of(module)
    dtype = next(module.parameters()).dtype
    if lender is not None:
        if _has_float32(lender):
            dtype = lender.policy.compute_dtype
        else:
            dtype = torch.bfloat16
    return dtype


def _pass_of_ranks(lender: Any, *, tokens: Ints, other: bool = False) -> Tensor:
    """[T - first_compared] a packed pass of the tokens on every rank, with gradient where grad is enabled."""
    policy = lender.policy
    first = first_compared(tokens)
    item = Trajectory(group=0, prompt_tokens=tokens[:first], tokens=tokens[first:])
    trained_in = policy.compute_dtype
    try:
        if other:
            policy.compute_dtype = _other(trained_in)
        log_prob: Tensor = policy(policy.pack([item], replay=False)).need("log_prob")
    finally:
        policy.compute_dtype = trained_in
    return log_prob


def _log_prob(module: nn.Module, tokens: Ints, images: Any) -> Tensor:
    (backbone, head), first = parts(module), first_compared(tokens)
    weight = weight_of(head)
    ids = torch.as_tensor(tokens, dtype=torch.long, device=weight.device)
    if images is None:
        attention = "sdpa"
    else:
        attention = hugging_face_name("packed")
    with _plain(module, attention), torch.autocast(weight.device.type, enabled=False):
        if images is None:
            hidden = backbone(input_ids=ids[None], use_cache=False).last_hidden_state[0, first - 1 : -1]
        else:
            batch = pack([Trajectory(group=0, prompt_tokens=tokens[:first], tokens=tokens[first:])]).to(ids.device)
            reader = ImageReader(module, images, trained=True)  # nothing is kept, and gradients reach the tower
            hidden = ATTENTION["packed"](backbone, batch, images=reader.of_batch(batch))
        return token_log_prob(hidden, weight.to(hidden.dtype), ids[first:], bias=head.bias).log_prob


@contextmanager
def _plain(model: Any, attends: str) -> Iterator[None]:
    """Make the model's forward accept one sequence: no dropout, and this attention in the decoder."""
    decoder, _ = parts(model)
    modes = [(module, module.training) for module in model.modules()]
    attention = decoder.config._attn_implementation
    model.eval()
    if model._supports_sdpa:
        decoder.set_attn_implementation(attends)
    try:
        yield
    finally:
        if model._supports_sdpa:
            decoder.set_attn_implementation(attention)
        for module, training in modes:
            module.training = training


@contextmanager
def perturbed(
    module: nn.Module, tokens: Ints, images: Any = None, names: Sequence[str] | None = None
) -> Iterator[None]:
    """Inside this context every weight tensor is perturbed at random, so that each alone would move the log-probs of
    the tokens about as much as any other (`strengths`); afterwards all are restored exactly.

    Args:
        names: of the parameters that are perturbed; None: all.
    """
    amounts = strengths(module, tokens, images, names)
    with perturbing(module, amounts):
        yield


def strengths(module: nn.Module, tokens: Ints, images: Any = None, names: Sequence[str] | None = None) -> list[float]:
    """For each parameter, the standard deviation of a random draw that moves the log-probs by the same root mean
    square.

    With f = sum_t e_t log_prob_t, e_t = +-1 at random, a draw of deviation a moves f by a |grad f|, and the log-probs
    by a |grad f| / sqrt(T) in the root mean square, to first order. 0 for the vision tower of a model that is shown no
    images, and for parameters that `names` leaves out.
    """
    lender = lender_of(module)
    if lender is None:
        count, squares = _squares(module, partial(_log_prob, module, tokens, images))
    else:
        count, squares = lender.everywhere(partial(_squares_of_ranks, tokens=tokens))
    parameters = dict(module.named_parameters())
    unread = set[int]()
    if images is None:
        unread.update(map(id, vision_parameters(module).values()))
    moved = len(parameters)
    if names is not None:
        unread.update(id(parameter) for name, parameter in parameters.items() if name not in set(names))
        moved = len(names)
    movement = MOVED * (count / moved) ** 0.5
    amounts = list[float]()
    for parameter, (slope, square) in zip(parameters.values(), squares, strict=True):
        if id(parameter) in unread:
            amounts.append(0.0)
            continue
        steep = float(slope**0.5)
        size = float((square / max(1, parameter.numel())) ** 0.5) or 1.0
        relative = movement / (steep * size) if steep else LARGEST
        amounts.append(size * min(max(relative, SMALLEST), LARGEST))
    return amounts


def _squares(
    module: nn.Module, log_prob: Callable[[], Tensor], shares: int = 1
) -> tuple[int, np.ndarray[Any, np.dtype[np.float64]]]:
    """The number of compared tokens, and [P, 2] for each parameter the sums of the squares of grad f (see `strengths`)
    and of its values, over this rank's slice. No more than one gradient is kept at a time.

    Args:
        shares: groups of ranks that each compute this pass, whose gradients are added.
    """
    parameters = list(module.parameters())
    before = [(parameter, parameter.requires_grad, parameter.grad) for parameter in parameters]
    slopes = dict[int, Tensor]()

    def measure(parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:
            slopes[id(parameter)] = _square(gradient)

    for parameter in parameters:
        parameter.grad = None
        parameter.requires_grad_(True)
    hooks = [parameter.register_post_accumulate_grad_hook(measure) for parameter in parameters]
    try:
        with torch.enable_grad():
            values = log_prob()
            generator = torch.Generator().manual_seed(0)
            signs = torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
            signed = (values * signs.to(values)).sum() / shares
            signed.backward()
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, needed, gradient in before:
            parameter.requires_grad_(needed)
            parameter.grad = gradient
    nothing = torch.zeros((), dtype=torch.float64, device=values.device)
    flat = list[Tensor]()
    for parameter in parameters:
        flat.append(slopes.get(id(parameter), nothing).to(values.device))
        flat.append(_square(parameter).to(values.device))
    return len(values), torch.stack(flat).cpu().numpy().reshape(-1, 2)


def _square(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(own_slice(tensor), dtype=torch.float32)
    return norm.double().square()


def _squares_of_ranks(lender: Any, *, tokens: Ints) -> tuple[int, np.ndarray[Any, np.dtype[np.float64]]]:
    """`_squares` over all ranks' slices, on rank 0."""
    ranks = lender.ranks
    sharded = lender.sharded
    lender.policy.sync_gradients(True)
    count, own = _squares(sharded, partial(_pass_of_ranks, lender, tokens=tokens), ranks.shares)
    own /= np.asarray([[copies(parameter, ranks.size)] for parameter in sharded.parameters()])
    return count, sum(ranks.gather(own))


def rounding(module: nn.Module, tokens: Ints, expected: Floats, images: Any = None) -> Bound | None:
    """The distance, in nats, by which bfloat16 moves the log-probs of a module: that expected of a server which
    computes in bfloat16. None for a sharded model whose weights the ranks have in bfloat16 alone."""
    lender = lender_of(module)
    if lender is not None and not _has_float32(lender):
        return None
    other = trainer_log_prob(module, tokens, images, other=True)
    away = np.abs(other.astype(np.float64) - expected)
    factor = 1.0
    if precision_of(module) == torch.bfloat16:  # the trainer rounds too, but differently
        factor = 2**0.5
    return Bound(factor * float(away.mean()), factor * float(away.max()))


def _has_float32(lender: Any) -> bool:
    sharding = lender.policy.loaded.sharding
    gathered = sharding.gathered_dtype or next(lender.sharded.parameters()).dtype
    return bool(gathered == torch.float32)


def _other(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.bfloat16 else torch.bfloat16


@contextmanager
def _in_other_dtype(module: nn.Module) -> Iterator[None]:
    """Within the block the module computes in bfloat16 what is otherwise in float32, and the other way round; each
    layer is converted while it runs."""
    dtype = _other(next(module.parameters()).dtype)
    layers = list(decoder_layers(module))
    inner = {id(parameter) for layer in layers for parameter in layer.parameters()}
    kept = dict[nn.Parameter, Tensor]()

    def convert(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.is_floating_point() and parameter not in kept:
                kept[parameter] = parameter.data
                parameter.data = parameter.data.to(dtype)

    def restore(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in kept:
                parameter.data = kept.pop(parameter)

    hooks = list[Any]()
    for layer in layers:
        own = list(layer.parameters())
        hooks.append(layer.register_forward_pre_hook(lambda *_, own=own: convert(own)))
        hooks.append(layer.register_forward_hook(lambda *_, own=own: restore(own)))
    try:
        convert(parameter for parameter in module.parameters() if id(parameter) not in inner)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        restore(list(kept))


def check_distance(url: str, weights: str, expected: Floats, reported: Floats, bound: Bound) -> dict[str, float]:
    """Return the distance of a replica's log-probs from the trainer's, nats: `probe_mean`, `probe_max`, with the
    bounds.

    Args:
        weights: the name of the loaded weights, for the message.

    Raises:
        UserError: the distance exceeds the bound.
    """
    away = np.abs(reported.astype(np.float64) - expected)
    mean = float(away.mean())
    largest = float(away.max())
    if not (mean <= bound.mean and largest <= bound.largest):  # NaN exceeds it too
        raise UserError(
            f"{url} does not compute with the weights of {weights}: its log-probs are {mean:.3g} nats from the"
            f" trainer's on average and {largest:.3g} at most, over {len(away)} known tokens; at most"
            f" {bound.mean:g} and {bound.largest:g} are expected",
            remedy="it ignored a part of the update, as vLLM on a CPU does with tied embeddings and with experts:"
            " start it with proxima engine serve, or with --worker-extension-cls"
            " proxima_vllm_worker.ProximaWorker, and check that it serves this model",
        )
    return {"probe_mean": mean, "probe_max": largest, "bound_mean": bound.mean, "bound_max": bound.largest}


def bound_of(facts: ServerFacts, mean: float | None, trainer: torch.dtype = torch.float32) -> Bound:
    """The bound for a server with the right weights.

    Args:
        mean: the user's bound of the mean; ten times as much is allowed for the largest distance.
        trainer: the precision of the trainer's log-probs; the bound is that of the coarser side.
    """
    if mean is not None:
        return Bound(mean, 10 * mean)
    if facts.quantization is not None:
        return QUANTISED
    server = BOUNDS.get(facts.dtype or "", BOUNDS["bfloat16"])
    return max(server, BOUNDS[str(trainer).removeprefix("torch.")], key=lambda bound: bound.mean)


def copy_bound(
    facts: ServerFacts, mean: float | None, trainer: torch.dtype = torch.float32, *, rounds: Bound | None
) -> Bound:
    """The bound for a server with the perturbed copy, which is more sensitive to rounding.

    Args:
        mean, trainer: as for `bound_of`.
        rounds: the `rounding` of the copy; None: not known.
    """
    general = bound_of(facts, mean, trainer)
    general = Bound(PERTURBED * general.mean, PERTURBED * general.largest)
    exact = facts.dtype == "float32" and trainer == torch.float32
    if mean is not None or facts.quantization is not None or exact or rounds is None:
        return general
    measured = Bound(ROUNDING * rounds.mean, LARGEST_ROUNDING * rounds.largest)
    if facts.dtype == "float16" and trainer != torch.bfloat16:  # it rounds an eighth as much
        return min(general, measured, key=lambda bound: bound.mean)
    return measured
