"""A table of metrics that finds a column under any of its names. Needs pandas."""

from typing import Any

import pandas as pd

from proxima.data.errors import nearest, suggestion
from proxima.experiments.metric_names import METRIC_ALIASES, canonical_metric


class MetricsFrame(pd.DataFrame):  # type: ignore[misc]  # pandas has no types
    """A DataFrame whose columns have our names; indexing also accepts the names of other frameworks:
    `metrics["actor/ppo_kl"]` is `metrics["approx_kl_k1"]`. Columns are not duplicated, so an export has only our names.

    Raises: KeyError with the nearest name, if a name is neither a column nor another framework's name for one.
    """

    @property
    def _constructor(self) -> type["MetricsFrame"]:
        return MetricsFrame

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return super().__getitem__(self._column(key))
        if isinstance(key, list) and all(isinstance(name, str) for name in key):
            return super().__getitem__([self._column(name) for name in key])
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, str) and super().__contains__(canonical_metric(key)))

    def _column(self, name: str) -> str:
        columns = [str(column) for column in self.columns]
        ours = name if name in columns else canonical_metric(name)
        if ours in columns:
            return ours
        if ours in METRIC_ALIASES.values():
            what = f"no metric {name!r}"
            if ours != name:
                what += f": here it is {ours!r}"
            raise KeyError(f"{what}, which this run has not recorded; {suggestion(ours, columns)}")
        near = nearest(name, columns) or nearest(name, METRIC_ALIASES)
        remedy = f"did you mean {near!r}?" if near else suggestion(name, columns)
        raise KeyError(f"no metric {name!r}; {remedy}")
