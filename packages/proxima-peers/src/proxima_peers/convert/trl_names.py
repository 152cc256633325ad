"""Which of TRL's trainings a file runs: by the command of a script, or by the classes of a Python file."""

import re
from pathlib import Path

from proxima.system.user_files import read_text
from proxima_peers.convert.options import Options
from proxima_peers.convert.read_python import NOT_CONVERTED, training_in_python

_NAMED = re.compile(
    r"\btrl (grpo|rloo|sft|dpo|kto|reward)\b|\btrl\.scripts\.(grpo|rloo|sft|dpo|kto|reward)\b"
    r"|\b(grpo|rloo|sft|dpo|kto|reward|gkd)(?:_modeling|_vlm)?\.py\b"
)
_OTHER = re.compile(  # programs of TRL's examples
    r"\b(async_grpo|bco|cpo|nash_md|online_dpo(?:_vlm)?|orpo|sdft|sdpo|tpo|xpo)\.py\b"
    r"|\bexamples/scripts/(?:\w+/)?(distillation|gold|ppo(?:_tldr)?|prm|ssd)\.py\b"
)
# options of GRPOConfig that RLOOConfig lacks
OF_GRPO = (
    *("loss_type", "scale_rewards", "delta", "importance_sampling_level", "entropy_coef", "top_entropy_quantile"),
    *("off_policy_mask_threshold", "multi_objective_aggregation", "use_liger_kernel", "use_bias_correction_kl"),
    *("tools", "environment_factory", "rollout_func", "pruning", "system_prompt", "dataset_prompt_column"),
)
PREFIXES_OF_GRPO = ("vllm_importance_sampling_", "sapo_", "vespo_")


def says_grpo(o: Options) -> bool:
    """Return True for a file that can't be one of RLOO."""
    file = Path(o.file)
    if file.suffix in SCRIPTS and named_in(file):
        return True
    return any(name in OF_GRPO or name.startswith(PREFIXES_OF_GRPO) for name in o.flat)


SCRIPTS = (".py", ".sh", ".bash")


def named_in(file: Path) -> set[str]:
    """The trainings that a script runs or a Python file makes."""
    text = read_text(file, "utf-8-sig")
    made = training_in_python(text) if file.suffix == ".py" else None
    if made is not None:
        return {made}
    joined = re.sub(r"\\\n", " ", text)
    return {next(filter(None, match.groups())) for match in _NAMED.finditer(joined)}


def other_training(o: Options, why: str | None) -> str | None:
    """The reason why the file of TRL is not converted, or None; `why`: that by its options alone."""
    file = Path(o.file)
    if file.suffix in (".sh", ".bash"):
        program = _OTHER.search(read_text(file, "utf-8-sig"))
        if program is not None and not named_in(file):
            return f"runs {next(filter(None, program.groups()))}.py, a training of TRL that is {NOT_CONVERTED}"
    if why is not None and o.flat.keys() >= COMMON and file.suffix not in SCRIPTS:
        return "has only options that every training of TRL has; give a script with its command, `trl sft --config …`"
    return why


COMMON = {"model_name_or_path", "dataset_name"}


def read_negated(o: Options) -> None:
    """Read `--no_NAME` of a command, by which transformers' parser turns an option off that is on by default."""
    for name, value in dict(o.flat).items():
        positive = name.removeprefix("no_")
        if positive != name and name != "no_cuda" and value is True and positive not in o.flat:
            o.asked.add(name)
            o.flat = {**o.flat, positive: False}
