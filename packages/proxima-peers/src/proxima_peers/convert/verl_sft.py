"""verl's SFT: the config of its FSDP trainer up to 0.5, and of its engines since."""

from proxima_peers.convert import common, trackers
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.known import Rules, option_rules
from proxima_peers.convert.options import Options
from proxima_peers.convert.verl_training import lora_by_rank, lora_names, placement

OLDER = "model.partial_pretrain"
REWARDED = ("actor_rollout_ref.", "algorithm.", "critic.")
MARKS = (OLDER, "data.response_key", "data.messages_key", "data.multiturn.enable", "data.pad_mode")
MESSAGES = ("data.multiturn.messages_key", "data.messages_key")


def training_of(o: Options) -> str | None:
    """`sft` if the file sets options that only SFT has; None for another training."""
    if any(name.startswith(REWARDED) for name in o.flat):
        return None
    return "sft" if any(o.flat.get(name) is not None for name in MARKS) else None


def rules_of(o: Options) -> Rules:
    """The rules of SFT, and those for the trainer's options that all verl trainings share."""
    shared = {name: rule for name, rule in option_rules("verl").items() if not name.startswith(REWARDED)}
    return option_rules("verl_sft") | shared


def convert_offline(o: Options, command: str) -> Draft:
    """A recipe for SFT."""
    d = Draft()
    common.model(d, o, OLDER, "model.path")
    common.dtype(d, o, "dtype", "model.fsdp_config.model_dtype", "engine.model_dtype", default="fp32")
    common.dtype(d, o, "compute_dtype", "engine.dtype", default="bfloat16")
    d.flag("model.gradient_checkpointing", o, "model.enable_gradient_checkpointing")
    lora_by_rank(d, o, lora_names("model."))
    columns = _columns(o)
    common.task(d, o, "data.train_files", **columns)
    if "messages" not in columns and d.entries["task.kind"].value == "gsm8k":
        d.put("sft.completion", "{solution}\n#### {answer}", "verl trains on the whole solution")
    placement(d, o)
    _length(d, o)
    common.template_arguments(d, o, "data.apply_chat_template_kwargs")
    if "messages" in columns:
        d.put("sft.loss_on", "all_turns", "verl's rows of chats")
    else:
        d.put("sft.loss_on", "completion", "verl's rows")
    d.put("train.examples_per_step", *o.sourced("data.train_batch_size", default=256))
    _micro_batches(d, o)
    _training(d, o)
    _evaluation(d, o, columns)
    trackers.verl(d, o)
    return d


def _columns(o: Options) -> dict[str, str]:
    """The columns of the rows: a chat, or a prompt and its answer."""
    turns = o.flag("data.multiturn.enable", default=not o.given(OLDER, "data.prompt_key", "data.response_key"))
    o.given(*MESSAGES)
    if turns:
        return {"messages": str(o.get(*MESSAGES, default="messages"))}
    return {"question": _column(o, "prompt"), "answer": _column(o, "response")}


def _column(o: Options, part: str) -> str:
    """The column of `prompt` or `response`; `extra_info.question` if `…_dict_keys` names a key inside the column."""
    column = str(o.get(f"data.{part}_key", default=part))
    keys = o.get(f"data.{part}_dict_keys", default=[])
    inside = keys if isinstance(keys, list) else [keys]
    if len(inside) > 1:
        o.refuse("one key is read of a column", f"data.{part}_dict_keys")
    return ".".join([column, *map(str, inside[:1])])


def _length(d: Draft, o: Options) -> None:
    """`max_length` and `truncation`."""
    d.put("model.max_length", *o.sourced("data.max_length", default=1024))
    cut = o.choice(("error", "left", "right"), "data.truncation", default="error")
    name = "data.truncation"
    d.put("data.over_length", {"error": "refuse", "right": "truncate", "left": "skip"}[cut], o.origin(name))
    if cut == "left":
        d.lacks(name, "left: verl cuts off the start of a longer row, the prompt's; here it is skipped")


def _micro_batches(d: Draft, o: Options) -> None:
    """Micro-batches; up to 0.5, the mean over tokens is taken per micro-batch."""
    for name in ("data.micro_batch_size", "data.micro_batch_size_per_gpu"):
        if o.given(OLDER) and o.given(name):
            why = "verl means over each micro batch's tokens first, so that short rows weigh more; here over the step's"
            d.lacks(name, f"{o.get(name)}: {why}")
        else:
            d.drops_given(o, "the mean is that of the step's tokens", name)
    if o.flag("data.use_dynamic_bsz", default=not o.given(OLDER)):
        d.copy("train.tokens_per_micro_batch", o, "data.max_token_len_per_gpu")
    else:
        d.drops_given(o, "use_dynamic_bsz is off", "data.max_token_len_per_gpu")


def _training(d: Draft, o: Options) -> None:
    names = {name: (f"optim.{name}",) for name in ("lr", "weight_decay", "eps")}
    common.optimizer(d, o, names, {"lr": 1e-5, "weight_decay": 0.01})
    betas = [0.9, 0.999]
    schedule = "constant"
    share = 0.0
    if o.given(OLDER):
        betas = [0.9, 0.95]
        schedule = "cosine"
        share = 0.1
    common.betas(d, o, "optim.betas", "train", betas)
    spellings = ("optim.lr_scheduler_type", "optim.lr_scheduler", "optim.warmup_style")
    common.schedule(d, o, *spellings, default=schedule)
    common.lowest_rate(d, o, (), ("optim.min_lr_ratio",))
    ratios = ("optim.lr_warmup_steps_ratio", "optim.warmup_steps_ratio")
    common.warmup_of_rows(d, o, "optim.lr_warmup_steps", *ratios, share=share)
    common.length_of_run(d, o, "trainer.total_training_steps", "trainer.total_epochs", epochs=4)
    d.copy("train.max_grad_norm", o, "optim.clip_grad", default=1.0)
    d.put("checkpoint.every", max(0, o.whole("trainer.save_freq", default=-1)), o.origin("trainer.save_freq"))
    d.copy("checkpoint.keep_last", o, "trainer.max_ckpt_to_keep", whole=True)
    d.copy("seed", o, "trainer.seed", default=1)


def _evaluation(d: Draft, o: Options, columns: dict[str, str]) -> None:
    """`val_files`, `test_freq`."""
    every = (max(0, o.whole("trainer.test_freq", default=-1)), o.origin("trainer.test_freq"))
    if common.evaluation(d, o, "data.val_files", every, **columns):
        d.put("eval.limit", max(0, o.whole("data.val_max_samples", default=-1)), o.origin("data.val_max_samples"))
        d.put("eval.before", False, "verl evaluates no model that is not trained")
    else:
        d.drops_given(o, "there are no held-out rows", "data.val_max_samples")
