"""Converts another framework's options to a recipe: each value with its origin, options without an equivalent listed.

    conversion.py        a file → its recipe, by the modules of the peer
    read*.py, shell.py   file → options by dotted name
    options.py   the options during conversion: which were read, and which values could not be used
    verl*.py, trl*.py, areal.py, prime_rl.py, skyrl*.py, unirl.py    the files of each peer: `convert(options) -> Draft`
    trl_offline.py, trl_gkd.py, areal_offline.py, verl_sft.py    their trainings without rewards, with separate tables
    trl_rloo.py, trl_names.py    TRL's RLOO; which of TRL's trainings a file runs
    verl_reward.py, verl_dapo.py, trl_rewards.py     the scorers of completions
    prime_rl_environments.py, prime_rl_evaluation.py    prime-rl's task, rewards and turns; its held-out questions
    prime_rl_sources.py, prime_rl_mix.py, prime_rl_curriculum.py    how it writes an environment; several; their choice
    known.py     options without an equivalent, by the tables in options/*.yaml: without effect, or changing results
    common.py, adapter.py, trackers.py    conversions that peers share; `model.lora`; `monitor`
    multi_turn.py    `task.environment`, `task.tools` and `episode`
    rollout_servers.py    `engine` where the peer generates with a server
    not_read.py    the refusal of frameworks that are not converted
    draft.py     the recipe under construction, and its text
Where a number has another meaning in a peer, it is converted and a note says so; no code of the peer is imported or
executed.
Imports: pyyaml, `proxima.config` and the tables it names. Imported by `cli`.
To add a peer: a file with `convert(options) -> Draft`, a line in `PEERS`, a table in `options`, an example in
`tests/examples`, rows in `packages/proxima-peers/docs/migration.md`.
"""

from typing import NamedTuple


class Peer(NamedTuple):
    """A framework whose files can be converted.

    Args:
        title: its name in texts.
        version: the release or commit whose defaults are assumed.
        online: the module of its trainings with rewards: `convert(options)`.
        offline: the module of its trainings on a fixed data set, if they are converted: `training_of(options)` returns
            the training of a file, such as `sft`, if any; `convert_offline(options, command)` converts it;
            `rules_of(options)` returns the rules for options that are not read; `other_training(options, why)`, if it
            has that function, returns the reason why a file of the peer is not converted.
    """

    title: str
    version: str
    online: str
    offline: str = ""


# Names of modules, imported when a file is converted, so that `--help` lists the peers without loading torch.
PEERS = {
    "areal": Peer("AReaL", "4aef98d8", "areal", "areal_offline"),
    "prime_rl": Peer("prime-rl", "559b4477, its losses of 2026-09-18", "prime_rl"),
    "skyrl": Peer("SkyRL", "a9564572", "skyrl"),
    "trl": Peer("TRL", "1.16", "trl", "trl_offline"),
    "unirl": Peer("UniRL", "e300d690", "unirl"),
    "verl": Peer("verl", "0.9.1", "verl", "verl_sft"),
}
