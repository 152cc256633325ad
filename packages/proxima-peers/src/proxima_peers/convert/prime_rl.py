"""prime-rl: the TOML of its `rl` command, with its default loss, IcePop, or DPPO as it was up to 2026-08-27.

Up to 2026-07-29 (#3150, #3156) the environments were `orchestrator.train.env`, and names of 2025 were understood; up to
2026-08-15 (#3275) the trackers were `[wandb]`. A file with one of these names has the defaults of that time: DPPO.
The defaults of the losses are those of pull requests #3418 (2026-08-27: `ipo` is the default, `ipo_threshold` becomes
`eps`), #3526 (IcePop) and #3586 (2026-09-18: `eps` 0.3, `kl_tau` 0); all others are those of commit 559b4477.
"""

import re
from collections.abc import Mapping
from typing import Any

from proxima.config.resolved import nested
from proxima.config.tree import FILL_IN
from proxima_peers.convert import common, trackers
from proxima_peers.convert.adapter import LoraNames, lora
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.known import shown
from proxima_peers.convert.options import Options
from proxima_peers.convert.prime_rl_curriculum import curricula
from proxima_peers.convert.prime_rl_environments import beside, own_sampling, shared_algorithm, task_and_rewards
from proxima_peers.convert.prime_rl_evaluation import held_out_environments
from proxima_peers.convert.prime_rl_sources import BATCH, GROUPS, SOURCES, listed, option_of_sources

LOSS = "trainer.loss."
OPTIMIZER = "trainer.optim."
SCHEDULER = "trainer.scheduler."
SAMPLING = f"{BATCH}train.sampling."
FILTERS = (f"{BATCH}pre_batch_filters", f"{BATCH}post_batch_filters")
IN_FLIGHT = (f"{BATCH}oversampling_factor", f"{BATCH}max_inflight_rollouts")
OF_JULY = (*SOURCES[1:], GROUPS[1], *FILTERS, *IN_FLIGHT, f"{BATCH}pool_size", "trainer.max_concurrent_runs", "bench")
SECTIONS_OF_JULY = (f"{BATCH}sampling.", "wandb.", f"{BATCH}wandb.", "trainer.wandb.", f"{BATCH}prime_monitor.")
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
    models = ("trainer.model.name", f"{BATCH}model.name", "model.name")
    if o.get(*models) is None and not o.doubts:
        d.put("model.path", "Qwen/Qwen3-0.6B", "prime-rl's default of model.name")
    else:
        common.model(d, o, *models)
    if any(name.startswith("trainer.model.lora.") for name in o.flat):
        lora(d, o, LORA)
    lengths = (f"{BATCH}seq_len", "trainer.model.seq_len", "seq_len")
    d.copy("model.max_length", o, *lengths, default=2048, whole=True)
    common.dtype(d, o, "dtype", "trainer.model.optimization_dtype", default="float32")
    task_and_rewards(d, o)
    _surrogate(d, o)
    _advantage(d, o)
    curricula(d, o)
    beside(d, o)
    d.spec("algorithm.aggregate", "token_mean", "prime-rl divides by all tokens of the step")
    older = f"{BATCH}sampling."
    names = {
        "temperature": (f"{SAMPLING}temperature", f"{older}temperature"),
        "max_tokens": (
            f"{SAMPLING}max_completion_tokens",
            f"{older}max_completion_tokens",
            f"{SAMPLING}max_tokens",
            f"{older}max_tokens",
        ),
    }
    common.sampling(d, o, names, {"temperature": 1.0})
    own_sampling(d, o)
    _longest_of_sources(d)
    if "sampling.max_tokens" not in d.entries:
        d.ask("sampling.max_tokens", 512, f"{SAMPLING}max_completion_tokens: without it, what is left of the context")
    _batch(d, o)
    _training(d, o)
    held_out_environments(d, o)
    trackers.prime_rl(d, o)
    return d


def _longest_of_sources(d: Draft) -> None:
    """The length of an answer, if the sources of a mix have their own and the run has none."""
    tasks = [path for path in d.entries if re.fullmatch(r"task\.tasks\.\d+\.name", path)]
    own = [d.entries.get(path.replace(".name", ".sampling.max_tokens")) for path in tasks]
    found = [entry for entry in own if entry is not None]
    if found and len(found) == len(own) and "sampling.max_tokens" not in d.entries:
        longest = max(found, key=lambda entry: entry.value)
        d.put("sampling.max_tokens", longest.value, f"{longest.origin}, the longest")


def is_of_july(o: Options) -> bool:
    """Return True for a file with a name that prime-rl has had up to July 2026 only."""
    return any(name in OF_JULY or name.startswith(SECTIONS_OF_JULY) for name in o.flat)


def _surrogate(d: Draft, o: Options) -> None:
    d.put("algorithm.proximal", "behavior", "prime-rl's ratio is to the engine's policy")
    july = is_of_july(o)
    older = o.given(f"{LOSS}dppo_mask_low", f"{LOSS}dppo_mask_high") or july
    usual = "default" if older else "ipo"
    kind = o.choice(("ipo", "icepop", "default", "custom"), f"{LOSS}type", default=usual)
    if july and not o.given(f"{LOSS}type"):
        d.defaults.append("trainer.loss.type=default (the file has names of July 2026, when DPPO was the default)")
    origin = o.origin(f"{LOSS}type")
    surrogate = "algorithm.surrogate"
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
        before = o.given(f"{LOSS}ipo_threshold") or july
        threshold = 0.1 if july else 0.3
        epsilon = o.sourced(f"{LOSS}eps", f"{LOSS}ipo_threshold", default=threshold)
        note = "prime-rl's IPO: a band around the engine's probabilities, no loss over pairs"
        d.spec(surrogate, "tv_band", origin, note, epsilon=epsilon)
        strength = 1e-3 if before else 0.0
        _penalty(d, o, strength)


def _penalty(d: Draft, o: Options, default: float) -> None:
    """`kl_tau`, on all loss tokens, masked ones too."""
    tau, origin = o.sourced(f"{LOSS}kl_tau", default=default)
    if not tau:
        d.put("algorithm.penalty", [], origin)
        return
    fields = {"coefficient": (tau, origin), "towards": ("behavior", "prime-rl's is to the engine's policy")}
    d.append("algorithm.penalty", "log_ratio_sq", origin, **fields)


def _advantage(d: Draft, o: Options) -> None:
    name = f"{BATCH}algo.type"
    path = "algorithm.advantage"
    origin = o.origin(name)
    shared = shared_algorithm(o)
    settings = _algorithm_of_the_run(o) if shared is None else shared
    if shared is not None:
        name = option_of_sources(o)
        origin = f"from {name}"
    kind = str(settings.get("type", "grpo"))
    d.spec(path, "grpo", origin, scale=("none", "prime-rl's GRPO subtracts the mean of the group alone"))
    if kind == "echo":
        _echo(d, settings, name, o)
    elif kind != "grpo":
        d.wait(path, name, f"{kind}: another algorithm; choose advantage, critic or distillation")
    filtered = f"{BATCH}train.filter_zero_advantages"
    if is_of_july(o):
        _filters_of_july(d, o)
    elif o.flag(filtered, default=True):
        note = "prime-rl drops each completion of advantage 0; here whole groups of equal rewards are dropped"
        d.append("algorithm.selection", "drop_uniform_groups", o.origin(filtered), note)


ALGORITHM = f"{BATCH}algo."


def _algorithm_of_the_run(o: Options) -> dict[str, Any]:
    """The settings of `orchestrator.algo`, nested."""
    o.get(f"{ALGORITHM}type")
    given = {option.removeprefix(ALGORITHM): value for option, value in o.flat.items() if option.startswith(ALGORITHM)}
    return nested(given.items())


def _echo(d: Draft, settings: Mapping[str, Any], name: str, o: Options) -> None:
    """`algorithm.echo`: the cross-entropy of the tokens with which tools and environments answer."""
    o.asked.update(option for option in o.flat if option.startswith((f"{ALGORITHM}roles.", f"{ALGORITHM}filter.")))
    roles = settings.get("roles")
    path = "algorithm.echo.roles"
    found = {}
    if isinstance(roles, Mapping):
        found = {role: value for role, value in roles.items() if value is not None}
    if not found:
        d.put(f"{path}.tool", 0.1, f"prime-rl's default of {ALGORITHM}roles")
    for role, given in found.items():
        if isinstance(given, Mapping):
            alpha = given.get("alpha", 0.1)
        else:
            alpha = given
        if f"{ALGORITHM}roles.{role}.alpha" in o.flat:
            option = f"{ALGORITHM}roles.{role}.alpha"
        else:
            option = name
        if role in ("tool", "user", "system"):
            d.put(f"{path}.{role}", alpha, f"from {option}")
        else:
            d.lacks(option, f"{role} {shown(alpha)}: what an environment writes as that role is not trained on here")
    if "filter" in settings:
        if f"{ALGORITHM}filter.import_path" in o.flat:
            option = f"{ALGORITHM}filter.import_path"
        else:
            option = name
        d.lacks(option, f"{shown(settings['filter'])}: code that leaves tokens out of echo")


def _filters_of_july(d: Draft, o: Options) -> None:
    """`pre_batch_filters`, off by default, and `post_batch_filters`, all three on by default."""
    found: dict[str, str] = {}
    for name in FILTERS:
        written = o.get(name, default=[])
        filters = []
        if isinstance(written, list):
            filters = [entry for entry in written if isinstance(entry, Mapping)]
        on = [str(entry.get("type")) for entry in filters if entry.get("enforce", True)]
        if not o.given(name) and name == FILTERS[1]:
            on = ["gibberish", "repetition", "zero_advantage"]
            d.defaults.append(f"{name}={on} (of July 2026; the first two are not here: see their list)")
        found |= {kind: o.origin(name) for kind in on}
    if "zero_advantage" in found:
        note = "prime-rl drops each completion of advantage 0; here whole groups of equal rewards are dropped"
        d.append("algorithm.selection", "drop_uniform_groups", found.pop("zero_advantage"), note)
    for kind, origin in found.items():
        name = origin.removeprefix("from ").rpartition(" ")[2]
        d.lacks(name, f"{kind}: prime-rl does not train on completions that this filter finds")


def _batch(d: Draft, o: Options) -> None:
    size = f"{BATCH}batch_size"
    tokens = f"{BATCH}token_batch_size"
    group = o.whole(*GROUPS, default=1, least=1)
    origin = o.origin(*GROUPS)
    own: set[Any] = set()
    for source in listed(o):
        own |= {source[key] for key in ("group_size", "rollouts_per_example") if key in source}
    only = next(iter(own), None)
    if len(own) == 1 and isinstance(only, int) and only > 0:
        group = only
        named = next(name for name in SOURCES if name in o.flat)
        origin = f"from {named}: its group_size"
    elif len(own) > 1:
        d.lacks(GROUPS[0], f"environments with groups of {', '.join(map(str, own))}: here all have {group}")
    samples = o.whole(size, default=128, least=1)
    if samples % group:
        d.lacks(size, f"{samples} is not a multiple of {group} completions per prompt: whole groups here")
    counted = f"{o.origin(size)} / group_size"
    if o.given(tokens) and not o.given(size):
        counted = f"{FILL_IN}: {tokens}: {o.get(tokens)} tokens a step; here a step has a number of prompts"
    d.put("train.prompts_per_step", max(1, samples // group), counted)
    d.put("train.completions_per_prompt", group, origin)
    for name in IN_FLIGHT:
        if o.given(name):
            d.lacks(
                name, f"{o.get(name)}: how much is generated at once; runtime.max_concurrent_rollouts counts prompts"
            )
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
    kind = o.choice(("adamw", "sgd", "muon", "sign_sgd"), f"{OPTIMIZER}type", default="adamw")
    if kind != "adamw":
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
