"""TRL's trainings other than GRPO: SFT, DPO, KTO and reward models, with the defaults of 1.16.

GKD and RLOO have modules of their own.
"""

from collections.abc import Callable
from pathlib import Path

from proxima_peers.convert import common, trackers
from proxima_peers.convert.draft import Draft, Fields
from proxima_peers.convert.known import Rules, option_rules
from proxima_peers.convert.options import Options
from proxima_peers.convert.trl import (
    adamw,
    clip_and_save,
    dtypes_and_adapter,
    evaluation_strategy,
    rows_of_update,
    warmups,
)
from proxima_peers.convert.trl_gkd import convert_gkd
from proxima_peers.convert.trl_names import SCRIPTS, named_in, other_training, read_negated
from proxima_peers.convert.trl_rloo import convert_rloo

MARKS = {
    "sft": (
        *("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "dataset_kwargs"),
        *("packing_strategy", "eval_packing", "max_seq_length"),
    ),
    "dpo": (
        *("loss_weights", "ld_alpha", "f_divergence_type", "f_alpha_divergence_coef", "label_smoothing"),
        *("use_weighting", "discopop_tau"),
    ),
    "kto": ("desirable_weight", "undesirable_weight"),
    "reward": ("center_rewards_coefficient",),
    "gkd": ("lmbda", "seq_kd"),
    "rloo": ("normalize_advantages", "reward_clip_range"),
}
__all__ = ["convert_offline", "other_training", "rules_of", "training_of"]
REWARDED = ("num_generations", "reward_funcs", "num_iterations")  # options of GRPO
LR = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "reward": 1e-4}


def training_of(o: Options) -> str | None:
    """`sft`, `dpo`, `kto`, `reward`, `gkd` or `rloo`, by a script's command or a Python file's classes, or, in a file
    with only options, by an option or a loss that no other training has. None for another training, or in doubt."""
    file = Path(o.file)
    if file.suffix in SCRIPTS:
        named = named_in(file)
        if len(named) == 1:
            (command,) = named
            return None if command == "grpo" else command
        if named:
            return None
    commands = {command for command, names in MARKS.items() if any(o.flat.get(name) is not None for name in names)}
    if "rloo" in commands:  # its other options are those of GRPO
        return "rloo"
    if any(name in o.flat for name in REWARDED):
        return None
    losses = o.flat.get("loss_type")
    if not isinstance(losses, list):
        losses = [losses]
    named = {str(loss) for loss in losses}
    commands |= {command for command, kinds in LOSSES_OF.items() if named & set(kinds)}
    if "gkd" in commands:  # its config extends that of SFT
        return "gkd"
    if len(commands) > 1:
        return None
    return next(iter(commands), None)


def rules_of(o: Options) -> Rules:
    """The rules of all TRL trainers, and of the offline ones."""
    return option_rules("trl_offline") | option_rules("trl")


def convert_offline(o: Options, command: str) -> Draft:
    """A recipe for SFT, DPO or a reward model; for RL with `gkd` and `rloo`."""
    read_negated(o)
    if command == "gkd":
        return convert_gkd(o)
    if command == "rloo":
        return convert_rloo(o)
    d = Draft()
    common.model(d, o, "model_name_or_path", "model")
    if o.given("model_revision"):
        d.put("model.revision", str(o.get("model_revision", default="main")), o.origin("model_revision"))
    saves = "gradient_checkpointing"
    d.put(f"model.{saves}", o.flag(saves, default=True), o.origin(saves))
    dtypes_and_adapter(d, o)
    _rows(d, o, command, "task", str(o.get("dataset_train_split", default="train")))
    _lengths(d, o, command)
    common.template_arguments(d, o, "chat_template_kwargs")
    if command == "kto" and o.choice(("sequential", "random"), SAMPLING, default="sequential") == "sequential":
        d.put("data.shuffle", False, o.origin(SAMPLING))
    SECTIONS_OF[command](d, o)
    _steps(d, o)
    adamw(d, o, LR[command])
    (fixed, origin), (share, of_share) = warmups(o)
    if fixed:
        d.put("train.warmup_steps", fixed, origin)
    elif share:
        d.put("train.warmup_ratio", share, of_share)
    clip_and_save(d, o, 1)
    _held_out(d, o, command)
    trackers.trl(d, o)
    return d


SAMPLING = "train_sampling_strategy"


def _rows(d: Draft, o: Options, command: str, path: str, split: str) -> None:
    """The rows, by the file's extension or as a data set on the hub; TRL infers their format from the columns."""
    where = o.get("dataset_name")
    origin = o.origin("dataset_name")
    if where is None:
        d.put(f"{path}.kind", "dataset", "see `proxima list task` for others")
        d.ask(f"{path}.path", "path/to/rows", "which data set; TRL's option dataset_name")
    else:
        kind = next((kind for kind, ends in common.FILES.items() if str(where).endswith(ends)), "dataset")
        d.spec(path, kind, origin, "", path=(str(where), origin))
    if d.entries[f"{path}.kind"].value == "dataset":
        option = "dataset_train_split" if path == "task" else "dataset_test_split"
        d.put(f"{path}.split", split, o.origin(option))
        if o.get("dataset_config") is not None:
            d.put(f"{path}.subset", str(o.get("dataset_config")), o.origin("dataset_config"))
    columns, note = COLUMNS[command]
    for column, value in columns.items():
        d.put(f"{path}.{column}", value, "as TRL names it")
    if path == "task":
        d.needs("task", f"which columns the rows have, which TRL looks up: {note}")
    if o.given("train_dataset"):
        d.wait(path, "train_dataset", f"the script makes its rows: {o.get('train_dataset')}; write them to a file")


_CHATS = {"messages": "messages"}
_PROMPTS = {"prompt": "prompt"}
_SIDES = {"messages": "chosen"}
COLUMNS: dict[str, tuple[dict[str, str], str]] = {
    "sft": (_CHATS, "chats in `messages` stand here; for pairs write prompt: prompt, answer: completion"),
    "dpo": (_PROMPTS, "`prompt`, chosen, rejected stand here; without a prompt, write messages: chosen"),
    "kto": (_PROMPTS, "`prompt`, completion and label stand here"),
    "reward": (_SIDES, "whole chats in chosen and rejected stand here; with a prompt, write prompt: prompt"),
}


def _lengths(d: Draft, o: Options, command: str) -> None:
    """`max_length`, 1024 by default: SFT, DPO and KTO truncate longer rows, reward models skip them."""
    names = ("max_length", "max_seq_length")
    longest = None
    if not o.given("max_length") and "max_length" in o.flat:
        d.drops("max_length", "null: the model's own context bounds a row, here too")
    else:
        longest = o.whole(*names, default=1024, least=1)
        d.put("model.max_length", longest, o.origin(*names))
    end = o.choice(("keep_start", "keep_end"), "truncation_mode", default="keep_start")
    if command == "sft" and end == "keep_start":
        d.put("data.over_length", "truncate", o.origin("truncation_mode"))
        return
    does = "leaves out" if command == "reward" else "cuts"
    d.put("data.over_length", "skip", f"{o.peer} {does} longer rows")
    if longest is not None and command != "reward":
        kept = "their start" if end == "keep_end" else "their end"
        d.lacks(o.origin(*names).rpartition(" ")[2], f"{longest}: TRL cuts {kept} off; here longer rows are skipped")


def _sft(d: Draft, o: Options) -> None:
    """The tokens that are trained, and packing."""
    only = "completion_only_loss"
    turns = "assistant_only_loss"
    if o.flag(turns):
        d.put("sft.loss_on", "all_turns", o.origin(turns))
        d.drops_given(o, "assistant_only_loss says more", only)
    elif o.get(only) is None:
        whole = "for chats TRL trains every token, the prompt's too, which is not an option here"
        d.ask("sft.loss_on", "completion", f"right for rows of prompt and completion; {whole}")
    else:
        d.put("sft.loss_on", "completion", o.origin(only))
        if not o.flag(only, default=True):
            d.lacks(only, "false: the loss is on the completion, or on all turns of the assistant")
    if o.flag("packing"):
        d.lacks("packing", "true: TRL counts packed sequences of max_length tokens in a batch; a step here counts rows")
        d.drops_given(o, "rows are packed without touching one another", "eval_packing")
    else:
        d.drops_given(o, "packing is off", "packing", "packing_strategy", "eval_packing")
    kind = str(o.get("loss_type", default="nll"))
    if kind not in ("nll", "chunked_nll"):
        d.lacks("loss_type", f"{kind}: only the negative log-likelihood")


def _preference(d: Draft, o: Options) -> None:
    """`loss_type`, one or several, with their parameters."""
    written = o.get("loss_type", default="sigmoid")
    losses = written if isinstance(written, list) else [written]
    origin = o.origin("loss_type")
    beta = o.sourced("beta", default=0.1)
    read = {name: any(loss in kinds for loss in losses) for name, kinds in READ_BY.items()}
    for index, loss in enumerate(losses):
        path = f"preference.loss.{index}"
        if loss not in PAIR_LOSSES:
            d.ask(path, "sigmoid", f"loss_type: {loss} is not known here; see `proxima list preference`", kind=True)
            continue
        fields: Fields = {}
        if loss != "sft":
            fields["beta"] = beta
        if loss in READ_BY["label_smoothing"]:
            fields["label_smoothing"] = o.sourced("label_smoothing", default=0.0)
        if loss in READ_BY["f_divergence_type"]:
            fields |= _divergence(o)
        if loss == "discopop":
            fields["tau"] = o.sourced("discopop_tau", default=0.05)
        d.spec(path, str(loss), origin, "", **fields)
    for name, kinds in READ_BY.items():
        if not read[name]:
            d.drops_given(o, f"TRL reads it for {', '.join(kinds)}", name)
    weights = o.get("loss_weights")
    if isinstance(weights, list) and len(losses) > 1:
        d.put("preference.weights", weights, "from loss_weights")
    else:
        d.drops_given(o, "one loss", "loss_weights")
    d.copy("preference.ld_alpha", o, "ld_alpha")
    d.flag("preference.on_policy_weights", o, "use_weighting")


OF_DIFFERENCE = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop")
READ_BY = {
    "label_smoothing": ("exo_pair", "robust", "aot", "aot_unpaired"),
    "f_divergence_type": OF_DIFFERENCE,
    "f_alpha_divergence_coef": OF_DIFFERENCE,
    "discopop_tau": ("discopop",),
}
PAIR_LOSSES = (
    *OF_DIFFERENCE,
    *("nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "sft"),
)
LOSSES_OF = {"sft": ("nll", "dft", "chunked_nll"), "dpo": PAIR_LOSSES, "kto": ("kto", "apo_zero_unpaired")}
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


def _divergence(o: Options) -> Fields:
    """`f_divergence_type`, unless it is DPO's own."""
    written = str(o.get("f_divergence_type", default="reverse_kl")).rpartition(".")[2].lower()
    if written not in DIVERGENCES:
        o.refuse(f"known are {', '.join(DIVERGENCES)}", "f_divergence_type")
        return {}
    kind: Fields = {"divergence": (written.removesuffix("_divergence"), o.origin("f_divergence_type"))}
    coefficient = o.sourced("f_alpha_divergence_coef", default=0.5)
    if written == "reverse_kl":
        return {}
    if written == "alpha_divergence":
        kind["alpha"] = coefficient
    return kind


def _kto(d: Draft, o: Options) -> None:
    """Completions marked good or bad."""
    written = o.choice(("kto", "apo_zero_unpaired"), "loss_type", default="kto")
    weights = {"good_weight": "desirable_weight", "bad_weight": "undesirable_weight"}
    fields: Fields = {"beta": o.sourced("beta", default=0.1)}
    fields |= {ours: o.sourced(name, default=1.0) for ours, name in weights.items()}
    if written == "apo_zero_unpaired":
        fields["anchor"] = ("zero", "from loss_type")
    d.spec("preference.loss.0", "kto", o.origin("loss_type"), "", **fields)


def _reward(d: Draft, o: Options) -> None:
    """Bradley-Terry, with centring."""
    d.copy("reward_model.center", o, "center_rewards_coefficient", default=0.0)
    d.put("reward_model.head_std", 0.02, "transformers draws a new head with initializer_range, mostly .02")
    d.needs("reward_model.margin_column", "margin, where the rows have that column: TRL reads it then")


SECTIONS_OF: dict[str, Callable[[Draft, Options], None]]
SECTIONS_OF = {"sft": _sft, "dpo": _preference, "kto": _kto, "reward": _reward}


def _steps(d: Draft, o: Options) -> None:
    """The rows of an update, and the number of updates or passes."""
    d.put("train.examples_per_step", *rows_of_update(o))
    most = o.whole("max_steps", default=-1)
    epochs = o.number("num_train_epochs", default=3.0, least=0, most=10**9)
    if most > 0:
        d.put("train.steps", most, o.origin("max_steps"))
        d.drops_given(o, "max_steps overrides it", "num_train_epochs")
    elif epochs == int(epochs) and epochs >= 1:
        d.put("train.epochs", int(epochs), o.origin("num_train_epochs"))
    else:
        d.ask("train.steps", 100, f"num_train_epochs: {epochs:g} is not a whole number of passes; set it in steps")


def _held_out(d: Draft, o: Options, command: str) -> None:
    """`eval_strategy`: the test split of the same data."""
    strategy = evaluation_strategy(o)
    if strategy == "no":
        return
    before = o.flag("eval_on_start")
    every = o.number("eval_steps", default=500, least=0, most=10**9)
    _rows(d, o, command, "eval.task", str(o.get("dataset_test_split", default="test")))
    d.put("eval.limit", 0, "TRL evaluates on all held-out rows")
    d.put("eval.before", before, o.origin("eval_on_start"))
    if strategy == "epoch" or every < 1:
        d.needs("eval.every", "the evaluations of eval_strategy or eval_steps are not in steps; set it in steps")
    else:
        d.put("eval.every", int(every), o.origin("eval_steps"))
