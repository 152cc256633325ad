"""AReaL's trainings on a fixed data set: SFT, reward models and DPO."""

from collections.abc import Callable
from dataclasses import replace

from proxima_peers.convert import common, trackers
from proxima_peers.convert.areal import areal_clipping_and_saving, areal_model, areal_optimizer, not_in_steps
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.known import Rules, option_rules
from proxima_peers.convert.options import Options

TYPES = {"sft": "sft", "rw": "reward", "dpo": "dpo"}
ROLLOUTS = ("gconfig.", "rollout.")
FREQUENCIES = ("evaluator.freq_epochs", "evaluator.freq_steps", "evaluator.freq_secs")


def training_of(o: Options) -> str | None:
    """`sft`, `reward` or `dpo`, by `train_dataset.type` or else by options that only one of them has; None for another
    training."""
    if any(name.startswith(ROLLOUTS) for name in o.flat):
        return None
    command = TYPES.get(str(o.flat.get("train_dataset.type")))
    if command is None and o.flat.get("beta") is not None and o.flat.get("actor.path") is not None:
        return "dpo"
    if command is None and o.flat.get("model.path") is not None:
        return "sft"
    return command


def prefix_of(o: Options) -> str:
    """The section of the trained model: `model.`, since 2026 `actor.`."""
    return "model." if o.flat.get("model.path") is not None else "actor."


def rules_of(o: Options) -> Rules:
    """The rules of AReaL's trainings with rewards, of which those for `actor` also apply to `model`."""
    rules = option_rules("areal")
    if prefix_of(o) == "actor.":
        return rules
    own = {name.replace("actor.", "model.", 1): rule for name, rule in rules.items() if name.startswith("actor.")}
    copies = {name: rule for name, rule in rules.items() if rule.effect == "copies" and rule.why.startswith("actor.")}
    return rules | own | {name: replace(rule, why=f"model.{rule.why[6:]}") for name, rule in copies.items()}


def convert_offline(o: Options, command: str) -> Draft:
    """A recipe for SFT, a reward model or DPO."""
    d = Draft()
    prefix = prefix_of(o)
    areal_model(d, o, prefix)
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
    areal_optimizer(d, o, f"{prefix}optimizer.")
    common.length_of_run(d, o, "total_train_steps", "total_train_epochs", epochs=1)
    warmup = (f"{prefix}optimizer.warmup_steps", f"{prefix}optimizer.warmup_steps_proportion")
    common.warmup_of_rows(d, o, *warmup, share=0.001)
    areal_clipping_and_saving(d, o, f"{prefix}optimizer.")
    not_in_steps(d, o, "saver", "checkpoint.every")
    _evaluation(d, o, command)
    trackers.areal(d, o)
    return d


def _rows(d: Draft, o: Options, command: str, section: str, path: str, split: str) -> None:
    """The rows, whose columns AReaL's loader knows by the name of the data set."""
    common.task(d, o, f"{section}.path", path=path, split=str(o.get(f"{section}.split", default=split)))
    o.given(f"{section}.type")  # read by `training_of`
    gsm8k = d.entries[f"{path}.kind"].value == "gsm8k"
    if command == "sft" and gsm8k:
        d.put("sft.completion", "{solution}\n#### {answer}", "AReaL trains on the whole solution")
        if path == "task":
            why = "AReaL joins question and answer as bare text; here the model's chat template stands between them"
            d.lacks(f"{section}.path", why)
    elif not gsm8k:
        column = "messages" if command == "sft" else "chosen"
        d.put(f"{path}.messages", column, "to be checked")
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
    """`loss_type`, `beta`, and the reference, which is the initial model of the run."""
    loss = o.choice(("sigmoid", "ipo"), "loss_type", default="sigmoid")
    d.spec("preference.loss.0", loss, o.origin("loss_type"), "", beta=o.sourced("beta", default=0.1))
    if loss == "ipo":
        d.needs("preference.loss.0", "loss_type: ipo: the log-ratios are per token here, as its authors say")
    theirs = o.get("ref.path")
    ours = o.get("actor.path")
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


def _evaluation(d: Draft, o: Options, command: str) -> None:
    """`valid_dataset`, `evaluator`."""
    if o.get("valid_dataset.path") is None:
        d.drops_given(o, "there are no held-out rows", *FREQUENCIES)
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
    not_in_steps(d, o, "evaluator", "eval.every")
