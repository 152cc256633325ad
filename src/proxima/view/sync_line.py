"""The line about new weights at engines that are servers."""

from proxima.runtime.watch.observer import Record
from proxima.view.formatting import count, duration, significant


def sync_line(record: Record) -> str:
    """`weights of version 3 at 2 servers: probe mean 0.00021 max 0.0031 nats (bounds 0.02 and 0.2)  1.2 s after 0.9 s
    to prepare`: the engine's measurements of the weights that it received."""
    servers = int(record.get("sync/replicas") or 1)
    mean, most = (significant(record.get(f"sync/probe_{name}")) for name in ("mean", "max"))
    bounds = " and ".join(
        significant(record[f"sync/bound_{n}"]) for n in ("mean", "max") if f"sync/bound_{n}" in record
    )
    before = record.get("sync/prepare_seconds")
    parts = [
        f"weights of version {record['version']} at {count(servers)} server{'s' * (servers != 1)}: "
        f"probe mean {mean} max {most} nats{f' (bounds {bounds})' if bounds else ''}",
        f"{duration(record.get('sync/seconds'))}{'' if before is None else f' after {duration(before)} to prepare'}",
    ]
    return "  ".join(part for part in parts if part)
