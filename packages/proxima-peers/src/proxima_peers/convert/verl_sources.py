"""Several files of verl, whose rows its scorer tells apart by `data_source`: a mix with a reward for each of them.

verl's files are one data set, so every row comes equally often. Its preparation scripts write a data set into a folder
of its name, by which a file is recognised: `gsm8k/train.parquet`, `math/train.parquet`.
"""

from proxima_peers.convert import common
from proxima_peers.convert.draft import Draft
from proxima_peers.convert.options import Options
from proxima_peers.convert.verl_reward import CLASSES, KEY, MANAGERS, scored_by_function

SCORERS = {"gsm8k": "gsm8k", "math": "math"}  # folder of verl's preparation: our reward that scores as its scorer does
MODELS = ("reward_model.enable", "reward.reward_model.enable")


def sources_of_files(d: Draft, o: Options, option: str, path: str, split: str, columns: dict[str, str]) -> None:
    """Replace the task at `path` by a mix, if the option lists files of several data sets, some with a known scorer.

    The run's `reward` is that of the sources of `task` without their own.
    """
    if _scored_by_source(o):
        mix_of_files(d, o, option, path, split, columns, NOTE)


NOTE = "verl reads them as one data set, and scores a row by its data_source."


def mix_of_files(d: Draft, o: Options, option: str, path: str, split: str, columns: dict[str, str], note: str) -> None:
    """As `sources_of_files`, for a peer whose rows choose their scorer; `note` says how."""
    files = o.get(option)
    if not isinstance(files, list):
        return
    names = [_source_of(str(file)) for file in files]
    if len(set(names)) < 2 or not any(name in SCORERS for name in names):
        return
    if len(set(names)) < len(names) or not all(str(file).endswith(".parquet") for file in files):
        return
    for place in [place for place in d.entries if place.startswith(f"{path}.")]:
        del d.entries[place]
    origin = f"from {option}"
    d.spec(path, "mix", origin, note)
    d.put(f"{path}.weights", "row", "every row equally often")
    shared = "math" in names
    for index, (file, name) in enumerate(zip(files, names, strict=True)):
        place = f"{path}.tasks.{index}"
        d.put(f"{place}.name", name, origin)
        _task(d, f"{place}.task", str(file), origin, split, columns)
        if shared:
            takes_runs = name == "math"
        else:
            takes_runs = name not in SCORERS
        if path != "task" or not takes_runs:
            _reward(d, f"{place}.reward.0", name, option)
    if path == "task":
        if not shared:
            others = next(name for name in names if name not in SCORERS)
        else:
            others = "math"
        _reward(d, "reward.0", others, option)


def _scored_by_source(o: Options) -> bool:
    """True if nothing but the row's data set chooses the scorer, and nothing is added to its score."""
    chosen = scored_by_function(o) or o.given(*CLASSES) or o.get(*MANAGERS, default="naive") != "naive"
    models = any(o.flag(name) for name in MODELS if name in o.flat)
    added = any("overlong_buffer" in name for name in o.flat)
    return not (chosen or models or added) and o.get(KEY, default="data_source") == "data_source"


def _source_of(file: str) -> str:
    """The data set of a file: the folder that it is in, else its own name."""
    *folders, name = file.rstrip("/").split("/")
    if folders:
        return folders[-1].lower()
    return name.partition(".")[0].lower()


def _task(d: Draft, path: str, file: str, origin: str, split: str, columns: dict[str, str]) -> None:
    """The rows of one file."""
    if common.is_gsm8k(file):
        note = f"{file}: read as the public data set; for a prepared file write its kind (parquet, jsonl) and path"
        d.spec(path, "gsm8k", origin, note, split=(split, "which part verl takes"))
        return
    d.spec(path, "parquet", origin, "", path=(file, origin))
    for field, column in columns.items():
        d.put(f"{path}.{field}", column, "as verl reads its rows")


def _reward(d: Draft, path: str, name: str, option: str) -> None:
    """The reward of a data set; one that is not verl's is to fill in."""
    if name in SCORERS:
        d.spec(path, SCORERS[name], f"of the data set {name}; the peer's scorer may read answers otherwise")
    else:
        d.ask(path, "math", f"{option}: how completions of {name} are scored; see `proxima list reward`", kind=True)
