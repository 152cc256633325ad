"""Checks of a run's length, batches and evaluations against each other."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from proxima.config.critic_schema import ModelCritic
from proxima.config.problems import Problem, suggestion
from proxima.config.resolve import Resolved
from proxima.data.outcomes import METRIC_ALIASES, METRICS
from proxima.evaluate.eval_metrics import powers_of_two
from proxima.evaluate.headline import PART
from proxima.reward import Overlong
from proxima.reward.base import as_reward
from proxima.task import Arithmetic
from proxima.task.mix import parts_of
from proxima.train.optimizer import AdamW

BFLOAT16_STEP = 2**-8
TYPICAL_WEIGHT = 0.02  # the standard deviation with which most models are initialised


def evaluations_are_configured(r: Resolved[Any]) -> Iterator[Problem]:
    """`every` and `keep_best` need evaluations, and those a task."""
    if r.config.eval.every and r.config.eval.task is None:
        yield r.problem("eval.every", "there is nothing to evaluate; set eval.task, or eval.every=0")
    if r.config.checkpoint.keep_best and (r.config.eval.task is None or not r.config.eval.every):
        message = "the best is found by evaluations during the run; set eval.task and eval.every, or false"
        yield r.problem("checkpoint.keep_best", message)


def evaluation_metric_exists(r: Resolved[Any]) -> Iterator[Problem]:
    """`eval.metric` names what an evaluation has; the parts of a reward's own, `name/part`, are known when it runs."""
    if r.config.eval.metric is None:
        return
    metric, samples, scored_by = _metric_of_a_set(r)
    rewards = {as_reward(reward).label for reward in scored_by}
    several = {f"mean@{samples}", *(f"pass@{k}" for k in powers_of_two(samples) if k > 1)} if samples > 1 else set()
    known = {*METRICS, *METRIC_ALIASES, *rewards, *several}
    if metric not in known and metric.removeprefix(PART).partition("/")[0] not in rewards:
        also = "NAME/PART for a part of a reward's own"
        yield r.problem("eval.metric", f"an evaluation has no such metric; {suggestion(metric, known, also)}")


def _metric_of_a_set(r: Resolved[Any]) -> tuple[str, int, Sequence[Any]]:
    """`eval.metric` without the name of a further set before it, and the samples and rewards of the set it is of."""
    evaluation, rewards = r.config.eval, r.config.reward
    name, _, metric = evaluation.metric.partition("/")
    for held_out in evaluation.sets:
        if metric and held_out.name == name:
            return metric, held_out.samples, held_out.reward or rewards
    return evaluation.metric, evaluation.samples, rewards


def best_metric_has_a_direction(r: Resolved[Any]) -> Iterator[Problem]:
    """The highest of a length is nobody's best."""
    if r.config.checkpoint.keep_best and r.config.eval.metric and _metric_of_a_set(r)[0] in ("length", "truncated"):
        message = "keep_best keeps the highest, and here that is not the best"
        yield r.problem("eval.metric", f"{message}; name the accuracy, the reward or a reward")


def evaluation_is_held_out(r: Resolved[Any]) -> Iterator[Problem]:
    """Training and evaluation have no question in common."""
    sets = [(f"{path}.task", part) for path, one in r.config.eval.all_sets.items() for part in parts_of(one.task)]
    for (path, asked), trained in product(sets, parts_of(r.config.task)):
        if asked == trained:
            remedy = f"name another file with {path}.path" if hasattr(asked, "path") else "set another split"
            yield r.problem(path, f"has the questions of `task`: its figures are those of training data; {remedy}")
        elif isinstance(asked, Arithmetic) and isinstance(trained, Arithmetic) and not _are_disjoint(trained, asked):
            remedy = "set split train for `task`, test here, and equal `held_out`"
            yield r.problem(path, f"some of its questions are trained on; {remedy}")


def _are_disjoint(trained: Arithmetic, asked: Arithmetic) -> bool:
    """Whether two sides of a split by hash have no question in common."""
    if trained.split == "train":
        return asked.split == "test" and asked.held_out <= trained.held_out
    return asked.split == "train" and asked.held_out >= trained.held_out


def warmup_ends(r: Resolved[Any]) -> Iterator[Problem]:
    """The learning rate reaches its value within the run."""
    train = r.config.train
    if (updates := train.updates) is not None and train.warmup_of(updates) >= updates:
        name = "train.warmup_ratio" if train.warmup_ratio else "train.warmup_steps"
        made = f"the run has {updates} update{'s' * (updates != 1)}"
        message = f"{made}, so the learning rate never reaches its value; lower {name} or raise train.steps"
        yield r.problem(name, message)


def weights_resolve_an_update(r: Resolved[Any]) -> Iterator[Problem]:
    """An update of Adam, about `lr` a weight, is not rounded away: bfloat16 resolves 2^-8 of a weight. An adapter is
    float32; a critic's own weights are trained as a whole beside it."""
    if r.config.model.dtype != "bfloat16":
        return
    train, critic = r.config.train, r.get("critic")
    trained = {} if r.config.model.lora is not None else {"train.optimizer.lr": train.optimizer}
    if isinstance(critic, ModelCritic) and (critic.optimizer is not None or not trained):
        path = "train" if critic.optimizer is None else "critic"
        trained[f"{path}.optimizer.lr"] = critic.optimizer or train.optimizer
    for path, optimizer in trained.items():
        relative = optimizer.lr / TYPICAL_WEIGHT if isinstance(optimizer, AdamW) else BFLOAT16_STEP
        if not 0 < relative < BFLOAT16_STEP:
            continue
        message = f"an update moves a weight of {TYPICAL_WEIGHT:g} by about {relative:.2g} of itself, and model.dtype="
        message += f"bfloat16 resolves 2^-8 = {BFLOAT16_STEP:.2g}: weights above {optimizer.lr / BFLOAT16_STEP:.1g}"
        remedy = "set model.dtype=float32 (model.compute_dtype=bfloat16 keeps the speed), or raise the learning rate"
        yield r.problem(path, f"{message} do not change; {remedy}")


def completions_fit_micro_batch(r: Resolved[Any]) -> Iterator[Problem]:
    """A whole completion fits the token budget of one forward."""
    if (tokens := r.config.sampling.max_tokens) > r.config.train.tokens_per_micro_batch:
        message = f"a completion may have {tokens} tokens (sampling.max_tokens): it is forwarded alone, over budget"
        yield r.problem("train.tokens_per_micro_batch", message)


def overlong_penalty_is_reachable(r: Resolved[Any]) -> Iterator[Problem]:
    """A completion can become long enough for the penalty."""
    longest = r.config.sampling.max_tokens
    for i, reward in enumerate(r.config.reward):
        if isinstance(reward, Overlong) and (free := reward.max_tokens - reward.buffer_tokens) >= longest:
            message = f"the penalty starts after {free} tokens, never reached with sampling.max_tokens={longest}"
            yield r.problem(f"reward.{i}.max_tokens", message)
