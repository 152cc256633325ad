"""Sends adapters alone, as a folder of a few MB that peft could read. Servers keep the base they were started with.

The proof compares log-probs of base and adapter together. The perturbed copy moves every matrix of the adapter, so it
shows that the server has each of them. The base is not sent, and so not perturbed: one that moves the log-probs by less
than the bound of the server's dtype, such as a checkpoint a few steps away, is not told from the trainer's.
"""

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxima.engine.http.dialect import ADAPTER, WeightsInFolder
from proxima.engine.http.replica import Replica
from proxima.engine.http.weights.transport import UNSEEN, PushRound, Receivers
from proxima.engine.http.weights.weight_folders import StagedTransport, WeightFolders
from proxima.model.adapters.adapter_files import WEIGHTS, write_matrices
from proxima.model.adapters.lora import adapter_names
from proxima.model.parallel.lending import lender_of


class AdapterFolders(WeightFolders):
    """Versions of an adapter, each a complete folder: peft's config, and the matrices."""

    def _size(self, model: nn.Module, dtype: torch.dtype | None) -> int:
        weights = map(model.get_parameter, adapter_names(model))
        return sum(weight.numel() * (dtype or weight.dtype).itemsize for weight in weights)

    def _fill(self, model: nn.Module, tokenizer: Any, folder: Path, dtype: torch.dtype | None) -> None:
        lender = lender_of(model)
        matrices = dict[str, Tensor]()
        for name in adapter_names(model):
            if lender is not None:  # of a sharded model
                lender.load_parameter(name)
            matrices[name] = model.get_parameter(name).detach().to("cpu", dtype, copy=True)
        write_matrices(model, folder, "", None, matrices)


class AdapterTransport(StagedTransport):
    """See `WeightTransport`. For servers with `ServerFacts.adapter_rank`, and a model with adapters, whose matrices are
    not merged."""

    sends = "adapters"
    folders = AdapterFolders

    @classmethod
    def unreached(cls, servers: Receivers) -> str | None:
        """See `WeightTransport`. `check_adapters` says it with the remedy."""
        if not servers.offer("adapters"):
            return "is not offered by every server"
        if servers.read_our_files:
            return None
        return f"needs weight_folder: {UNSEEN}"

    @classmethod
    def cost(cls, servers: Receivers) -> float:
        """See `WeightTransport`; `auto` does not choose it."""
        return 1.0

    @classmethod
    def reason(cls, servers: Receivers) -> str:
        return "set by engine.adapters_only"

    def _written(self, folder: Path) -> int:
        return (folder / WEIGHTS).stat().st_size

    async def push(self, replica: Replica, weights: WeightsInFolder, push_round: PushRound | None = None) -> None:
        """See `WeightTransport`. The server knows the adapter by a link to its folder: if it reads the adapter again,
        it finds the one that it was given last."""
        name = f"adapter-{hashlib.sha256(replica.url.encode()).hexdigest()[:16]}"
        link = self._folders.kept[-1].parent / name  # this folder exists until `close`
        new = link.with_name(f"{name}.new")
        new.unlink(missing_ok=True)
        new.symlink_to(weights.folder)
        os.replace(new, link)
        await replica.dialect.load_adapter(replica.client, replica.facts, weights, link)
        replica.facts = replace(replica.facts, adapter=ADAPTER)
