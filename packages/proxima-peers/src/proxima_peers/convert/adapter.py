"""`model.lora` from the peers' options for peft, whose numbers have the same meaning there."""

from dataclasses import dataclass

from proxima_peers.convert.draft import Draft
from proxima_peers.convert.options import Options

PATH = "model.lora"


@dataclass(frozen=True)
class LoraNames:
    """A peer's names for the settings of an adapter; empty if it lacks a setting.

    Args:
        rank, alpha, targets, dropout, path, rslora, dora: options.
        default_rank, default_alpha, default_dropout: the peer's own.
        default_targets: `all-linear`, or the names that peft uses for the usual architectures.
    """

    rank: str
    alpha: str
    targets: str
    dropout: str = ""
    path: str = ""
    rslora: str = ""
    dora: str = ""
    default_rank: int = 8
    default_alpha: float = 8
    default_dropout: float = 0.0
    default_targets: str | tuple[str, ...] = "all-linear"


PEFT_TARGETS = ("q_proj", "v_proj")


def lora(d: Draft, o: Options, names: LoraNames) -> None:
    """Put `model.lora` for an adapter that the file enables."""
    d.put(f"{PATH}.rank", o.whole(names.rank, default=names.default_rank), o.origin(names.rank))
    d.copy(f"{PATH}.alpha", o, names.alpha, default=names.default_alpha)
    _targets(d, o, names)
    for field, name in (("rslora", names.rslora), ("dora", names.dora)):
        if name:
            d.flag(f"{PATH}.{field}", o, name)
    dropout = 0
    if names.dropout:
        dropout = o.number(names.dropout, default=names.default_dropout)
    if dropout:
        default = ""
        if not o.given(names.dropout):
            default = f", {o.peer}'s default"
        d.lacks(names.dropout, f"{dropout:g}{default}: an adapter here has no dropout")
    elif names.dropout:
        d.drops_given(o, "0: no dropout, as here", names.dropout)
    if names.path and o.get(names.path) is not None:
        d.put(f"{PATH}.path", str(o.get(names.path)), o.origin(names.path))
        d.needs(PATH, f"{names.path}: rank, alpha, rslora and dora are to be those of its adapter_config.json")


def _targets(d: Draft, o: Options, names: LoraNames) -> None:
    written = o.get(names.targets)
    path = f"{PATH}.targets"
    if isinstance(written, list) and len(written) == 1 and written[0] == "all-linear":
        written = "all-linear"
    if not written:
        usual = ""
        if names.default_targets == PEFT_TARGETS:
            usual = "what peft takes for Llama, Qwen, Mistral and Gemma"
        default = names.default_targets
        targets = default if isinstance(default, str) else list(default)
        d.put(path, targets, o.origin(names.targets), usual)
    elif written == "all-linear" or isinstance(written, list):
        d.put(path, written, o.origin(names.targets))
    elif str(written).replace("_", "").isalnum():
        d.put(path, [str(written)], o.origin(names.targets))
    else:
        d.lacks(names.targets, f"{written}: a pattern over whole names; name the last parts as a list")
