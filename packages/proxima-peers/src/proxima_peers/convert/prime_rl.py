"""prime-rl: the TOML of its `rl` command, with its default loss, IcePop, or DPPO as it was up to 2026-08-27.

The defaults of the losses are those of pull requests #3418 (2026-08-27: `ipo` is the default, `ipo_threshold` becomes
`eps`), #3526 (IcePop) and #3586 (2026-09-18: `eps` 0.3, `kl_tau` 0); all others are those of commit 559b4477.
"""

from proxima_peers.convert import common, trackers
from proxima_peers.convert.adapter import LoraNames, lora
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.options import Options

LOSS, OPTIMIZER, SCHEDULER, BATCH = "trainer.loss.", "trainer.optim.", "trainer.scheduler.", "orchestrator."
SAMPLING = f"{BATCH}train.sampling."
LORA = LoraNames(
    rank="trainer.model.lora.rank",
    alpha="trainer.model.lora.alpha",
    targets="trainer.model.lora.target_modules",
    dropout="trainer.model.lora.dropout",
    default_rank=16,
    default_alpha=32,
)


def convert(o: Options) -> Draft:
    """A recipe from prime-rl's options."""
    d = Draft()
    common.model(d, o, "trainer.model.name", f"{BATCH}model.name", "model.name")
    if any(name.startswith("trainer.model.lora.") for name in o.flat):
        lora(d, o, LORA)
    lengths = (f"{BATCH}seq_len", "trainer.model.seq_len", "seq_len")
    d.copy("model.max_length", o, *lengths, default=2048, whole=True)
    common.dtype(d, o, "dtype", "trainer.model.optimization_dtype", default="float32")
    source = f"{BATCH}train.source"
    d.ask("task", "gsm8k", f"{source}: the questions of its environment; see `proxima list task`", kind=True)
    common.reward(d)
    if o.given(source):
        d.wait("task", source, "an environment of `verifiers` gives questions and rewards")
    _surrogate(d, o)
    _advantage(d, o)
    d.spec("algorithm.aggregate", "token_mean", "prime-rl divides by all tokens of the step")
    names = {"temperature": (f"{SAMPLING}temperature",), "max_tokens": (f"{SAMPLING}max_completion_tokens",)}
    common.sampling(d, o, names, {"temperature": 1.0})
    if "sampling.max_tokens" not in d.entries:
        d.ask("sampling.max_tokens", 512, f"{SAMPLING}max_completion_tokens: without it, what is left of the context")
    _batch(d, o)
    _training(d, o)
    trackers.prime_rl(d, o)
    return d


def _surrogate(d: Draft, o: Options) -> None:
    d.put("algorithm.proximal", "behavior", "prime-rl's ratio is to the engine's policy")
    older = o.given(f"{LOSS}dppo_mask_low", f"{LOSS}dppo_mask_high")
    kind = o.choice(("ipo", "icepop", "default", "custom"), f"{LOSS}type", default="default" if older else "ipo")
    origin, surrogate = o.origin(f"{LOSS}type"), "algorithm.surrogate"
    if o.number(f"{LOSS}adv_tau", default=1.0) != 1:
        d.lacks(f"{LOSS}adv_tau", f"{o.flat[f'{LOSS}adv_tau']}: a factor of the advantages; scale train.optimizer.lr")
    if kind == "custom":
        d.spec(surrogate, "tv_band", "our stand-in")
        d.wait(surrogate, f"{LOSS}import_path", "a loss of your own: {kind: my_lab.losses:Mine}, see CONTRIBUTING")
    elif kind == "icepop":
        fields = {"upper": o.sourced(f"{LOSS}ratio_high", default=5.0)}
        fields |= {"lower": o.sourced(f"{LOSS}ratio_low", default=0.2), "towards": ("current", "its ratio is pi / mu")}
        d.spec(surrogate, "reinforce", origin)
        d.append("algorithm.correction", "icepop", origin, **fields)
    elif kind == "default":
        note = "DPPO, removed from prime-rl on 2026-08-27; without [trainer.loss] it is tv_band now"
        bounds = {"delta": "dppo_mask_high", "delta_low": "dppo_mask_low"}
        fields = {field: o.sourced(f"{LOSS}{name}", default=0.2) for field, name in bounds.items()}
        d.spec(surrogate, "dppo", origin, note, **fields)
        _penalty(d, o, 1e-3)
    else:
        before = o.given(f"{LOSS}ipo_threshold")
        epsilon = o.sourced(f"{LOSS}eps", f"{LOSS}ipo_threshold", default=0.3)
        note = "prime-rl's IPO: a band around the engine's probabilities, no loss over pairs"
        d.spec(surrogate, "tv_band", origin, note, epsilon=epsilon)
        _penalty(d, o, 1e-3 if before else 0.0)


def _penalty(d: Draft, o: Options, default: float) -> None:
    """`kl_tau`, on all loss tokens, masked ones too."""
    tau, origin = o.sourced(f"{LOSS}kl_tau", default=default)
    if not tau:
        d.put("algorithm.penalty", [], origin)
        return
    fields = {"coefficient": (tau, origin), "towards": ("behavior", "prime-rl's is to the engine's policy")}
    d.append("algorithm.penalty", "log_ratio_sq", origin, **fields)


def _advantage(d: Draft, o: Options) -> None:
    name, path = f"{BATCH}algo.type", "algorithm.advantage"
    kind = str(o.get(name, default="grpo"))
    d.spec(path, "grpo", o.origin(name), scale=("none", "prime-rl's GRPO subtracts the mean of the group alone"))
    if kind != "grpo":
        d.wait(path, name, f"{kind}: another algorithm; choose advantage, critic or distillation")
    filtered = f"{BATCH}train.filter_zero_advantages"
    if o.flag(filtered, default=True):
        note = "prime-rl drops each completion of advantage 0; here whole groups of equal rewards are dropped"
        d.append("algorithm.selection", "drop_uniform_groups", o.origin(filtered), note)


def _batch(d: Draft, o: Options) -> None:
    groups, size = f"{BATCH}group_size", f"{BATCH}batch_size"
    group, samples = o.whole(groups, default=1, least=1), o.whole(size, default=128, least=1)
    if samples % group:
        d.lacks(size, f"{samples} is no multiple of {group} completions per prompt: whole groups here")
    d.put("train.prompts_per_step", max(1, samples // group), f"{o.origin(size)} / group_size")
    d.put("train.completions_per_prompt", group, o.origin(groups))
    common.updates(d, 1, "prime-rl makes one update of a batch")
    lag = o.whole(f"{BATCH}max_off_policy_steps", default=8, least=0)
    if lag:
        remedy = f"set runtime.max_lag={lag} and runtime.max_concurrent_rollouts, with a server or local_process engine"
        d.lacks(f"{BATCH}max_off_policy_steps", f"{lag}: this recipe is synchronous; {remedy}")


def _training(d: Draft, o: Options) -> None:
    steps = ("max_steps", "trainer.max_steps", f"{BATCH}max_steps")
    d.copy("train.steps", o, *steps, whole=True)
    if "train.steps" not in d.entries:
        d.ask("train.steps", 100, "max_steps: without it, prime-rl trains until it is stopped")
    if (kind := o.choice(("adamw", "sgd", "muon", "sign_sgd"), f"{OPTIMIZER}type", default="adamw")) != "adamw":
        d.lacks(f"{OPTIMIZER}type", f"{kind}: AdamW stands here; see `proxima list optimizer`")
    ours = {"lr": ("lr", 1e-6), "weight_decay": ("weight_decay", 0.01), "beta1": ("betas1", 0.9)}
    ours |= {"beta2": ("betas2", 0.999)}
    options = {field: (OPTIMIZER + name,) for field, (name, _) in ours.items()}
    common.optimizer(d, o, options, {field: default for field, (_, default) in ours.items()})
    d.copy("train.max_grad_norm", o, f"{OPTIMIZER}max_norm", default=1.0)
    common.schedule(d, o, f"{SCHEDULER}type", default="constant")
    falls = d.entries["train.schedule"].value
    if falls == "constant":
        d.drops_given(o, "a constant rate has no phases there", *(SCHEDULER + n for n in ("warmup_steps", "min_lr")))
    else:
        d.copy("train.warmup_steps", o, f"{SCHEDULER}warmup_steps", default=10, whole=True)
        common.lowest_rate(d, o, (f"{SCHEDULER}min_lr",), ())
    if falls == "linear":
        decay = o.whole(f"{SCHEDULER}decay_steps", default=10)
        d.lacks(f"{SCHEDULER}decay_steps", f"{decay}: it falls in the last {decay} steps, here from the warm-up on")
