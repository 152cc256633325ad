"""What ranks on several nodes do with a folder; a node is a working directory, and the folder's path is relative."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from proxima.data import UserError
from proxima.train import node_folders
from proxima.train.node_folders import NodeFolders
from proxima.train.process_ranks import ProcessRanks

NODE_OF = (0, 0, 1, 1, 2)
WRITERS = (2, 4)  # the first ranks of their nodes
ROOT = Path("memory/proxima-weights-0123")


def content(version: int) -> dict[str, bytes]:
    draws = np.random.default_rng(version)
    return {"empty": b"", "config.json": b"{}", "weights": draws.bytes(1_234_567), "exact": draws.bytes(300_000)}


def versions_on_nodes(rank: int, folder: Path) -> None:
    """Three versions, of which two are kept; then one that a node has no room for, and one that it has."""
    node = folder / str(NODE_OF[rank])
    node.mkdir(exist_ok=True)
    os.chdir(node)
    local = sum(other == NODE_OF[rank] for other in NODE_OF[:rank])
    os.environ["LOCAL_RANK"] = str(local)
    node_folders.CHUNK = 100_000
    ranks = ProcessRanks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))
    folders = NodeFolders(ranks)
    kept: list[Path] = []
    for version in range(1, 6):
        path = ROOT / f"v{version}"
        if version == 4 and rank == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, resource.RLIM_INFINITY))
        if rank == 0:
            path.mkdir(parents=True)
            for name, data in content(version).items():
                (path / name).write_bytes(data)
            kept = [*kept, path][-2:]
            if version == 4:
                with pytest.raises(UserError, match=r"2.*File too large.*engine\.weight_folder"):
                    folders.send(path, kept)
            else:
                folders.send(path, kept)
        else:
            folders.follow(ranks.receive())
        dist.barrier()
        if rank == 4 and version == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert {child.name for child in ROOT.iterdir()} == {".held", "v3"}
        else:
            assert {child.name: child.read_bytes() for child in path.iterdir()} == content(version)
            here = {child.name for child in ROOT.iterdir() if child.name != ".held"}
            keeps = {f"v{version - 1}", f"v{version}"} - {"v0"} - ({"v4"} if rank == 4 else set())
            assert here == keeps if rank in WRITERS else here >= keeps
        dist.barrier()
    if rank != 0:
        folders.close()
    if rank in WRITERS:
        assert not ROOT.exists()
