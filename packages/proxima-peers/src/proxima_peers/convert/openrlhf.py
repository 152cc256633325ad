"""OpenRLHF, whose files are recognised but not converted."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxima.config.problems import ConfigError, one_problem

OWN = {  # options that no supported peer has
    *("pretrain", "reward_pretrain", "critic_pretrain", "prompt_data", "remote_rm_url", "vllm_num_engines"),
    *("actor_num_nodes", "zero_stage", "micro_train_batch_size", "micro_rollout_batch_size", "rollout_batch_size"),
    *("init_kl_coef", "generate_max_len"),
}


def openrlhf_is_not_read(path: str | Path) -> ConfigError:
    """The error that refuses a file of OpenRLHF."""
    remedy = (
        "write the recipe by hand, with the tables of packages/proxima-peers/docs/migration.md (verl's are nearest)"
    )
    return one_problem(str(path), f"`convert` does not read the files of OpenRLHF; {remedy}")


def refuse_openrlhf(path: str | Path, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a file that runs OpenRLHF or has at least three options that only OpenRLHF has."""
    file = Path(path)
    text = file.read_text(encoding="utf-8-sig", errors="replace") if file.is_file() else ""
    if re.search(r"\bopenrlhf\.cli\b", text) or len(OWN.intersection(options)) >= 3:
        raise openrlhf_is_not_read(path)
