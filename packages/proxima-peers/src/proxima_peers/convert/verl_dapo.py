"""verl's options for DAPO: the overlong buffer of its reward manager, and dynamic sampling."""

import math

from proxima_peers.convert import common
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.options import Options

ROLLOUT = "actor_rollout_ref.rollout."
OVERLONG = (
    "custom_reward_function.overlong_buffer.",  # the first DAPO scripts
    "reward_model.overlong_buffer.",
    "reward_model.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward.reward_kwargs.overlong_buffer_cfg.",
)


def overlong_buffer(d: Draft, o: Options, longest: int) -> None:
    """The overlong buffer of the DAPO reward manager."""
    for prefix in OVERLONG:
        if not o.given(prefix + "enable", prefix + "len", prefix + "penalty_factor"):
            continue
        limit = prefix.rpartition("overlong")[0] + "max_resp_len"
        o.given(prefix + "log", limit)
        if not o.flag(prefix + "enable"):
            d.drops(prefix + "*", "enable is false")
            continue
        buffer = o.sourced(prefix + "len")
        factor = prefix + "penalty_factor"
        share = 0.0 if prefix in OVERLONG[:2] else None  # 0 in verl's dapo_trainer.yaml
        lengths = (limit, "data.max_response_length", ROLLOUT + "response_length")
        most = (o.whole(limit, default=longest), o.origin(*lengths))
        common.overlong(d, most, buffer, o.sourced(factor, default=share))
        if most[0] < longest:
            growing = "beyond it verl's penalty keeps growing, here it stays constant"
            d.lacks(limit, f"{most[0]}, below the {longest} tokens of a completion: {growing}")


METRICS = {"acc": "accuracy", "score": "reward", "seq_reward": "reward", "seq_final_reward": "reward"}


def dynamic_sampling(d: Draft, o: Options) -> None:
    """DAPO's dynamic sampling: uniform groups are replaced by newly generated ones; surplus groups are discarded."""
    prefix = "algorithm.filter_groups."
    options = tuple(prefix + name for name in ("metric", "max_num_gen_batches", "max_inflight_gen_batches"))
    prompts = o.whole("data.train_batch_size", default=1024, least=1)
    generated = o.whole("data.gen_batch_size", least=1)
    alone = o.given(ROLLOUT + "n") and o.whole(ROLLOUT + "n") == 1  # without it, a part of a command: to fill in
    if alone or not o.flag(prefix + "enable"):
        if alone:
            d.drops_given(o, "verl keeps groups of one", prefix + "enable", *options)
        else:
            d.drops_given(o, "filter_groups.enable is false", *options)
        if generated not in (None, prompts):
            d.lacks("data.gen_batch_size", "without filter_groups as many prompts are generated as a step consumes")
        return
    _filter(d, o, options[0])
    if not o.flag(prefix + "fill_to_train_bsz", default=True):  # of the first DAPO scripts
        why = "what is left of gen_batch_size prompts is a step; here it is prompts_per_step less what is dropped"
        d.lacks(prefix + "fill_to_train_bsz", f"false: {why}")
        return
    limit = o.whole(options[1], default=0)
    path = "algorithm.dynamic_sampling."
    unlimited = "" if limit > 0 else "no limit, as in verl"
    d.put(path + "max_num_gen_batches", limit, o.origin(options[1]), unlimited)
    d.put(path + "exhausted", "stop", "verl raises then")
    share = 1.0
    origin = "verl's default of data.gen_batch_size"
    note = ""
    if generated is not None:
        share = generated / prompts
        origin = "from data.gen_batch_size"
        note = f"{generated} prompts at once, for a step of {prompts}"
    if share < 1:
        why = f"fewer than the {prompts} of a step: a generation batch has at least as many here"
        d.lacks("data.gen_batch_size", f"{generated}, {why}")
        share = 1.0
        note = ""
    elif math.ceil(share * prompts) > (generated or prompts):
        share = math.nextafter(share, 0)  # 29 / 7 * 7 is a little more than 29
    d.put(path + "oversample", share, origin, note)
    d.put("runtime.max_lag", 0, "verl discards surplus groups", "1 keeps them for the next step")
    if o.given(options[2]):
        here = "here whole generation batches follow one another"
        d.lacks(options[2], f"verl's V1 trainer replaces single prompts as they come, without end; {here}")


def _filter(d: Draft, o: Options, name: str) -> None:
    """The filter of uniform groups, in which all completions have the same `metric`."""
    metric = o.get(name)
    origin = o.origin(name)
    index = len({path.split(".")[2] for path in d.entries if path.startswith("algorithm.selection.")})
    ours = METRICS.get(str(metric), "reward")
    note = ""
    penalised = any(entry.value == "overlong" for path, entry in d.entries.items() if path.endswith(".kind"))
    if metric == "score" and penalised:
        path = d.entries.get("reward.0.path")
        if path is None:
            ours = str(d.entries["reward.0.kind"].value)
        else:
            ours = str(path.value.rpartition(":")[2])
        note = "verl's score is the scorer's own, before the overlong penalty"
    d.append("algorithm.selection", "drop_uniform_groups", "from algorithm.filter_groups.enable", note)
    if metric is None:
        what = "what verl filters by, filter_groups.metric; accuracy is its acc"
        d.ask(f"algorithm.selection.{index}.metric", ours, what)
        return
    d.put(f"algorithm.selection.{index}.metric", ours, origin)
    if str(metric) not in METRICS:
        d.lacks(name, f"{metric}: a value that your own scorer returns; taken: reward. The name of a reward would do")
