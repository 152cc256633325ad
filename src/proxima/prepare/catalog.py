"""The data sets that can be prepared, from `catalog.yaml`: where they are published, their answers and their prompt."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml


@dataclass(frozen=True)
class Hub:
    """A data set on the hub.

    Args:
        name: owner/name.
        subsets: configurations to read, in this order; empty: all files.
        license: as its page states; None: unknown.
    """

    name: str
    subsets: tuple[str, ...] = ()
    license: str | None = None


@dataclass(frozen=True)
class Part:
    """One folder prepared from a source.

    Args:
        name: of the folder; evaluation looks for `data/<name>/test.parquet`.
        title: a one-line description.
        hubs: data sets that publish it; the first available one is used.
        side: `train`: training questions, of which a test split is split off if the source has none; `test`: every row
            is an evaluation question.
        answer: key in `ANSWERS`.
        template: key in `TEMPLATES`: the prompt unless `--template` names another.
        reward: a reward that scores it, for the example in the card.
        license: of the questions as first published; None: unknown.
        published: number of published questions per side; a prepared side of another size is reported.
        optional: the source is complete without it.
    """

    name: str
    title: str
    hubs: tuple[Hub, ...]
    side: Literal["train", "test"]
    answer: str
    template: str = "boxed"
    reward: str = "math"
    license: str | None = None
    published: Mapping[str, int] = field(default_factory=dict)
    optional: bool = False


def _part(values: Mapping[str, Any]) -> Part:
    hubs = (Hub(**{**hub, "subsets": tuple(hub.get("subsets", ()))}) for hub in values["hubs"])
    return Part(**{**values, "hubs": tuple(hubs)})


_CATALOG = yaml.safe_load(Path(__file__).with_name("catalog.yaml").read_text(encoding="utf-8"))
SOURCES: dict[str, tuple[Part, ...]] = {name: tuple(map(_part, parts)) for name, parts in _CATALOG.items()}
