"""One Ray cluster of one node for all tests of a process that need one: it starts at the first, and ends with the
process.

Who calls `ray.init` itself connects with `address()`, as `RAY_ADDRESS` or `placement.address`, and disconnects.
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

CPUS = 8  # that its node says it has
QUIET = {  # read by the processes of the cluster when they start
    "RAY_AUTH_MODE": "disabled",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_worker_niceness": "0",
}


@cache
def address() -> str:
    """HOST:PORT of its head."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": CPUS, "include_dashboard": False, "object_store_memory": 80 << 20}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (QUIET | {"RAY_TMPDIR": folder()}).items():
            patch.setenv(name, value)
        _CLUSTERS.append(Cluster(initialize_head=True, head_node_args=node))
    return str(_CLUSTERS[-1].address)


_CLUSTERS = list[object]()  # kept: a cluster that nobody holds ends


def folder() -> str:
    """For the files of a cluster, with a path that leaves room for the names of its sockets."""
    return tempfile.mkdtemp(prefix="r", dir=None if len(tempfile.gettempdir()) < 31 else "/tmp")


@contextmanager
def driver() -> Iterator[None]:
    """This process is a driver of the cluster."""
    import ray

    paths = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
    ray.init(address=address(), runtime_env=paths, logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
