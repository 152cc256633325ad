"""Checks of an algorithm's parts against each other, and against what the engine and the loop supply."""

from collections.abc import Iterator, Set
from typing import Any

from proxima.config.machine_checks import model_problem
from proxima.config.problems import Problem
from proxima.config.resolve import Resolved
from proxima.core.advantage import ADVANTAGES, Gdpo, needs_baseline
from proxima.core.advantage.protocol import Advantage
from proxima.core.aggregate import TokenMean
from proxima.core.loss import SUPPLIED_BY
from proxima.core.selection import Balance, BestAndWorst, Prune
from proxima.data.outcomes import METRIC_ALIASES, METRICS
from proxima.reward.base import as_reward

FROM_THE_TRAINER = frozenset({"advantage", "proximal_log_prob", "entropy", "token"})
FROM_ANY_ENGINE = frozenset({"behavior_log_prob", "policy_version"})
LOADED_BY = {
    "reference_log_prob": "set algorithm.reference_kl, which loads the reference model",
    "next_log_prob": "set algorithm.proximal=next, in asynchronous training, or towards=proximal",
}
FROM_TOP_K = frozenset({"top_k", "behavior_top_k_log_prob", "top_k_log_prob"})


def groups_have_several_completions(r: Resolved[Any]) -> Iterator[Problem]:
    """An advantage relative to the group is 0 in a group of one."""
    advantage = r.config.algorithm.advantage
    alone = r.config.train.completions_per_prompt == 1 and trains_on_rewards(r.config)
    if alone and not needs_baseline(advantage) and not advantage.per_token:
        kind = r.entry("algorithm.advantage.kind").value
        message = f"a group of one has advantage 0 under {kind!r}, so nothing is learned; set at least 2, usually 8"
        yield r.problem("train.completions_per_prompt", message)


def trains_on_rewards(config: Any) -> bool:
    """False where a teacher alone trains, and the rewards are only measured."""
    return config.algorithm.surrogate is not None or config.algorithm.preference is not None


def teacher_is_usable(r: Resolved[Any]) -> Iterator[Problem]:
    """The teacher exists, and what its divergence compares is supplied."""
    distillation = r.config.algorithm.distillation
    if distillation is None:
        return
    if problem := model_problem(distillation.path):
        yield r.problem("algorithm.distillation.path", problem)
    top_k, path = distillation.divergence.top_k, "algorithm.distillation.divergence.top_k"
    if distillation.engine is not None and top_k:
        yield r.problem(path, "must be 0 with algorithm.distillation.engine: an engine scores the sampled tokens alone")
    reported = getattr(r.config.engine, "top_k_log_probs", 0)
    if top_k > reported and distillation.divergence.top_k_of == "student":
        message = f"is more than the {reported} tokens that the engine reports; set engine.top_k_log_probs={top_k}"
        yield r.problem(path, f"{message}, or top_k_of=teacher")
    algorithm = r.config.algorithm
    idle = {"reward_kl": (algorithm.reward_kl, "null"), "correction": (algorithm.correction, "[]")}
    for slot, (found, off) in idle.items():
        if found and not trains_on_rewards(r.config):
            message = f"acts on rewards, which are only measured; set algorithm.{slot}={off}"
            yield r.problem(f"algorithm.{slot}", f"{message}, or name an algorithm.surrogate")


def needed_tensors_are_supplied(r: Resolved[Any]) -> Iterator[Problem]:
    """Every tensor that a spec declares in `needs` comes from the engine, the trainer or the reference model."""
    algorithm, engine = r.config.algorithm, r.config.engine
    supplied = FROM_THE_TRAINER | frozenset(getattr(engine, "provides", FROM_ANY_ENGINE))
    if algorithm.reference_kl is not None or algorithm.reward_kl is not None:
        supplied |= {"reference_log_prob"}
    if algorithm.proximal == "next":
        supplied |= {"next_log_prob"}
    specs = {slot: getattr(algorithm, slot) for slot in ("surrogate", "aggregate", "reference_kl")}
    specs |= {f"correction.{i}": spec for i, spec in enumerate(algorithm.correction)}
    for slot, spec in specs.items():
        missing = (frozenset() if spec is None else spec.needs) - supplied
        kind = r.entry(f"algorithm.{slot}.kind").value if missing else None
        if missing & FROM_TOP_K and getattr(engine, "top_k_log_probs", None) == 0:  # one switch for all of them
            message = f"{kind!r} with these values needs the engine's top-k log-probs; set engine.top_k_log_probs=20"
            yield r.problem(f"algorithm.{slot}.kind", message)
            missing -= FROM_TOP_K
        for name in sorted(missing):
            supplier = SUPPLIED_BY.get(name, "nothing supplies it")
            lacking = f"engine {r.entry('engine.kind').value!r} does not supply it; {supplier}"
            remedy = LOADED_BY.get(name, lacking)
            yield r.problem(f"algorithm.{slot}.kind", f"{kind!r} needs `{name}`: {remedy}")


def preference_is_the_whole_loss(r: Resolved[Any]) -> Iterator[Problem]:
    """A loss over pairs replaces the surrogate and all that surrounds it, and its selection leaves pairs."""
    algorithm = r.config.algorithm
    if algorithm.preference is None:
        return
    idle = {
        "surrogate": (algorithm.surrogate is not None, "null"),
        "correction": (bool(algorithm.correction), "[]"),
        "reference_kl": (algorithm.reference_kl is not None, "null"),
        "distillation": (algorithm.distillation is not None, "null"),
        "entropy_bonus": (algorithm.entropy_bonus > 0, "0"),
        "proximal": (algorithm.proximal != "behavior", "behavior"),
        "aggregate": (not isinstance(algorithm.aggregate, TokenMean), "token_mean"),
    }
    for slot, (present, off) in idle.items():
        if present:
            message = f"has no effect in online DPO; set algorithm.{slot}={off}, or algorithm.preference=null"
            yield r.problem(f"algorithm.{slot}", message)
    if algorithm.mismatch.on_mismatch == "reject":
        yield r.problem("algorithm.mismatch.on_mismatch", "would break pairs; set it to auto, warn or stop")
    if algorithm.advantage.per_token:
        message = "compares completions by one advantage each; use one of groups, as {kind: grpo, scale: none}"
        yield r.problem("algorithm.preference.kind", message)
    if not (algorithm.selection and isinstance(algorithm.selection[-1], BestAndWorst)):
        yield r.problem("algorithm.preference.kind", "needs pairs; end algorithm.selection with {kind: best_and_worst}")


def epochs_measure_the_kl(r: Resolved[Any]) -> Iterator[Problem]:
    """Online DPO has no ratio to a proximal policy."""
    if r.config.algorithm.preference is not None and r.config.train.target_kl is not None:
        yield r.problem("train.target_kl", "online DPO measures no approximate KL of an epoch; set it to null")


def advantage_is_supported(r: Resolved[Any]) -> Iterator[Problem]:
    """The loop supplies rewards, groups, greedy baselines and a forward pass of the policy, and the critic, if there is
    one, values."""
    critic, path = r.config.critic, "algorithm.advantage.kind"
    if found := unsupported_by_loop(r.config.algorithm.advantage, frozenset() if critic is None else {"value"}):
        usable = ", ".join(kind for kind, cls in sorted(ADVANTAGES.items()) if not unsupported_by_loop(cls))
        remedy = f"set critic=model or critic=head, or use one of {usable}"
        if "`value`" not in found:
            remedy = f"the loop does not support that; use one of {usable}"
        yield r.problem(path, f"{r.entry(path).value!r} {found}; {remedy}")
    elif critic is not None and "value" not in r.config.algorithm.advantage.needs:
        message = f"{r.entry(path).value!r} reads no values, so the critic would only cost time"
        yield r.problem("critic.kind", f"{message}; set algorithm.advantage=gae, or critic=null")


def gdpo_has_the_weights(r: Resolved[Any]) -> Iterator[Problem]:
    """`gdpo` weighs the normalised rewards itself; the weights of the rewards are those of their sum, and it reads none
    of them."""
    advantage, weights = r.config.algorithm.advantage, [as_reward(reward).weight for reward in r.config.reward]
    if not isinstance(advantage, Gdpo):
        return
    shown = ", ".join(f"{weight:g}" for weight in weights)
    if advantage.weights is None and set(weights) != {1.0}:
        message = "weighs every reward by 1, and the rewards have weights of their own"
        yield r.problem("algorithm.advantage.weights", f"{message}; set it to [{shown}], or these to 1")


def advantage_reads_the_kl(r: Resolved[Any]) -> Iterator[Problem]:
    """`gdpo` normalises each reward on its own, and the KL in the reward is none of them."""
    if r.config.algorithm.reward_kl is not None and isinstance(r.config.algorithm.advantage, Gdpo):
        message = "'gdpo' reads the rewards one by one, without the KL; set algorithm.reference_kl or another advantage"
        yield r.problem("algorithm.reward_kl", message)


def unsupported_by_loop(advantage: Advantage | type[Advantage], supplied: Set[str] = frozenset()) -> str | None:
    """The requirement of an advantage, or its class, that the loop lacks: ``needs `value` ``; None if it lacks none.
    `supplied`: the columns that forward stages fill."""
    missing = sorted(set(advantage.needs) - {"baseline", "group", "score_variance"} - supplied)
    return f"needs `{missing[0]}`" if missing else None


def allocation_keeps_batch_size(r: Resolved[Any]) -> Iterator[Problem]:
    """Pruning with `allocate` keeps the size of an update only where whole groups fill the freed slots."""
    size = r.config.train.completions_per_prompt
    for i, spec in enumerate(r.config.algorithm.selection):
        if isinstance(spec, Prune) and spec.allocate and not spec.keeps_size(size):
            reason = f"a group of {size} (train.completions_per_prompt) keeps {spec.kept(size)}, not a divisor of it"
            if spec.scope == "batch":
                reason = f"rate {spec.rate:g} of the batch leaves a share that is not 1/2, 1/3, 1/4 …"
            remedy = "use a rate and a group size that do, as rate 0.5, 0.75 or 0.875 with 16, or allocate=false"
            message = f"{reason}, so updates can't keep their size; {remedy}"
            yield r.problem(f"algorithm.selection.{i}.allocate", message)


def dynamic_sampling_has_a_selection(r: Resolved[Any]) -> Iterator[Problem]:
    """Dynamic sampling replaces dropped groups; pruning and balancing keep a part of every group."""
    dynamic, selection = r.config.algorithm.dynamic_sampling, r.config.algorithm.selection
    if dynamic is not None and all(isinstance(spec, Balance | Prune) for spec in selection):
        remedy = "add drop_uniform_groups to algorithm.selection, or set algorithm.dynamic_sampling=null"
        message = f"no selection drops whole groups, so there is nothing to refill; {remedy}"
        settings = [entry for entry in r.entries if entry.path.startswith("algorithm.dynamic_sampling.")]
        given = [entry for entry in settings if entry.source != "default"]
        yield r.problem([*given, *settings][0].path, message)


def baseline_rewards_are_per_completion(r: Resolved[Any]) -> Iterator[Problem]:
    """A reward of the whole batch is computed after the greedy baseline."""
    if needs_baseline(r.config.algorithm.advantage):
        for i, reward in enumerate(r.config.reward):
            if as_reward(reward).whole_batch:
                message = "a whole-batch reward has no greedy baseline; remove it, or use another algorithm.advantage"
                yield r.problem(f"reward.{i}.kind", message)


def selection_metrics_exist(r: Resolved[Any]) -> Iterator[Problem]:
    """A selection by a metric names one that completions have."""
    known = {*METRICS, *METRIC_ALIASES, *(as_reward(reward).label for reward in r.config.reward)}
    for i, spec in enumerate(r.config.algorithm.selection):
        metric = getattr(spec, "metric", None)
        if isinstance(metric, str) and metric not in known:
            message = f"unknown metric of a completion; known: {', '.join(sorted(known))}"
            yield r.problem(f"algorithm.selection.{i}.metric", message)


def prune_rate_is_exact(r: Resolved[Any]) -> Iterator[Problem]:
    """A group loses whole completions, so that a rate may not be reachable exactly."""
    size = r.config.train.completions_per_prompt
    for i, spec in enumerate(r.config.algorithm.selection):
        if isinstance(spec, Prune) and spec.scope == "group":
            rate = 1 - spec.kept(size) / size
            if abs(rate - spec.rate) > 1e-9:
                message = f"keeps {spec.kept(size)} of {size} completions, a rate of {rate:.3g}"
                yield r.problem(f"algorithm.selection.{i}.rate", message)


def next_policy_is_read(r: Resolved[Any]) -> Iterator[Problem]:
    """`proximal: next` is for corrections towards the next policy, and these replace those towards the proximal one."""
    algorithm = r.config.algorithm
    for name, off in (("next_from", "engine"), ("next_missing", "decoupled")):
        if algorithm.proximal != "next" and getattr(algorithm, name) != off:
            yield r.problem(f"algorithm.{name}", f"has no effect; set algorithm.proximal=next, or {name}={off}")
    if algorithm.proximal != "next":
        return
    for i, spec in enumerate(algorithm.correction):
        if {"behavior_log_prob", "proximal_log_prob"} <= spec.needs:
            message = "compares with the proximal policy, and algorithm.proximal=next is for the next one"
            remedy = "set its towards=next, or algorithm.proximal=recompute"
            yield r.problem(f"algorithm.correction.{i}.kind", f"{message}; {remedy}")
    if not any("next_log_prob" in spec.needs for spec in algorithm.correction):
        remedy = "add algorithm.correction=[{kind: cap_floor, towards: next}], or set it to recompute"
        yield r.problem("algorithm.proximal", f"no correction reads the next policy; {remedy}")


def next_policy_is_computed(r: Resolved[Any]) -> Iterator[Problem]:
    """Stored rollouts had other policies after them."""
    if r.config.algorithm.proximal == "next" and r.config.rollouts is not None:
        message = "a replay has no versions of its own to compute the next policy from; set it to recompute"
        yield r.problem("algorithm.proximal", message)


def some_tokens_are_older(r: Resolved[Any]) -> Iterator[Problem]:
    """Only tokens two versions old or older differ from plain decoupled PPO."""
    config = r.config
    if config.algorithm.proximal != "next":
        return
    if (lag := config.runtime.max_lag) < 2:
        message = f"with runtime.max_lag={lag} no token is two versions old, so this is proximal=recompute"
        yield r.problem("algorithm.proximal", f"{message}; set max_lag to 2")
    elif config.runtime.max_concurrent_rollouts is None and config.algorithm.dynamic_sampling is None:
        message = "without runtime.max_concurrent_rollouts each step trains on its own version's tokens"
        remedy = "so this is proximal=recompute; set it to the number of prompts that generate at once"
        yield r.problem("algorithm.proximal", f"{message}, {remedy}")


def correction_has_an_effect(r: Resolved[Any]) -> Iterator[Problem]:
    """With the behavior policy as centre, a weight from behavior to proximal policy is 1."""
    if r.config.algorithm.proximal != "behavior":
        return
    for i, spec in enumerate(r.config.algorithm.correction):
        if {"behavior_log_prob", "proximal_log_prob"} <= spec.needs:
            message = "has no effect: with algorithm.proximal=behavior the two policies that it compares are the same"
            remedy = "set algorithm.proximal=recompute, or remove the correction"
            yield r.problem(f"algorithm.correction.{i}.kind", f"{message}; {remedy}")
