"""Frameworks whose files are recognised but not converted: OpenRLHF, and SkyRL's SFT."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from proxima.config.problems import ConfigError, one_problem


class NotRead(NamedTuple):
    """A framework that is refused.

    Args:
        title: its name in texts.
        command: a pattern of what its scripts run.
        own: options that no supported peer has; a file with three of them is one of its files.
    """

    title: str
    command: str
    own: frozenset[str]


NOT_READ = {
    "openrlhf": NotRead(
        "OpenRLHF",
        r"\bopenrlhf\.cli\b",
        frozenset(
            {
                *("pretrain", "reward_pretrain", "critic_pretrain", "prompt_data", "remote_rm_url"),
                *("vllm_num_engines", "actor_num_nodes", "zero_stage", "micro_train_batch_size"),
                *("micro_rollout_batch_size", "rollout_batch_size", "init_kl_coef", "generate_max_len"),
            }
        ),
    ),
    "skyrl_sft": NotRead("SkyRL's SFT", r"-m\s+(skyrl|skyrl_train|examples)\.[\w.]*main_sft", frozenset()),
}


def is_not_read(path: str | Path, name: str) -> ConfigError:
    """The error that refuses a file of `name`, a key of `NOT_READ`."""
    remedy = (
        "write the recipe by hand, with the tables of packages/proxima-peers/docs/migration.md (verl's are nearest)"
    )
    return one_problem(str(path), f"`convert` does not read the files of {NOT_READ[name].title}; {remedy}")


def refuse_what_is_not_read(path: str | Path, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a file that runs such a framework, or has at least three options that only it has."""
    file = Path(path)
    text = ""
    if file.is_file():
        text = file.read_text(encoding="utf-8-sig", errors="replace")
    for name, framework in NOT_READ.items():
        if re.search(framework.command, text) or len(framework.own.intersection(options)) >= 3:
            raise is_not_read(path, name)
