"""Converts another framework's options to a recipe: each value with its origin, options without an equivalent listed.

    conversion.py        a file → its recipe, by the modules of the peer
    read*.py, shell.py   file → options by dotted name
    options.py   which of them a converter read, and could not take
    verl*.py, trl*.py, areal.py, unirl.py            the files of each peer: `convert(options) -> Draft`
    trl_offline.py, trl_gkd.py, areal_offline.py, verl_sft.py    their trainings without rewards, of further tables
    verl_reward.py, verl_dapo.py, trl_rewards.py     what scores a completion
    known.py     options without an equivalent, by the tables in options/*.yaml: without effect, or a change of results
    common.py, adapter.py, trackers.py    conversions that peers share; `model.lora`; `monitor`
    multi_turn.py    `task.environment`, `task.tools` and `episode`
    rollout_servers.py    `engine` where the peer generates with a server
    openrlhf.py    the refusal of a peer that is not read
    draft.py     the recipe under construction, and its text
Where a peer means something else by a number, the number is converted and a note says so; no code of the peer is
imported or executed.
Imports: pyyaml, `proxima.config` and the tables it names. Imported by `cli`.
To add a peer: a file with `convert(options) -> Draft`, a line in `PEERS`, a table in `options`, an example in
`tests/examples`, rows in `docs/migration.md`.
"""

from typing import NamedTuple


class Peer(NamedTuple):
    """A framework whose files are read.

    Args:
        title: as in texts.
        online: the module of its trainings with rewards: `convert(options)`.
        offline: the module of its trainings on a fixed data set, if they are converted: `command_of(options)`, which of
            our commands a file is for, if any; `convert_offline(options, command)`; and `rules_of(options)`, what
            becomes of the options that are not read.
    """

    title: str
    online: str
    offline: str = ""


# Names of modules, imported when a file is converted: `--help` lists the peers and loads no torch.
PEERS = {
    "areal": Peer("AReaL", "areal", "areal_offline"),
    "trl": Peer("TRL", "trl", "trl_offline"),
    "unirl": Peer("UniRL", "unirl"),
    "verl": Peer("verl", "verl", "verl_sft"),
}
