"""SkyRL's `trainer.algorithm`: advantage, loss, its reduction, penalties, corrections, and what is left out."""

from typing import Any

from proxima_peers.convert import common
from proxima_peers.convert.draft import Draft, Fields
from proxima_peers.convert.options import Options

ALGORITHM = "trainer.algorithm."
CORRECTION = ALGORITHM + "off_policy_correction."
ESTIMATOR, LOSS, REDUCTION = (
    ALGORITHM + name for name in ("advantage_estimator", "policy_loss_type", "loss_reduction")
)
FILTER = ALGORITHM + "zero_variance_filter"
SAMPLED = ALGORITHM + "dynamic_sampling."
LIST = "algorithm.correction"
WITHOUT_CORRECTION = ("clip_cov", "kl_cov", "importance_sampling")  # SkyRL's losses that do not read the section


def is_older(o: Options) -> bool:
    """True for a file of `skyrl_train` up to 0.4, by its names of the engine's options: some defaults differ."""
    return any(name in o.flat for name in ("generator.backend", "generator.num_inference_engines"))


def algorithm(d: Draft, o: Options) -> None:
    """`algorithm`, with `algorithm.dynamic_sampling`."""
    _advantage(d, o)
    loss = _surrogate(d, o)
    _correction(d, o, loss)
    _aggregate(d, o)
    _penalties(d, o)
    _selection(d, o)


ESTIMATORS = {"grpo": "grpo", "gae": "gae", "rloo": "rloo", "loop": "rloo", "reinforce++": "reinforce_pp"}


def _advantage(d: Draft, o: Options) -> None:
    """`advantage_estimator`; one that SkyRL's registry got from the user is to fill in."""
    path = "algorithm.advantage"
    by_std = ALGORITHM + "grpo_norm_by_std"
    written = str(o.get(ESTIMATOR, default="grpo"))
    scaled = o.flag(by_std, default=True)
    unread = [ALGORITHM + "lambd", ALGORITHM + "gamma"]
    if written not in ESTIMATORS:
        if written == "maxrl":
            why = "divides by the group's mean"
        else:
            why = "an estimator of your own"
        d.ask(path, "grpo", f"{ESTIMATOR}: {written}: {why}; which advantage is near? `proxima list advantage`", True)
    else:
        d.spec(path, ESTIMATORS[written], o.origin(ESTIMATOR))
    kind = d.entries[f"{path}.kind"].value
    if written == "grpo":
        scale = "group" if scaled else "none"
        d.put(f"{path}.scale", scale, o.origin(by_std))
        d.put(f"{path}.epsilon", 1e-6, "SkyRL's constant")
    else:
        d.drops_given(o, f"SkyRL reads it for grpo, not for {written}", by_std)
    if kind in ("gae", "reinforce_pp"):
        d.copy(f"{path}.gamma", o, unread.pop(), default=1.0)
    if kind == "gae":
        d.copy(f"{path}.lam", o, unread.pop(), default=1.0)
    d.drops_given(o, f"SkyRL does not read it for {written}", *unread)
    name = ALGORITHM + "advantage_batch_normalize"
    if o.flag(name):
        near = ""
        if written == "grpo":
            near = "; advantage reinforce_pp_baseline is near"
        d.lacks(name, f"true: the advantages are standardised over the batch after {written}{near}")


def _surrogate(d: Draft, o: Options) -> str:
    """`policy_loss_type` with its fields, and the proximal policy; returns the loss."""
    path = "algorithm.surrogate"
    written = str(o.get(LOSS, default="regular"))
    losses = _losses(o)
    read = {origin for _, origin in losses.get(written, ("", {}))[1].values()}
    origins: set[str] = set()
    for _, fields in losses.values():
        origins.update(origin for _, origin in fields.values())
    for origin in sorted(origins - read):
        if origin.startswith("from ") and not (written not in losses and origin.endswith(("clip_low", "clip_high"))):
            d.drops(origin.removeprefix("from "), f"not read by policy_loss_type {written}")
    name = ALGORITHM + "cispo.cispo_anchor"
    anchor = o.choice(("old", "rollout"), name, default="old")
    if written != "cispo":
        d.drops_given(o, f"not read by policy_loss_type {written}", name)
    anchored = written in ("dppo", "rollout_is") or (written == "cispo" and anchor == "rollout")
    if anchored and written != "rollout_is":
        d.put(
            "algorithm.proximal", "behavior", o.origin(LOSS), f"SkyRL's {written} measures from the rollout's log-probs"
        )
    else:
        d.put(
            "algorithm.proximal", "recompute", "SkyRL recomputes old_log_probs with the trainer before the first update"
        )
    if written not in losses:
        d.ask(path, "ppo_clip", f"{LOSS}: {written}: which loss is near? `proxima list surrogate`", True)
        for field, option in (("epsilon_low", "eps_clip_low"), ("epsilon_high", "eps_clip_high")):
            d.copy(f"{path}.{field}", o, ALGORITHM + option, default=0.2)
        return written
    kind, fields = losses[written]
    if written == "rollout_is":
        low = fields.pop("epsilon_low")
        high = fields.pop("epsilon_high")
        note = "SkyRL's loss of GLM-5: REINFORCE, weighted by the ratio to the rollout where that is within the bounds."
        d.spec(path, kind, o.origin(LOSS), note)
        bounds: Fields = {
            "bound": ("clip", f"from {LOSS}"),
            "upper": (1 + high[0], f"{high[1]}, plus 1"),
            "lower": (max(0.0, 1 - low[0]), f"1 less {low[1].removeprefix('from ')}"),
            "towards": ("current", "the ratio of the current policy"),
        }
        d.append(LIST, "importance", f"from {LOSS}", **bounds)
        return written
    d.spec(path, kind, o.origin(LOSS), **fields)
    return written


def _losses(o: Options) -> dict[str, tuple[str, Fields]]:
    """Each loss of SkyRL: our surrogate, and its fields with their origins."""

    def of(option: str, default: float) -> tuple[Any, str]:
        return o.sourced(ALGORITHM + option, default=default)

    clip: Fields = {"epsilon_low": of("eps_clip_low", 0.2), "epsilon_high": of("eps_clip_high", 0.2)}
    divergence = o.choice(("binary_tv", "binary_kl"), ALGORITHM + "dppo.dppo_type", default="binary_tv")
    shares: Fields = {"low": of("clip_cov.clip_cov_lb", 1.0), "high": of("clip_cov.clip_cov_ub", 5.0)}
    least = 1.0
    most = 4.0
    if is_older(o):
        least = 0.0
        most = 5.0
    return {
        "regular": ("ppo_clip", clip),
        "dual_clip": ("ppo_clip", {**clip, "dual_clip": of("clip_ratio_c", 3.0)}),
        "gspo": ("gspo", {**clip, "form": ("token", "SkyRL's is GSPO-token")}),
        "cispo": (
            "cispo",
            {
                "epsilon_low": of("cispo.cispo_eps_clip_low", least),
                "epsilon_high": of("cispo.cispo_eps_clip_high", most),
            },
        ),
        "sapo": ("sapo", {"tau_positive": of("sapo.tau_pos", 1.0), "tau_negative": of("sapo.tau_neg", 1.05)}),
        "dppo": (
            "dppo",
            {
                "divergence": (divergence, o.origin(ALGORITHM + "dppo.dppo_type")),
                "delta": of("dppo.delta_high", 0.2),
                "delta_low": of("dppo.delta_low", 0.2),
            },
        ),
        "clip_cov": ("clip_cov", {**clip, "share": of("clip_cov.clip_ratio", 2e-4), **shares}),
        "kl_cov": ("kl_cov", {"share": of("kl_cov.kl_cov_frac", 0.2), "coefficient": of("kl_cov.ppo_kl_coef", 1.0)}),
        "rollout_is": ("reinforce", dict(clip)),
    }


NAMES = (
    *("tis_ratio_type", "token_tis_ratio_clip_high", "sequence_tis_ratio_clip_high", "sequence_mask_metric"),
    *("geo_mask_high", "geo_mask_low", "product_mask_high", "product_mask_low", "outlier_token_is_threshold_low"),
    *("outlier_token_is_threshold_high", "token_mask_is_threshold_low", "token_mask_is_threshold_high"),
)
OLDER = (ALGORITHM + "use_tis", ALGORITHM + "tis_imp_ratio_cap")


def _correction(d: Draft, o: Options, loss: str) -> None:
    """`off_policy_correction`, of the trainer's log-probs against the rollout's. What it rejects stays in the
    denominator, which SkyRL takes before."""
    every = [CORRECTION + name for name in NAMES]
    if loss in WITHOUT_CORRECTION:
        d.drops_given(o, f"not read by policy_loss_type {loss}", *every, *OLDER)
        return
    anchored = d.entries["algorithm.proximal"].value == "behavior"
    switches = [name for name in every if "_threshold_" in name or name.endswith(("ratio_type", "mask_metric"))]
    used = [name for name in switches if o.flat.get(name) is not None]
    if anchored and used:
        why = f"{loss} is measured from the rollout here, where the trainer's own log-probs are not computed"
        for name in used:
            d.lacks(name, f"{o.get(name)}: {why}")
        o.given(*every)
        return
    _weights(d, o)
    _masks(d, o)


def _weights(d: Draft, o: Options) -> None:
    """Truncated importance sampling: `tis_ratio_type`, before it `use_tis`."""
    name = CORRECTION + "tis_ratio_type"
    bounds = {"token": 2.0, "sequence": 5.0}
    given = o.get(name)
    level = None
    if given is not None:
        level = o.choice(bounds, name, default="token")
    for kind, default in bounds.items():
        limit = f"{CORRECTION}{kind}_tis_ratio_clip_high"
        if kind != level:
            d.drops_given(o, f"tis_ratio_type is {level or 'null: off'}", limit)
            continue
        fields: Fields = {"level": (kind, o.origin(name)), "bound": ("truncate", "SkyRL's TIS")}
        d.append(LIST, "importance", o.origin(name), **fields, upper=o.sourced(limit, default=default))
    switch, cap = OLDER
    if level is None and o.flag(switch):
        fields = {"level": ("token", f"from {switch}"), "bound": ("truncate", "SkyRL's TIS")}
        d.append(LIST, "importance", o.origin(switch), **fields, upper=o.sourced(cap, default=2.0))
    else:
        d.drops_given(o, "off, or tis_ratio_type says more", switch, cap)


def _masks(d: Draft, o: Options) -> None:
    """Sequences and tokens that are left out: `sequence_mask_metric`, and the thresholds of single tokens."""
    name = CORRECTION + "sequence_mask_metric"
    bounds = {"geometric": ("geo", 1.01, 0.99), "product": ("product", 2.0, 0.5)}
    metric = None
    if o.get(name) is not None:
        metric = o.choice(bounds, name, default="geometric")
    for kind, (short, high, low) in bounds.items():
        upper = CORRECTION + f"{short}_mask_high"
        lower = CORRECTION + f"{short}_mask_low"
        if kind != metric:
            d.drops_given(o, f"sequence_mask_metric is {metric or 'null: off'}", upper, lower)
            continue
        reduce = "mean" if kind == "geometric" else "sum"
        fields: Fields = {
            "level": ("sequence", o.origin(name)),
            "statistic": ("ratio", o.origin(name)),
            "reduce": (reduce, o.origin(name)),
            "upper": o.sourced(upper, default=high),
            "lower": o.sourced(lower, default=low),
        }
        d.append(LIST, "rejection", o.origin(name), **fields)
    lower, upper = (CORRECTION + f"outlier_token_is_threshold_{side}" for side in ("low", "high"))
    least = o.number(lower)
    if least is not None:
        fields = {"bound": ("none", "no weights, only the veto"), "veto": (least, o.origin(lower))}
        d.append(LIST, "importance", o.origin(lower), "a token below it rejects its sequence", **fields)
    most = o.number(upper)
    if most is not None:
        fields = {"level": ("sequence", o.origin(upper)), "statistic": ("ratio", o.origin(upper))}
        fields |= {"reduce": ("max", "a token above it rejects its sequence"), "upper": (most, o.origin(upper))}
        d.append(LIST, "rejection", o.origin(upper), **fields, lower=(0.0, "no lower bound of this one"))
    lower, upper = (CORRECTION + f"token_mask_is_threshold_{side}" for side in ("low", "high"))
    if o.given(lower, upper):
        fields = {"level": ("token", "single tokens"), "statistic": ("ratio", o.origin(upper, lower))}
        fields |= {"upper": o.sourced(upper, default=float("inf")), "lower": o.sourced(lower, default=0.0)}
        d.append(LIST, "rejection", o.origin(upper, lower), **fields)


REDUCTIONS = {
    "token_mean": "token_mean",
    "token_mean_legacy": "token_mean",
    "sequence_mean": "sequence_mean_token_mean",
    "seq_mean_token_sum_norm": "sequence_mean_token_sum_norm",
}


def _aggregate(d: Draft, o: Options) -> None:
    """`loss_reduction`, of a whole mini batch."""
    longest = ALGORITHM + "max_seq_len"
    micro = "trainer.micro_train_batch_size_per_gpu"
    written = str(o.get(REDUCTION, default="token_mean"))
    if written != "seq_mean_token_sum_norm":
        d.drops_given(o, f"not read by loss_reduction {written}", longest)
    if written == "seq_mean_token_sum_norm":
        total = d.entries["model.max_length"]
        if o.given(longest):
            common.horizon(d, o.origin(REDUCTION), o.number(longest, default=total.value), o.origin(longest))
        else:
            note = "without max_seq_len, which SkyRL requires since 0.5, its length is that of prompt and completion"
            common.horizon(d, o.origin(REDUCTION), total.value, total.origin, note)
    elif written in REDUCTIONS:
        d.spec("algorithm.aggregate", REDUCTIONS[written], o.origin(REDUCTION))
    else:
        d.ask("algorithm.aggregate", "token_mean", f"{REDUCTION}: {written}: see `proxima list aggregate`", True)
    older = written == "token_mean" and is_older(o)
    if older:
        d.lacks(REDUCTION, "token_mean: up to 0.4 the mean of the micro batches' means; here that of the mini batch")
    if written == "token_mean_legacy":
        d.lacks(
            REDUCTION, "token_mean_legacy: the mean of the micro batches' means; here that of the mini batch's tokens"
        )
    if (older or written == "token_mean_legacy") and o.given(micro):
        d.lacks(micro, f"{o.get(micro)}: {written} is the mean of each of them; here that of the mini batch")
    else:
        d.drops_given(o, "the mean is that of the mini batch", micro)


def _penalties(d: Draft, o: Options) -> None:
    """KL towards the reference, in the loss by default or in the reward; entropy."""
    kind, coefficient, loss = (ALGORITHM + name for name in ("kl_estimator_type", "kl_loss_coef", "use_kl_loss"))
    estimator = o.choice(("k1", "k2", "k3", "abs"), kind, default="k3")
    rewarded = o.flag(ALGORITHM + "use_kl_in_reward")
    limit: Fields = {}
    if estimator == "k3":
        limit = {"limit": (10.0, "SkyRL clamps k3 at 10")}
    if o.flag(loss, default=not rewarded):
        fields: Fields = {"coefficient": o.sourced(coefficient, default=0.001), **limit}
        d.spec("algorithm.reference_kl", estimator, o.origin(kind), **fields)
        if d.entries["algorithm.aggregate.kind"].value != "sequence_mean_token_mean":
            why = "SkyRL averages the KL of each completion, then over completions; here as the loss is averaged"
            by_default = "" if o.given(loss) else "on by default: "
            d.lacks(loss, f"{by_default}{why}")
    control = ALGORITHM + "kl_ctrl."
    if rewarded:
        path = "algorithm.reward_kl"
        d.put(f"{path}.estimator", estimator, o.origin(kind))
        d.copy(f"{path}.coefficient", o, coefficient, default=0.001)
        if limit:
            d.put(f"{path}.limit", *limit["limit"])
        if o.choice(("fixed", "adaptive"), control + "type", default="fixed") == "adaptive":
            d.copy(f"{path}.adaptive.target", o, control + "kl_target", default=0.1)
            d.copy(f"{path}.adaptive.horizon", o, control + "horizon", default=10000)
    d.drops_given(o, "read with use_kl_in_reward and an adaptive type only", *(control + n for n in CONTROL))
    if not rewarded and "algorithm.reference_kl.kind" not in d.entries:
        d.drops_given(o, "no KL: off", kind, coefficient)
    switch = ALGORITHM + "use_entropy_loss"
    weight = ALGORITHM + "entropy_loss_coef"
    if o.flag(switch):
        d.copy("algorithm.entropy_bonus", o, weight, default=0.01)
    else:
        d.drops_given(o, "use_entropy_loss is false", weight)


CONTROL = ("type", "kl_target", "horizon")


def _selection(d: Draft, o: Options) -> None:
    """Uniform groups, which are masked or generated anew, and completions that the length limit cut off."""
    kind = SAMPLED + "type"
    most = SAMPLED + "max_sample_batches"
    written = o.get(kind)
    full = "trainer.fully_async.sample_full_batch"
    anew = next((name for name, on in ((kind, written == "filter"), (full, o.flag(full))) if on), None)
    if anew is not None or o.flag(FILTER):
        note = ""
        if anew is None:
            note = "SkyRL masks them, and a mean over sequences counts them; here they are dropped"
        d.append("algorithm.selection", "drop_uniform_groups", f"from {anew or FILTER}", note)
    if anew is not None:
        limit = o.whole(most, default=30)
        path = "algorithm.dynamic_sampling."
        note = "" if limit > 0 else "no limit, as in SkyRL"
        d.put(path + "max_num_gen_batches", limit, o.origin(most), note)
        d.put(path + "exhausted", "stop", "SkyRL raises then")
        d.put(path + "oversample", 1.0, "SkyRL generates whole batches")
    else:
        d.drops_given(o, "dynamic_sampling.type is not filter", most)
    least = SAMPLED + "min_replace_ratio"
    if written not in (None, "filter"):
        why = "copies of good groups in place of uniform ones; dynamic_sampling of the type filter generates new ones"
        d.lacks(kind, f"{written}: {why}")
        if o.given(least):
            d.lacks(least, f"{o.get(least)}: read with the type {written}")
    else:
        d.drops_given(o, "dynamic_sampling.type is not replace", least)
    o.flag(FILTER)
    if o.flag("generator.apply_overlong_filtering"):
        d.append("algorithm.selection", "drop_truncated", "from generator.apply_overlong_filtering")


LENGTHS = (ALGORITHM + "overlong_buffer_len", ALGORITHM + "overlong_buffer.len")
FACTORS = (ALGORITHM + "overlong_buffer_penalty_factor", ALGORITHM + "overlong_buffer.penalty_factor")


def overlong_penalty(d: Draft, o: Options, longest: int) -> None:
    """The overlong penalty of SkyRL's DAPO example, whose trainer reads these options."""
    if not o.given(*LENGTHS, *FACTORS):
        return
    most = (longest, o.origin("generator.sampling_params.max_generate_length"))
    common.overlong(d, most, (o.whole(*LENGTHS), o.origin(*LENGTHS)), o.sourced(*FACTORS, default=1.0))
