"""Checks of parts that most recipes leave out: a teacher, pairs, penalties, corrections, selections, replayed routes,
the next policy, top-k log-probs, truncated sampling, asynchronous training, a named metric of evaluations, adapters,
weights in bfloat16, trackers."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from proxima.config.describe import kind_of
from proxima.config.mixtures import check_routed
from proxima.config.resolved import Findings, Resolved
from proxima.config.sections import CRITICS
from proxima.config.sections.algorithm_section import AlgorithmConfig, asks_routers, replays_sampling_masks
from proxima.config.sections.eval_section import EvalConfig
from proxima.config.sections.model_section import ModelConfig
from proxima.config.sections.runtime_section import RuntimeConfig
from proxima.config.sections.train_section import OptimizationConfig, TrainConfig
from proxima.core import SELECTIONS
from proxima.core.aggregate import TokenMean
from proxima.core.correction.score_centering import ScoreCentering
from proxima.data import FieldError, UserError
from proxima.data.errors import suggestion
from proxima.data.outcomes import METRIC_ALIASES, METRICS
from proxima.engine.protocol import Sampling
from proxima.evaluation.estimators import powers_of_two
from proxima.evaluation.intervals import PART
from proxima.model.adapter_files import check_start
from proxima.model.adapter_folder import base_of
from proxima.model.files import ADAPTER_CONFIG as ADAPTER
from proxima.model.hub_names import is_at_hand
from proxima.model.lora import Lora
from proxima.model.lora_layers import target_layers
from proxima.model.pretrained import load_config, load_shape
from proxima.reward.base import as_reward
from proxima.training import OPTIMIZERS

BFLOAT16_STEP = 2**-8
TYPICAL_WEIGHT = 0.02  # the standard deviation with which most models are initialised
SAMPLING_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
BEHAVIOR, CONCURRENT = "algorithm.behavior", "runtime.max_concurrent_rollouts"
WIDE = 512  # ids per token that are few compared with its other data


def teacher_is_usable(r: Resolved[Any], algorithm: AlgorithmConfig, engine: Any) -> Findings:
    """The log-probs that the divergence from the teacher compares must be supplied."""
    distillation = algorithm.distillation
    assert distillation is not None
    top_k, path = distillation.divergence.top_k, "algorithm.distillation.divergence.top_k"
    if distillation.engine is not None and top_k:
        yield path, "must be 0 with algorithm.distillation.engine: an engine scores the sampled tokens alone"
    reported = getattr(engine, "top_k_log_probs", 0)
    if top_k > reported and distillation.divergence.top_k_of == "student":
        message = f"is more than the {reported} tokens that the engine reports; set engine.top_k_log_probs={top_k}"
        yield path, f"{message}, or top_k_of=teacher"
    if not algorithm.trains_on_rewards:
        for slot, off in fields_that_are_on(algorithm, {"reward_kl": "null", "correction": "[]"}):
            message = f"acts on rewards, which are only measured; set algorithm.{slot}={off}"
            yield f"algorithm.{slot}", f"{message}, or name an algorithm.surrogate"


def gdpo_reads_each_reward(algorithm: AlgorithmConfig, reward: Sequence[Any]) -> Findings:
    """`gdpo` normalises and weights each reward itself. It ignores the rewards' own weights, which apply to their sum,
    and the KL in the reward, which is none of them."""
    weights = [as_reward(spec).weight for spec in reward]
    shown = ", ".join(f"{weight:g}" for weight in weights)
    if algorithm.advantage.weights is None and set(weights) != {1.0}:
        message = "weighs every reward by 1, and the rewards have their own weights"
        yield "algorithm.advantage.weights", f"{message}; set it to [{shown}], or these to 1"
    if algorithm.reward_kl is not None:
        message = "'gdpo' reads the rewards one by one, without the KL; set algorithm.reference_kl or another advantage"
        yield "algorithm.reward_kl", message


def muon_has_whole_matrices(r: Resolved[Any], train: OptimizationConfig) -> Findings:
    """Muon needs whole matrices, which an adapter does not have."""
    if OPTIMIZERS.holds(train.optimizer, "muon") and r.get("model.lora") is not None:
        reason = "orthogonalizes updates of whole matrices, and an adapter has factors of them"
        yield "train.optimizer.kind", f"{reason}; use adamw with model.lora"


def preference_is_the_whole_loss(algorithm: AlgorithmConfig, train: TrainConfig) -> Findings:
    """A loss over pairs replaces the surrogate and the settings around it, and needs a selection that leaves pairs. It
    has no ratio to a proximal policy, by which `train.target_kl` could end a step."""
    off = {"surrogate": "null", "correction": "[]", "reference_kl": "null", "distillation": "null"}
    off |= {"penalty": "[]", "entropy_bonus": "0", "proximal": "behavior", "router_balance": "null"}
    off |= {} if isinstance(algorithm.aggregate, TokenMean) else {"aggregate": "token_mean"}
    for slot, value in fields_that_are_on(algorithm, off):
        message = f"has no effect in online DPO; set algorithm.{slot}={value}, or algorithm.preference=null"
        yield f"algorithm.{slot}", message
    if algorithm.mismatch.on_mismatch == "reject":
        yield "algorithm.mismatch.on_mismatch", "would break pairs; set it to auto, warn or stop"
    if algorithm.advantage.per_token:
        message = "compares completions by one advantage each; use one of groups, as {kind: grpo, scale: none}"
        yield "algorithm.preference.kind", message
    if not (algorithm.selection and SELECTIONS.holds(algorithm.selection[-1], "best_and_worst")):
        yield "algorithm.preference.kind", "needs pairs; end algorithm.selection with {kind: best_and_worst}"
    if train.target_kl is not None:
        yield "train.target_kl", "online DPO measures no approximate KL of an epoch; set it to null"


def penalties_have_their_policy(algorithm: AlgorithmConfig, train: TrainConfig) -> Findings:
    """A penalty must be towards a policy that differs from the current one and that nothing else names better."""
    if getattr(algorithm.reference_kl, "towards", "reference") != "reference":
        message = "must be reference here; another policy goes into algorithm.penalty"
        yield "algorithm.reference_kl.towards", f"{message}, as [{{kind: k3, towards: behavior}}]"
    for i, spec in enumerate(algorithm.penalty):
        if getattr(spec, "towards", "") != "proximal" or algorithm.preference is not None:
            continue
        path = f"algorithm.penalty.{i}.towards"
        if algorithm.proximal == "behavior":
            remedy = "set this to behavior, or algorithm.proximal=recompute"
            yield path, f"algorithm.proximal=behavior computes no proximal log-probs; {remedy}"
        elif algorithm.proximal != "loglinear" and train.updates_per_step * train.epochs_per_step == 1:
            message = "has no effect: in the only update of a step the policy is still the proximal one"
            yield path, f"{message}; set this to behavior, or train.updates_per_step above 1"


def corrections_are_possible(r: Resolved[Any], algorithm: AlgorithmConfig) -> Findings:
    """Refuse a correction that conflicts with the surrogate or with another correction. With the behavior policy as
    centre, a weight from it to the proximal policy is always 1; `proximal: next` is for corrections towards the next
    policy, which replace such a weight."""
    wrong = {
        "behavior": "has no effect: with algorithm.proximal=behavior the two policies that it compares are the same; "
        "set algorithm.proximal=recompute, or remove the correction",
        "next": "compares with the proximal policy, and algorithm.proximal=next is for the next one; "
        "set its towards=next, or algorithm.proximal=recompute",
    }
    for i, spec in enumerate(algorithm.correction):
        path = f"algorithm.correction.{i}.kind"
        if problem := spec.conflict(algorithm.surrogate, algorithm.correction):
            yield path, f"{r.entry(path).value!r} {problem}"
        if algorithm.proximal in wrong and {"behavior_log_prob", "proximal_log_prob"} <= spec.needs:
            yield path, wrong[algorithm.proximal]


def reference_engine_is_asked(algorithm: AlgorithmConfig) -> Findings:
    """An engine for the reference has no effect if neither loss nor reward reads the reference."""
    if not algorithm.needs_reference:
        message = "has no effect: nothing reads the reference; set algorithm.reference_kl or reward_kl, or leave it out"
        yield "algorithm.reference_engine.kind", message


def selections_are_possible(algorithm: AlgorithmConfig, train: TrainConfig, reward: Sequence[Any]) -> Findings:
    """Pruning with `allocate` keeps the size of an update only if whole groups fill the freed slots. The metric of a
    selection must be one that completions have."""
    size = train.completions_per_prompt
    metrics = {*METRICS, *METRIC_ALIASES, *(as_reward(spec).label for spec in reward)}
    for i, spec in enumerate(algorithm.selection):
        if SELECTIONS.holds(spec, "prune") and spec.allocate and not spec.keeps_size(size):
            reason = f"a group of {size} (train.completions_per_prompt) keeps {spec.kept(size)}, not a divisor of it"
            if spec.scope == "batch":
                reason = f"rate {spec.rate:g} of the batch leaves a share that is not 1/2, 1/3, 1/4 …"
            remedy = "use a rate and a group size that do, as rate 0.5, 0.75 or 0.875 with 16, or allocate=false"
            message = f"{reason}, so updates can't keep their size; {remedy}"
            yield f"algorithm.selection.{i}.allocate", message
        metric = getattr(spec, "metric", None)
        if isinstance(metric, str) and metric not in metrics:
            message = f"unknown metric of a completion; known: {', '.join(sorted(metrics))}"
            yield f"algorithm.selection.{i}.metric", message


def prune_rate_is_exact(algorithm: AlgorithmConfig, train: TrainConfig) -> Findings:
    """Warn if a prune rate can't be reached exactly, because a group loses whole completions."""
    size = train.completions_per_prompt
    for i, spec in enumerate(algorithm.selection):
        if SELECTIONS.holds(spec, "prune") and spec.scope == "group":
            rate = 1 - spec.kept(size) / size
            if abs(rate - spec.rate) > 1e-9:
                message = f"keeps {spec.kept(size)} of {size} completions, a rate of {rate:.3g}"
                yield f"algorithm.selection.{i}.rate", message


def dynamic_sampling_has_a_selection(r: Resolved[Any], algorithm: AlgorithmConfig) -> Findings:
    """Dynamic sampling needs a selection that drops groups; pruning and balancing keep a part of every group."""
    dynamic, selection = algorithm.dynamic_sampling, algorithm.selection
    if dynamic is not None and all(SELECTIONS.holds(spec, "balance", "prune") for spec in selection):
        remedy = "add drop_uniform_groups to algorithm.selection, or set algorithm.dynamic_sampling=null"
        message = f"no selection drops whole groups, so there is nothing to refill; {remedy}"
        settings = [entry for entry in r.entries if entry.path.startswith("algorithm.dynamic_sampling.")]
        given = [entry for entry in settings if entry.source != "default"]
        yield [*given, *settings][0].path, message


def next_policy_is_read(algorithm: AlgorithmConfig, rollouts: str | None) -> Findings:
    """`proximal: next` needs a correction towards the next policy. A replay can't compute that policy: others followed
    the stored rollouts."""
    if algorithm.proximal != "next":
        for name, off in fields_that_are_on(algorithm, {"next_from": "engine", "next_missing": "decoupled"}):
            yield f"algorithm.{name}", f"has no effect; set algorithm.proximal=next, or {name}={off}"
        return
    if not any("next_log_prob" in spec.needs for spec in algorithm.correction):
        remedy = "add algorithm.correction=[{kind: cap_floor, towards: next}], or set it to recompute"
        yield "algorithm.proximal", f"no correction reads the next policy; {remedy}"
    if rollouts is not None:
        message = "a replay has no versions of its own to compute the next policy from; set it to recompute"
        yield "algorithm.proximal", message


def routes_are_supplied(r: Resolved[Any], algorithm: AlgorithmConfig, engine: Any, rollouts: str | None) -> Findings:
    """Replayed routes must have been recorded, from a model with routers. Stored rollouts may lack them, which is
    counted."""
    path, replay = "algorithm.routing_replay", algorithm.routing_replay
    if replay == "recompute" and algorithm.proximal not in ("recompute", "next"):
        message = "replays the forward pass that recomputes the proximal policy, and there is none"
        yield path, f"{message}; set algorithm.proximal=recompute, or this to rollout"
    if replay == "rollout" and rollouts is None and "routed_experts" not in getattr(engine, "provides", ()):
        if hasattr(engine, "routed_experts"):
            yield path, "replays the experts that the engine chose; set engine.routed_experts=true"
        else:
            message = f"engine {r.entry('engine.kind').value!r} does not report which experts it chose"
            yield path, f"{message}; set it to recompute, with algorithm.proximal=recompute, or use engine=local"
    if asks_routers(algorithm, engine) and is_at_hand(r.config.model.path, r.config.model.revision):
        try:
            check_routed(r.config)
        except FieldError as error:
            yield error.field, error.requirement


def some_tokens_are_older(algorithm: AlgorithmConfig, runtime: RuntimeConfig) -> Findings:
    """Warn if no token can be at least two versions old: only such tokens differ from plain decoupled PPO."""
    if algorithm.proximal != "next":
        return
    if (lag := runtime.max_lag) < 2:
        message = f"with runtime.max_lag={lag} no token is two versions old, so this is proximal=recompute"
        yield "algorithm.proximal", f"{message}; set max_lag to 2"
    elif runtime.max_concurrent_rollouts is None and algorithm.dynamic_sampling is None:
        message = "without runtime.max_concurrent_rollouts each step trains on its own version's tokens"
        remedy = "so this is proximal=recompute; set it to the number of prompts that generate at once"
        yield "algorithm.proximal", f"{message}, {remedy}"


def fields_that_are_on(algorithm: AlgorithmConfig, off: Mapping[str, str]) -> list[tuple[str, str]]:
    """The fields that are neither empty nor at the value that turns them off, each with that value."""
    return [(name, text) for name, text in off.items() if (value := getattr(algorithm, name)) and value != text]


def overlap_is_possible(
    runtime: RuntimeConfig, rollouts: str | None, algorithm: AlgorithmConfig, engine: Any
) -> Findings:
    """Refuse overlap in a replay, without policy versions, or with `oversample`, which needs generation batches."""
    refill = algorithm.dynamic_sampling
    if rollouts is not None:
        yield CONCURRENT, "a replay (rollouts) generates nothing; set it to null"
    if runtime.overlaps and "policy_version" not in getattr(engine, "provides", {"policy_version"}):
        message = "does not report the policy version of a token, so nothing bounds its lag"
        yield "engine.kind", f"{message}; use another engine, or runtime.max_lag=0"
    if runtime.overlaps and refill is not None and refill.oversample is not None:
        message = f"has no effect with {CONCURRENT}: each rejected group is replaced by one prompt; set it to null"
        yield "algorithm.dynamic_sampling.oversample", message


def overlap_settings_have_an_effect(runtime: RuntimeConfig, rollouts: str | None) -> Findings:
    """A setting that only applies to asynchronous training must not be set without it. The parameter `rollouts` limits
    this to runs: `proxima eval` reads the same section, but has no such field."""
    if runtime.overlaps:
        return
    missing = runtime.max_concurrent_rollouts is None
    remedy = f"set {CONCURRENT} too" if missing else "runtime.max_lag=0 trains synchronously: raise that"
    if runtime.over_age != "wait":
        yield "runtime.over_age", f"only applies to asynchronous training; {remedy}, or leave it out"


def overlap_is_of_use(runtime: RuntimeConfig, train: TrainConfig, engine: Any) -> Findings:
    """Warn if engine and trainer can't work concurrently, or if a bound has no effect."""
    if not runtime.overlaps:
        yield "runtime.max_lag", f"{CONCURRENT} has no effect: with 0 the run is synchronous"
        return
    if kind_of(engine) == "local":
        message = "takes turns with the trainer in one thread, so that nothing overlaps; use engine.kind=local_process"
        yield "engine.kind", message
    if runtime.max_lag >= train.steps:
        message = f"bounds nothing: the run has {train.steps} steps, so all prompts may be generated before the first"
        yield "runtime.max_lag", f"{message}; lower it or raise train.steps"


def behavior_matches_sampling(sampling: Sampling, algorithm: AlgorithmConfig, engine: Any) -> Findings:
    """A ratio of the policy to a truncated distribution needs the tokens that remained, or it is off by their mass; and
    a comparison of policies over the whole vocabulary can't be combined with one over fewer tokens."""
    if not replays_sampling_masks(sampling, algorithm):
        return
    if "sampling_mask" not in getattr(engine, "provides", ()):
        cut = next(name for name, off in SAMPLING_OFF.items() if getattr(sampling, name) != off)
        message = "behavior=sampled compares the policy with the truncated distribution"
        remedy = f"{BEHAVIOR}=untruncated or {cut}={SAMPLING_OFF[cut]}"
        if hasattr(engine, "sampling_mask"):
            message += ", and needs the tokens that could be sampled"
            remedy = f"engine.sampling_mask=true, {remedy}"
        yield f"sampling.{cut}", f"{message}; set {remedy}"
    why = "under truncating sampling, behavior=sampled compares over the sampled tokens"
    for slot in ("surrogate", "aggregate", "reference_kl"):
        spec = getattr(algorithm, slot)
        if spec is not None and "top_k_log_prob" in spec.needs:
            message = f"compares the most probable tokens of the whole vocabulary; {why}"
            remedy = f"set its divergence=binary_tv, or {BEHAVIOR}=untruncated"
            yield f"algorithm.{slot}.kind", f"{message}; {remedy}"
    if algorithm.distillation is not None:
        message = f"a teacher is compared over the whole vocabulary; {why}; set {BEHAVIOR}=untruncated"
        yield "algorithm.distillation.path", message
    if algorithm.preference is not None:
        message = f"pairs are compared by their likelihood over the whole vocabulary; set {BEHAVIOR}=untruncated"
        yield "algorithm.preference.kind", message
    if algorithm.proximal == "next":
        message = f"the log-probs of the next version are over the whole vocabulary; {why}"
        yield "algorithm.proximal", f"{message}; set it to recompute, or {BEHAVIOR}=untruncated"
    if algorithm.reference_engine is not None and algorithm.needs_reference:
        message = f"an engine scores over the whole vocabulary; {why}; set it to null, or {BEHAVIOR}=untruncated"
        yield "algorithm.reference_engine", message


def sampling_masks_are_small(sampling: Sampling, algorithm: AlgorithmConfig) -> Findings:
    """Warn if masks may be large: where the policy is unsure, top-p and min-p alone keep much of the vocabulary."""
    if replays_sampling_masks(sampling, algorithm) and not 0 < sampling.top_k <= WIDE:
        message = f"the ids of all tokens that could be sampled go to the trainer; {WIDE} bounds them and seldom binds"
        yield "sampling.top_k", message


def evaluation_metric_exists(r: Resolved[Any], eval: EvalConfig, reward: Sequence[Any]) -> Findings:
    """`eval.metric` must be a metric of evaluations; a reward's own parts, `name/part`, are only known when it runs.
    `keep_best` needs one for which higher is better."""
    assert eval.metric is not None
    metric, samples, scored_by = _metric_of_a_set(eval, eval.metric, reward)
    rewards = {as_reward(spec).label for spec in scored_by}
    several = {f"mean@{samples}", *(f"pass@{k}" for k in powers_of_two(samples) if k > 1)} if samples > 1 else set()
    metrics = {*METRICS, *METRIC_ALIASES, *rewards, *several}
    if metric not in metrics and metric.removeprefix(PART).partition("/")[0] not in rewards:
        also = "NAME/PART for a part of a reward's own"
        yield "eval.metric", f"an evaluation has no such metric; {suggestion(metric, metrics, also)}"
    if r.get("checkpoint.keep_best") and metric in ("length", "truncated"):
        message = "keep_best keeps the highest, and here that is not the best"
        yield "eval.metric", f"{message}; name the accuracy, the reward or a reward"


def _metric_of_a_set(eval: EvalConfig, full_name: str, rewards: Sequence[Any]) -> tuple[str, int, Sequence[Any]]:
    """`eval.metric` without the name of a set before it, and the samples and rewards of the set that it belongs to."""
    name, _, metric = full_name.partition("/")
    for held_out in eval.sets:
        if metric and held_out.name == name:
            return metric, held_out.samples, held_out.reward or rewards
    return full_name, eval.samples, rewards


def top_k_is_usable(r: Resolved[Any]) -> Findings:
    """The vocabulary must have as many tokens, if the model's config is available locally; and a mean over the tokens
    that could be sampled needs the probabilities that they had, which the engine reports before truncation."""
    model, sampling = r.config.model, r.config.sampling
    vocabulary = _vocabulary(model.path, model.revision)
    if vocabulary is not None and r.config.engine.top_k_log_probs > vocabulary:
        yield "engine.top_k_log_probs", f"is more than the vocabulary of {model.path}; set it to {vocabulary} or less"
    if sampling.truncates and any(isinstance(spec, ScoreCentering) for spec in r.config.algorithm.correction):
        cut = next(name for name, off in SAMPLING_OFF.items() if getattr(sampling, name) != off)
        message = "truncates the distribution whose mean score_centering takes, and the engine reports it untruncated"
        yield f"sampling.{cut}", f"{message}; set it to {SAMPLING_OFF[cut]:g}"


def _vocabulary(path: str, revision: str | None) -> int | None:
    """The model's number of tokens; None if its config is not here, or can't be read, which other checks report."""
    try:
        config = load_config(path, revision).get_text_config() if is_at_hand(path, revision) else None
    except UserError:
        return None
    return getattr(config, "vocab_size", None)


def images_can_be_shown(r: Resolved[Any]) -> Findings:
    """Images are read by packed attention, and whole; of servers, vLLM reads them."""
    if not any(getattr(part, "images", None) for part in (r.get("task"), r.get("eval.task"), r.get("episode"))):
        yield "model.vision_lr_ratio", "has no effect: neither task.images nor episode.images is set; set it to 0"
        return
    for number, reward in enumerate(r.get("reward") or ()):
        if kind_of(reward) == "model":
            yield f"reward.{number}.kind", "model reads no images, which prompts show; take another reward"
    kind = None if (engine := r.get("engine")) is None else kind_of(engine)
    if kind not in (None, "local", "local_process", "vllm"):
        yield "engine", f"{kind} can't be shown images; set engine.kind=local"
    if (attention := r.get("model.attention")) not in ("auto", "packed"):
        yield "model.attention", f"{attention} can't be shown images; set it to auto"
    for name in ("tensor_parallel", "context_parallel"):
        if (r.get(path := f"placement.{name}") or 1) > 1:
            yield path, "can't be combined with images; set it to 1"


def adapters_are_ready(r: Resolved[Any], model: ModelConfig) -> Findings:
    """The targets must be layers of the model, and an adapter to start from must be one for this model."""
    lora = model.lora
    assert lora is not None
    if (Path(model.path) / ADAPTER).is_file():
        with suppress(FieldError):  # said by `models_exist`
            base = base_of(model.path).path
            yield "model.path", f"is an adapter; set model.path={base} and model.lora.path={model.path}"
    elif lora.path is not None and lora.init != Lora.init:
        yield "model.lora.init", "draws a new adapter, and model.lora.path is one; set one of the two"
    else:
        try:
            if lora.path is not None:
                check_start(lora, model.path, model.revision, scalar=hasattr(r.config, "reward_model"))
            if (Path(model.path) / "config.json").is_file():  # a hub name would need a request to the hub
                target_layers(load_shape(model.path), lora)
        except FieldError as error:
            if error.field.startswith("model.lora"):
                yield error.field, error.requirement


def weights_resolve_an_update(r: Resolved[Any], model: ModelConfig, train: OptimizationConfig) -> Findings:
    """Warn if rounding loses updates of Adam, about `lr` per weight: bfloat16 resolves 2^-8 of a weight. An adapter is
    float32; a critic with its own weights is trained in full even with one."""
    critic = r.get("critic")
    trained = {} if model.lora is not None else {"train.optimizer.lr": train.optimizer}
    if CRITICS.holds(critic, "model") and (critic.optimizer is not None or not trained):
        path = "train" if critic.optimizer is None else "critic"
        trained[f"{path}.optimizer.lr"] = critic.optimizer or train.optimizer
    for path, optimizer in trained.items():
        relative = optimizer.lr / TYPICAL_WEIGHT if OPTIMIZERS.holds(optimizer, *OPTIMIZERS) else BFLOAT16_STEP
        if not 0 < relative < BFLOAT16_STEP:
            continue
        message = f"an update moves a weight of {TYPICAL_WEIGHT:g} by about {relative:.2g} of itself, and model.dtype="
        message += f"bfloat16 resolves 2^-8 = {BFLOAT16_STEP:.2g}: weights above {optimizer.lr / BFLOAT16_STEP:.1g}"
        remedy = "set model.dtype=float32 (model.compute_dtype=bfloat16 keeps the speed), or raise the learning rate"
        yield path, f"{message} do not change; {remedy}"


def trackers_are_ready(monitor: Sequence[Any]) -> Findings:
    """The trackers' packages must be installed, and no kind may be named twice."""
    kinds = [kind_of(tracker) for tracker in monitor]
    for index, tracker in enumerate(monitor):
        if remedy := tracker.problem():
            yield f"monitor.{index}.kind", remedy
        elif kinds[index] in kinds[:index]:
            yield f"monitor.{index}.kind", "is named twice; keep one"
