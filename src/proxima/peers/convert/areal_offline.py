"""AReaL's trainings on a fixed data set: SFT, reward models and DPO."""

from collections.abc import Callable
from dataclasses import replace

from proxima.peers.convert import common, trackers
from proxima.peers.convert.adapter import LoraNames, lora
from proxima.peers.convert.draft import Draft
from proxima.peers.convert.known import Rules, option_rules
from proxima.peers.convert.options import Options

TYPES = {"sft": "sft", "rw": "reward", "dpo": "dpo"}
ROLLOUTS = ("gconfig.", "rollout.")


def command_of_areal(o: Options) -> str | None:
    """`sft`, `reward` or `dpo`, of which `train_dataset.type` tells, or else what only one of them has; None: another
    training."""
    if any(name.startswith(ROLLOUTS) for name in o.flat):
        return None
    told = TYPES.get(str(o.flat.get("train_dataset.type")))
    if told is None and o.flat.get("beta") is not None and o.flat.get("actor.path") is not None:
        return "dpo"
    return "sft" if told is None and o.flat.get("model.path") is not None else told


def prefix_of(o: Options) -> str:
    """The section of the model that is trained: `model.`, since 2026 `actor.`."""
    return "model." if o.flat.get("model.path") is not None else "actor."


def areal_rules(o: Options) -> Rules:
    """Those of AReaL's trainings with rewards, of which the actor's also hold for `model`."""
    rules = option_rules("areal")
    if prefix_of(o) == "actor.":
        return rules
    own = {name.replace("actor.", "model.", 1): rule for name, rule in rules.items() if name.startswith("actor.")}
    copies = {name: rule for name, rule in rules.items() if rule.effect == "copies" and rule.why.startswith("actor.")}
    return rules | own | {name: replace(rule, why=f"model.{rule.why[6:]}") for name, rule in copies.items()}


def convert_areal_offline(o: Options, command: str) -> Draft:
    """A recipe of `proxima sft`, `proxima reward` or `proxima dpo`."""
    d, prefix = Draft(), prefix_of(o)
    common.model(d, o, f"{prefix}path")
    note = "master weights stay float32 here"
    common.dtype(d, o, "compute_dtype", f"{prefix}dtype", default="bfloat16", note=note)
    d.flag("model.gradient_checkpointing", o, f"{prefix}gradient_checkpointing")
    if o.flag(f"{prefix}use_lora"):
        rank, alpha, targets = (prefix + name for name in ("lora_rank", "lora_alpha", "target_modules"))
        lora(d, o, LoraNames(rank=rank, alpha=alpha, targets=targets, default_rank=32, default_alpha=16))
    _rows(d, o, command, "train_dataset", "task", "train")
    longest = o.whole("train_dataset.max_length", least=1)
    if longest is not None:
        d.put("model.max_length", longest, o.origin("train_dataset.max_length"))
        d.put("data.over_length", "skip", "AReaL leaves longer rows out")
    d.flag("data.shuffle", o, "train_dataset.shuffle")
    SECTIONS[command](d, o)
    _critic_head(d, o, prefix, command)
    d.put("train.examples_per_step", *o.sourced("train_dataset.batch_size", default=1))
    d.copy("train.tokens_per_micro_batch", o, f"{prefix}mb_spec.max_tokens_per_mb")
    _training(d, o, f"{prefix}optimizer.")
    _evaluation(d, o, command)
    trackers.areal(d, o)
    return d


def _rows(d: Draft, o: Options, command: str, section: str, path: str, split: str) -> None:
    """The rows; what they hold a loader of AReaL's knows by the data set's name."""
    common.task(d, o, f"{section}.path", path=path, split=str(o.get(f"{section}.split", default=split)))
    o.given(f"{section}.type")  # what tells the command
    gsm8k = d.entries[f"{path}.kind"].value == "gsm8k"
    if command == "sft" and gsm8k:
        d.put("sft.completion", "{solution}\n#### {answer}", "AReaL trains on the whole solution")
        if path == "task":
            why = "AReaL joins question and answer as bare text; here the model's chat template stands between them"
            d.lacks(f"{section}.path", why)
    elif not gsm8k:
        d.put(f"{path}.messages", "messages" if command == "sft" else "chosen", "to be checked")
        d.put(f"{path}.answer", None, "no column of its own")
    if path == "task" and not gsm8k:
        d.needs("task", f"which columns the rows have, which AReaL's loader knows by their name: {NOTES[command]}")


NOTES = {
    "sft": "chats in `messages` stand here; for pairs write question: prompt, answer: completion",
    "reward": "whole chats in chosen and rejected stand here; texts of whole dialogues are to be cut into chats",
    "dpo": "whole chats in chosen and rejected stand here; texts of whole dialogues are to be cut into chats",
}


def _sft(d: Draft, o: Options) -> None:
    d.put("sft.loss_on", "completion", "AReaL's loss is on the answer")


def _reward(d: Draft, o: Options) -> None:
    d.put("reward_model.head_std", 0.02, "transformers draws a new head with initializer_range, mostly .02")


def _preference(d: Draft, o: Options) -> None:
    """`loss_type`, `beta`, and the reference, which is the model that the run begins with."""
    loss = o.choice(("sigmoid", "ipo"), "loss_type", default="sigmoid")
    d.spec("preference.loss.0", loss, o.origin("loss_type"), "", beta=o.sourced("beta", default=0.1))
    if loss == "ipo":
        d.needs("preference.loss.0", "loss_type: ipo: the log-ratios are per token here, as its authors say")
    theirs, ours = o.get("ref.path"), o.get("actor.path")
    if theirs is not None and theirs != ours:
        d.lacks("ref.path", f"{theirs}: the reference is the model that the run begins with")
    elif theirs is not None:
        d.drops("ref.path", "the reference is the model that the run begins with")


SECTIONS: dict[str, Callable[[Draft, Options], None]] = {"sft": _sft, "reward": _reward, "dpo": _preference}


def _critic_head(d: Draft, o: Options, prefix: str, command: str) -> None:
    """`is_critic`: the model has a scalar head, as a reward model must."""
    name = f"{prefix}is_critic"
    if o.flag(name, default=command == "reward") is (command == "reward"):
        d.drops_given(o, "as the command says", name)
    else:
        d.lacks(name, f"{o.get(name)}, which AReaL refuses here")


def _training(d: Draft, o: Options, prefix: str) -> None:
    """Optimizer, schedule, length of the run, checkpoints."""
    kind = o.get(f"{prefix}type", default="adam")
    if kind not in ("adam", "adamw"):
        d.lacks(f"{prefix}type", f"{kind}: only AdamW, with its states in float32")
    names = {name: (prefix + name,) for name in ("lr", "beta1", "beta2", "eps", "weight_decay")}
    common.optimizer(d, o, names, {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01})
    common.schedule(d, o, f"{prefix}lr_scheduler_type", default="constant")
    steps, epochs = o.whole("total_train_steps"), o.whole("total_train_epochs", default=1, least=1)
    if steps:
        d.put("train.steps", steps, o.origin("total_train_steps"))
        d.drops_given(o, "total_train_steps ends the run", "total_train_epochs")
    else:
        d.put("train.epochs", epochs, o.origin("total_train_epochs"))
    fixed, share = o.whole(f"{prefix}warmup_steps", default=0), f"{prefix}warmup_steps_proportion"
    if fixed:
        d.put("train.warmup_steps", fixed, o.origin(f"{prefix}warmup_steps"))
        d.drops_given(o, "warmup_steps says more", share)
    else:
        d.put("train.warmup_ratio", o.number(share, default=0.001, least=0, most=1), o.origin(share))
    d.copy("train.final_lr_ratio", o, f"{prefix}min_lr_ratio")
    d.copy("train.max_grad_norm", o, f"{prefix}gradient_clipping", default=1.0)
    if every := o.whole("saver.freq_steps"):
        d.put("checkpoint.every", every, o.origin("saver.freq_steps"))
    _in_epochs(d, o, "saver", "checkpoint.every")
    d.copy("seed", o, "seed", default=1)


def _evaluation(d: Draft, o: Options, command: str) -> None:
    """`valid_dataset`, `evaluator`."""
    if o.get("valid_dataset.path") is None:
        d.drops_given(o, "there are no held-out rows", *(f"evaluator.{name}" for name in FREQUENCIES))
        return
    _rows(d, o, command, "valid_dataset", "eval.task", "test")
    longest = "valid_dataset.max_length"
    if o.given(longest) and o.get(longest) != o.get("train_dataset.max_length"):
        d.lacks(longest, f"{o.get(longest)}: model.max_length bounds held-out rows too")
    else:
        d.drops_given(o, "as train_dataset.max_length", longest)
    d.put("eval.limit", 0, "AReaL evaluates on all held-out rows")
    d.put("eval.every", o.whole("evaluator.freq_steps", default=0) or 0, o.origin("evaluator.freq_steps"))
    d.put("eval.before", o.flag("evaluator.eval_before_train"), o.origin("evaluator.eval_before_train"))
    _in_epochs(d, o, "evaluator", "eval.every")


FREQUENCIES = ("freq_epochs", "freq_steps", "freq_secs")


def _in_epochs(d: Draft, o: Options, section: str, path: str) -> None:
    for name in (f"{section}.freq_epochs", f"{section}.freq_secs"):
        if o.given(name):
            d.needs(path, f"{name}: {o.get(name)}; set it in steps")
