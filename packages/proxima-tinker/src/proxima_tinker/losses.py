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

`keep` in the outputs of ppo and cispo is 0 where a bound applies.

Source: the SDK's documentation of its losses. Differs: `dro` without `beta` is refused, since no default is documented;
an unknown key of the config is refused.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import yaml
from torch import Tensor

from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima.config.resolved import dump
from proxima.config.sections.algorithm import AlgorithmConfig
from proxima.core.loss import policy_loss
from proxima.core.metrics import Metrics, on_host
from proxima.data import UserError, require
from proxima.data.errors import nearest
from proxima.data.policy_batch import PolicyBatch

LONGEST = 100  # characters of a key or a text
MOST_KEYS = 32  # of a config
FIELDS = ("surrogate", "correction", "penalty", "aggregate", "proximal")  # of an `algorithm`, for `loss_fn_config`


@dataclass(frozen=True, kw_only=True)
class LossResult:
    """loss [] with gradient; `outputs`, more values [N] for each target; statistics by name."""

    loss: Tensor
    outputs: dict[str, Tensor]
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What a loss reads: log_prob [N] or [N, K] with gradient, the columns of the same shape, and cu_seqlens [S+1], the
    ends of the examples."""

    log_prob: Tensor
    columns: Mapping[str, Tensor]
    cu_seqlens: Tensor

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.columns:
            raise UserError(f"this loss reads {name}, which loss_fn_inputs lacks")
        return self.columns[name]


class ClientLoss:
    """A loss by its name in the SDK.

    Attributes: `whole`, it depends on all examples of a request together; `algorithm`, what a run's config.yaml would
    say of it.

    Raises:
        UserError: unknown name or config; names it.
    """

    _compute: Callable[[Targets], LossResult]

    def __init__(self, name: str, config: Mapping[str, float | str]) -> None:
        self.name = name
        self.whole = "surrogate" in config or name == "gspo"
        if self.whole:
            core, self.algorithm = _core_algorithm(name, tuple(sorted(config.items())))
            self.name = self.algorithm["surrogate"]["kind"]
            self._compute = lambda targets: _core_loss(core, targets)
            return
        for key in sorted(config):
            near = _misspelt_field(key)
            if near:
                raise UserError(f"loss_fn_config: unknown {key!r:.40}; did you mean {near!r}?")
        if name not in NAMED:
            known = f"known are {', '.join(NAMED)}, gspo, and those by a `surrogate`"
            raise UserError(f"no loss {name!r:.40}; {_meant(name, (*NAMED, 'gspo')) or known}")
        compute, keys, told = NAMED[name]
        unknown = sorted(set(config) - set(keys))
        if unknown:
            raise UserError(f"loss_fn_config: {name} has no {unknown[0]!r:.40}; it has {', '.join(keys) or 'no keys'}")
        for key, value in config.items():
            require(not isinstance(value, str), f"loss_fn_config: {key}", value, "must be a number")
        numbers = keys | dict(config)
        if None in numbers.values():
            raise UserError("loss_fn_config: dro needs beta, the weight of its quadratic term")
        self.algorithm = {"surrogate": told(*numbers.values()), "aggregate": {"kind": "token_sum"}}
        self._compute = lambda targets: _summed(targets, *compute(targets, numbers))

    def __call__(self, targets: Targets) -> LossResult:
        result = self._compute(targets)
        if not bool(result.loss.detach().isfinite()):
            raise UserError(f"the loss is {float(result.loss.detach())}; nothing was accumulated")
        return result


def _summed(targets: Targets, per_token: Tensor, keep: Tensor | None = None) -> LossResult:
    if "mask" in targets.columns:
        per_token = per_token * targets.columns["mask"]
    outputs = {} if keep is None else {"keep": keep}
    return LossResult(loss=per_token.sum(dtype=torch.float64), outputs=outputs)


Numbers = Mapping[str, float]
PerToken = tuple[Tensor, Tensor | None]  # the loss, and where no bound applies; None: the loss has none


def _cross_entropy(b: Targets, config: Numbers) -> PerToken:
    return -b["weights"] * b.log_prob, None


def _ratio(b: Targets) -> Tensor:
    return (b.log_prob - b["logprobs"]).exp()


def _clamped(b: Targets, ratio: Tensor, config: Numbers) -> Tensor:
    low, high = (b.columns.get(name, torch.full_like(ratio, config[name]).detach()) for name in CLIP)
    return ratio.clamp(low, high)


def _importance_sampling(b: Targets, config: Numbers) -> PerToken:
    return -_ratio(b) * b["advantages"], None


def _ppo(b: Targets, config: Numbers) -> PerToken:
    ratio = _ratio(b)
    advantage = b["advantages"]
    free = ratio * advantage
    clipped = _clamped(b, ratio, config) * advantage
    return -torch.minimum(free, clipped), free <= clipped


def _cispo(b: Targets, config: Numbers) -> PerToken:
    ratio = _ratio(b)
    clamped = _clamped(b, ratio, config).detach()
    return -clamped * b.log_prob * b["advantages"], clamped == ratio


def _dro(b: Targets, config: Numbers) -> PerToken:
    return -(b.log_prob * b["advantages"] - config["beta"] / 2 * (b.log_prob - b["logprobs"]).square()), None


def _clip(kind: str, low: float, high: float) -> dict[str, Any]:
    # rounded: the difference of two decimals is not the decimal that was meant
    return {"kind": kind, "epsilon_low": round(1 - low, 9), "epsilon_high": round(high - 1, 9)}


CLIP: dict[str, Any] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
# by name: the loss, keys of its config with their defaults, and the surrogate that has the same gradient
NAMED: dict[str, tuple[Callable[[Targets, Numbers], PerToken], dict[str, Any], Callable[..., Any]]] = {
    "cross_entropy": (_cross_entropy, {}, lambda: None),
    "importance_sampling": (_importance_sampling, {}, partial(_clip, "ppo_clip", 0.0, float("inf"))),
    "ppo": (_ppo, CLIP, partial(_clip, "ppo_clip")),
    "cispo": (_cispo, CLIP, partial(_clip, "cispo")),
    "dro": (_dro, {"beta": None}, lambda beta: {"kind": "dro", "beta": beta}),
}


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Of a recipe the part with the loss."""

    algorithm: AlgorithmConfig


def _meant(name: str, names: Iterable[str]) -> str:
    """`did you mean 'cispo'?`; empty if no name is near."""
    near = nearest(name[:LONGEST], names)
    if near:
        return f"did you mean {near!r}?"
    return ""


def _misspelt_field(key: str) -> str | None:
    """The one of `FIELDS` that a key such as `surogate` or `surogate.delta` begins with, misspelt; None for others."""
    slot = key[:LONGEST].partition(".")[0]
    return None if slot in FIELDS else nearest(slot, FIELDS)


@lru_cache(64)
def _core_algorithm(name: str, config: tuple[tuple[str, float | str], ...]) -> tuple[AlgorithmConfig, dict[str, Any]]:
    """A loss of `proxima.core` by fields of a recipe's `algorithm`, and these as in its config.yaml; `aggregate` is
    `token_sum` by default. `proximal` is the centre: `behavior`, the policy that sampled, or `recompute`, the policy of
    this pass, for a first update; `proximal_logprobs` in the examples are any other."""
    asked: dict[str, float | str] = {"aggregate": "token_sum"}
    if name == "gspo":
        asked["surrogate"] = "gspo"
    asked |= dict(config)
    if len(asked) > MOST_KEYS:
        raise UserError(f"loss_fn_config has {len(config)} keys; at most {MOST_KEYS}")
    tree: dict[str, dict[str, Any]] = {}
    for key, value in sorted(asked.items()):
        slot, _, inner = key.partition(".")
        if slot not in FIELDS or inner == "kind" or len(key) > LONGEST:
            unknown = f"loss_fn_config: unknown {key!r:.40}"
            meant = _meant(slot, FIELDS)
            if meant:
                unknown += f"; {meant}"
            raise UserError(unknown)
        if isinstance(value, str) and (":" in value or len(value) > LONGEST):  # a kind outside the table is code
            raise UserError(f"loss_fn_config: no {key} {value!r:.60}; see proxima list {slot}")
        tree.setdefault(slot, {})[inner or "kind"] = _plain(value)
    written = {}
    for slot, own in tree.items():
        written[slot] = own["kind"] if own.keys() == {"kind"} else own
    try:
        found = resolve({"algorithm": written}, root=LossConfig, import_code=False)
    except ConfigError as error:
        reason = " ".join(str(error).split()).replace("algorithm.", "").replace(" (mapping)", "")
        raise UserError(f"loss_fn_config: {reason:.1000}") from None
    algorithm = found.config.algorithm
    if algorithm.proximal not in ("behavior", "recompute"):
        raise UserError(f"loss_fn_config: proximal={algorithm.proximal!r} must be behavior or recompute")
    told = yaml.safe_load(dump(found))["algorithm"]
    return algorithm, {field: told[field] for field in FIELDS}


def _plain(value: float | str) -> float | str:
    """The SDK sends whole numbers as floats, and true and false as texts."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value, value)
    return value


def _core_loss(algorithm: AlgorithmConfig, b: Targets) -> LossResult:
    if b.log_prob.dim() > 1:
        raise UserError("a loss by a surrogate takes one target a position")
    behavior = b["logprobs"]
    advantage = b["advantages"]
    if algorithm.proximal == "behavior":
        centre = behavior
    else:
        centre = b.log_prob.detach()
    if "mask" in b.columns:
        mask = b.columns["mask"] > 0
    else:
        mask = (advantage != 0) | (behavior != 0)
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
        result = policy_loss(
            batch,
            surrogate=algorithm.surrogate,
            aggregate=algorithm.aggregate,
            correction=algorithm.correction,
            penalty=algorithm.penalty,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    return LossResult(loss=result.value, outputs={"keep": result.keep}, metrics=on_host(result.metrics))
