"""The losses of a request: those that the SDK names, and, with `loss_fn_config={"surrogate": …}`, those of
`proxima.core`.

The SDK's own are sums over all targets, with p = exp(log_prob), q = exp(logprobs), r = p / q:

    cross_entropy         -Σ weights · log p
    importance_sampling   -Σ r · A
    ppo                   -Σ min(r A, clip(r, low, high) A)
    cispo                 -Σ sg(clip(r, low, high)) · log p · A
    dro                   -Σ (log p · A - β/2 (log r)²)

low and high are `clip_low_threshold` and `clip_high_threshold`, .8 and 1.2 unless the config or the example gives
others; β is `beta`, which has no default. A `mask` in an example multiplies the loss of each token.

Source: the SDK's documentation of its losses. Differs: `dro` without `beta` is refused, since no default is documented;
an unknown key of the config is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

import torch
from torch import Tensor

from proxima.core.aggregate import AGGREGATES
from proxima.core.correction import CORRECTIONS
from proxima.core.loss import policy_loss
from proxima.core.surrogate import SURROGATES
from proxima.data import FieldError, PolicyBatch, UserError
from proxima.data.errors import nearest

Config = Mapping[str, float | str]
Columns = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LossResult:
    """loss [] with gradient; metrics by name; `outputs`, more values [N] for each target."""

    loss: Tensor
    metrics: dict[str, float]
    outputs: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What a loss reads: log_prob [N] or [N, K] with gradient, the columns of the same shape, and cu_seqlens [S+1], the
    ends of the examples."""

    log_prob: Tensor
    columns: Columns
    cu_seqlens: Tensor

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.columns:
            raise UserError(f"this loss reads {name}, which loss_fn_inputs lacks")
        return self.columns[name]


class ClientLoss:
    """A loss by its name in the SDK. `whole`: it depends on all examples of a request together.

    Raises:
        UserError: unknown name or config; names it.
    """

    def __init__(self, name: str, config: Config) -> None:
        self.whole = by_surrogate(name, config)
        if self.whole:
            self._compute = _core_loss(name, config)
            return
        if name not in NAMED:
            raise UserError(f"no loss {name!r:.40}; known are {', '.join(NAMED)}, gspo, and those by a `surrogate`")
        compute, keys = NAMED[name]
        if unknown := sorted(set(config) - set(keys)):
            raise UserError(f"loss_fn_config: {name} has no {unknown[0]!r:.40}; it has {', '.join(keys) or 'no keys'}")
        numbers = {key: _number(key, value) for key, value in config.items()}
        self._compute = lambda targets: _summed(compute(targets, numbers), targets)

    def __call__(self, targets: Targets) -> LossResult:
        result = self._compute(targets)
        if not bool(result.loss.detach().isfinite()):
            raise UserError(f"the loss is {float(result.loss.detach())}; nothing was accumulated")
        return result


def by_surrogate(name: str, config: Config) -> bool:
    """True of a loss of `proxima.core`, which sees all examples of a request together."""
    return "surrogate" in config or name == "gspo"


def _summed(per_token: Tensor, targets: Targets) -> LossResult:
    if "mask" in targets.columns:
        per_token = per_token * targets.columns["mask"]
    loss = per_token.sum(dtype=torch.float64)
    return LossResult(loss=loss, metrics={"loss:sum": float(loss.detach())}, outputs={})


def _number(key: str, value: float | str) -> float:
    if isinstance(value, str):
        raise UserError(f"loss_fn_config: {key}={value!r} must be a number")
    return value


def _cross_entropy(b: Targets, config: Mapping[str, float]) -> Tensor:
    return -b["weights"] * b.log_prob


def _ratio(b: Targets) -> Tensor:
    return (b.log_prob - b["logprobs"]).exp()


def _bounds(b: Targets, config: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    low, high = (
        b.columns.get(name, torch.full_like(b.log_prob, config.get(name, default)).detach())
        for name, default in CLIP.items()
    )
    return low, high


def _importance_sampling(b: Targets, config: Mapping[str, float]) -> Tensor:
    return -_ratio(b) * b["advantages"]


def _ppo(b: Targets, config: Mapping[str, float]) -> Tensor:
    ratio, advantage = _ratio(b), b["advantages"]
    return -torch.minimum(ratio * advantage, ratio.clamp(*_bounds(b, config)) * advantage)


def _cispo(b: Targets, config: Mapping[str, float]) -> Tensor:
    return -_ratio(b).clamp(*_bounds(b, config)).detach() * b.log_prob * b["advantages"]


def _dro(b: Targets, config: Mapping[str, float]) -> Tensor:
    if "beta" not in config:
        raise UserError("loss_fn_config: dro needs beta, the weight of its quadratic term")
    return -(b.log_prob * b["advantages"] - config["beta"] / 2 * (b.log_prob - b["logprobs"]).square())


CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}  # keys of the config, and their defaults
NAMED: dict[str, tuple[Callable[[Targets, Mapping[str, float]], Tensor], tuple[str, ...]]] = {
    "cross_entropy": (_cross_entropy, ()),
    "importance_sampling": (_importance_sampling, ()),
    "ppo": (_ppo, tuple(CLIP)),
    "cispo": (_cispo, tuple(CLIP)),
    "dro": (_dro, ("beta",)),
}
PROXIMAL = ("behavior", "recompute")
SLOTS: dict[str, Mapping[str, Any]] = {"surrogate": SURROGATES, "correction": CORRECTIONS, "aggregate": AGGREGATES}


def _core_loss(name: str, config: Config) -> Callable[[Targets], LossResult]:
    """A loss of `proxima.core`: `surrogate`, `correction` and `aggregate` (by default `token_sum`) name kinds, and
    `surrogate.delta` a field of one. `proximal` is the centre: `behavior`, the policy that sampled, or `recompute`, the
    policy of this pass, for a first update; `proximal_logprobs` in the examples are any other."""
    specs = {slot: loss_spec(slot, kind, config) for slot, kind in chosen_kinds(name, config).items()}
    proximal = config.get("proximal", "behavior")
    if proximal not in PROXIMAL:
        raise UserError(f"loss_fn_config: proximal={proximal!r} must be {' or '.join(PROXIMAL)}")
    known = {"proximal", *SLOTS} | {f"{slot}.{field.name}" for slot, spec in specs.items() for field in fields(spec)}
    if unknown := sorted(set(config) - known):
        near = nearest(unknown[0], sorted(known))
        raise UserError(f"loss_fn_config: unknown {unknown[0]!r:.40}" + (f"; did you mean {near}?" if near else ""))

    def compute(b: Targets) -> LossResult:
        if b.log_prob.dim() > 1:
            raise UserError("a loss by a surrogate takes one target a position")
        behavior, advantage = b["logprobs"], b["advantages"]
        centre = behavior if proximal == "behavior" else b.log_prob.detach()
        mask = b.columns["mask"] > 0 if "mask" in b.columns else (advantage != 0) | (behavior != 0)
        batch = PolicyBatch(
            log_prob=b.log_prob,
            proximal_log_prob=b.columns.get("proximal_logprobs", centre),
            behavior_log_prob=behavior,
            reference_log_prob=b.columns.get("reference_logprobs"),
            advantage=advantage,
            loss_mask=mask,
            sampled=mask,
            cu_seqlens=b.cu_seqlens,
        )
        try:
            result = policy_loss(batch, **specs)
        except ValueError as error:
            raise UserError(str(error)) from error
        metrics = {f"{name.replace(':', '_')}:mean": number.value for name, number in result.metrics.items()}
        loss = result.value
        outputs = {"keep": result.keep.to(torch.float32)}
        return LossResult(loss=loss, metrics={"loss:sum": float(loss.detach()), **metrics}, outputs=outputs)

    return compute


def chosen_kinds(name: str, config: Config) -> dict[str, str]:
    """The kind in each slot of a loss of `proxima.core`."""
    defaults = {"aggregate": "token_sum"} | ({"surrogate": "gspo"} if name == "gspo" else {})
    return defaults | {slot: str(kind) for slot, kind in config.items() if slot in SLOTS}


def loss_spec(slot: str, kind: str, config: Config) -> Any:
    """The spec of a kind, with the fields that the config gives.

    Raises:
        UserError: unknown kind, or a value that a field refuses.
    """
    table = SLOTS[slot]
    if kind not in table:
        near = nearest(kind, sorted(table))
        remedy = f"did you mean {near}?" if near else f"see proxima list {slot}"
        raise UserError(f"loss_fn_config: no {slot} {kind!r}; {remedy}")
    cls = table[kind]
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in fields(cls):
        if (value := config.get(f"{slot}.{field.name}")) is None:
            continue
        if value in ("true", "false"):
            value = value == "true"
        elif isinstance(value, float) and hints[field.name] is int:
            value = int(value)
        values[field.name] = value
    try:
        return cls(**values)
    except FieldError as error:
        raise UserError(f"loss_fn_config: {slot}.{error}") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"loss_fn_config: {slot} {kind}: {error}") from error
