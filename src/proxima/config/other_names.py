"""The error about an unknown field: names that peers and earlier versions of proxima use for our fields.

`proxima peers convert` translates whole files of options. To add a name: append it to those of its field.
"""

from collections.abc import Collection, Sequence

from proxima.config.describe import all_fields, fields_of, kinds_of
from proxima.config.families import FAMILIES
from proxima.config.problems import Problem
from proxima.config.tree import Node
from proxima.data.errors import nearest, suggestion
from proxima.data.kinds import Slot

# our field: names in TRL, verl, AReaL; with a section if the name alone is ambiguous
_NAMES = {
    "algorithm.advantage": "adv_estimator",
    "algorithm.advantage.scale": "scale_rewards norm_adv_by_std_in_grpo",
    "algorithm.aggregate": "loss_type loss_agg_mode",
    "algorithm.distillation.path": "teacher teacher_model teacher_model_name_or_path",
    "algorithm.dynamic_sampling": "filter_groups",
    "algorithm.entropy_bonus": "entropy_coeff",
    "algorithm.preset": "algorithm.kind algorithm.name",
    "algorithm.reference_kl.coefficient": "beta kl_coef kl_loss_coef kl_ctl",
    "algorithm.surrogate.dual_clip": "clip_ratio_c",
    "algorithm.surrogate.epsilon_high": "clip_ratio_high eps_clip_higher",
    "algorithm.surrogate.epsilon_low": "epsilon clip_ratio clip_ratio_low eps_clip",
    "checkpoint.every": "save_steps save_freq",
    "eval.every": "eval_steps test_freq",
    "folder": "output_dir default_local_dir",
    "model.lora": "peft_config use_peft lora_rank",
    "model.max_length": "max_seq_length",
    "model.path": "model_name_or_path",
    "preference.loss": "loss_type",
    "preference.loss.0.beta": "beta",
    "preference.loss.0.label_smoothing": "label_smoothing",
    "preference.reference": "reference_free",
    "preference.weights": "loss_weights",
    "reward": "reward_funcs",
    "reward_model.center": "center_rewards_coefficient",
    "runtime.max_concurrent_rollouts": "max_inflight",
    "runtime.max_lag": "max_age max_head_offpolicyness max_async_level async_level staleness_threshold",
    "sampling.max_tokens": "max_completion_length max_response_length max_new_tokens response_length",
    "sft.loss_on": "completion_only_loss assistant_only_loss",
    "train.completions_per_prompt": "num_generations rollout.n n_samples group_size",
    "train.epochs": "num_train_epochs total_epochs",
    "train.epochs_per_step": "num_iterations ppo_epochs",
    "train.examples_per_step": "train_batch_size",
    "train.max_grad_norm": "grad_clip gradient_clipping",
    "train.optimizer.lr": "learning_rate",
    "train.prompts_per_step": "train_batch_size",
    "train.schedule": "lr_scheduler_type",
    "train.steps": "max_steps total_training_steps",
    "train.tokens_per_micro_batch": "per_device_train_batch_size ppo_max_token_len_per_gpu",
    "train.updates_per_step": "ppo_mini_batch_size",
    "train.warmup_steps": "lr_warmup_steps",
}
ANYWHERE = frozenset({"kind", "name", "path"})  # too common to suggest another section's
_FIELDS: dict[str, list[str]] = {}
for field, names in _NAMES.items():
    for name in names.split():
        _FIELDS.setdefault(name, []).append(field)


def misnamed_field(path: str, label: str, node: Node, cls: type, slot: Slot | None, paths: Collection[str]) -> Problem:
    """The problem of an unknown field, with what was probably meant.

    Args:
        label: the name of `cls` in errors: the kind of `slot`, or the section's name.
        paths: the dotted paths of the recipe's resolved values.
    """
    parent, _, name = path.rpartition(".")
    names = [info.name for info in fields_of(cls)]
    trained = [family for family in FAMILIES.values() if path in dict(all_fields(family.root))]
    while node.source.origin == "command line" and node.mapping and len(node.mapping) == 1:
        (key, node), *_ = node.mapping.items()
        path = f"{path}.{key}"
    elsewhere = paths if nearest(name, names) is None else ()
    remedy = place_of_name(name, parent, slot, elsewhere) or suggestion(name, names)
    if trained:
        kinds = [family.name if family.own else "RL" for family in trained]
        remedy = f"only {', '.join(kinds)} recipes have it"
    *_, section, last = ["", *path.split(".")]
    whole = whole_path(path, paths)
    ours = our_name(section, last, paths)
    if whole:
        remedy = f"did you mean {whole}?"
    elif ours:
        remedy = f"proxima calls it {ours}"
    if node.source.text.partition(":")[0].endswith("/config.yaml"):
        remedy += "; if another version began this run, delete the line and resume with --accept-changes"
    return Problem(path, f"{label!r} has no field {name!r}; {remedy}", node.shown(), node.source.text)


def our_name(section: str, name: str, paths: Collection[str]) -> str | None:
    """Our field for a peer's `name`, found in `section`: the first that a recipe of this family has, or None.

    Args:
        paths: the dotted paths of the recipe's resolved values.
    """
    for ours in _FIELDS.get(f"{section}.{name}", _FIELDS.get(name, [])):
        head = ".".join(ours.split(".")[:2])
        if any(path == head or path.startswith(f"{head}.") for path in paths):
            return ours
    return None


def whole_path(wrong: str, paths: Collection[str]) -> str | None:
    """The path of `paths` that ends like `wrong`, each part the same or mistyped: `surogate.delta` is
    `algorithm.surrogate.delta`. None if there is none, or several."""
    parts = wrong.split(".")
    if len(parts) == 1:
        return None
    found = [path for path in paths if _ends_like(path.split("."), parts)]
    return found[0] if len(found) == 1 else None


def _ends_like(path: Sequence[str], parts: Sequence[str]) -> bool:
    """True for a longer path whose last part is the same, and those before it the same or mistyped."""
    if len(path) <= len(parts) or path[-1] != parts[-1]:
        return False
    end = path[-len(parts) :]
    return all(nearest(ours, [theirs]) for ours, theirs in zip(parts[:-1], end[:-1], strict=True))


def place_of_name(name: str, parent: str, slot: Slot | None, paths: Collection[str]) -> str | None:
    """The remedy for a misplaced field: it belongs to another kind of its slot, or is at one of the `paths`."""
    kinds = {} if slot is None else kinds_of(slot)
    others = [kind for kind in sorted(kinds) if name in {info.name for info in fields_of(kinds[kind])}]
    if others:
        return f"{parent}.kind={' or '.join(others[:3])} has it"
    named = (path for path in paths if path.rpartition(".")[2] == name and name not in ANYWHERE)
    elsewhere = next(named, None)
    return elsewhere and f"did you mean {elsewhere!r}?"
