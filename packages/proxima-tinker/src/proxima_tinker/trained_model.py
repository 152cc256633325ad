"""A model that a client trains: its own weights on a base that all clients share, gradients, optimizer."""

import copy
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from tinker.types import AdamParams, LoraConfig
from torch import Tensor, nn

from proxima.core.metrics import Metrics, merge_metrics
from proxima.data import UserError, require
from proxima.data.trajectory import Trajectory
from proxima.model.adapters.lora import Lora, attach
from proxima.model.micro_batch import micro_batches
from proxima.model.policy import Policy
from proxima.model.pretrained import LoadedModel
from proxima_tinker.datum import COLUMNS, Array, Datum, column, trajectories
from proxima_tinker.losses import ClientLoss, LossResult, Targets

ALPHA = 32.0  # of LoRA: the product of the adapters is scaled by 32 / rank
SLOTS = ("weight", "step", "exp_avg", "exp_avg_sq", "grad")  # of a parameter, in a state


def _adapted_layers(spec: LoraConfig, base: LoadedModel) -> tuple[str, ...]:
    """The last names of the layers that get an adapter."""
    head = base.model.get_output_embeddings()
    names = set()
    for name, module in base.model.named_modules():
        if type(module) is not nn.Linear:
            continue
        if module is head:
            wanted = spec.train_unembed
        elif "attn" in name or "attention" in name:
            wanted = spec.train_attn
        else:
            wanted = spec.train_mlp
        if wanted:
            names.add(name.rpartition(".")[2])
    return tuple(sorted(names))


def check_adam(settings: Any) -> None:
    """Raise UserError if an optimizer step has settings of another optimizer, or one out of range; names it."""
    if not isinstance(settings, AdamParams):
        raise UserError("only AdamW is served; leave optimizer_params out and give adam_params")
    for name, value in settings.model_dump().items():
        bound = 1 if name in ("beta1", "beta2") else float("inf")
        require(0 <= value < bound, f"adam_params.{name}", value, f"must be in [0, {bound})")


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """Of each example, its log-probs and what else the loss gave; the loss of the request, and its statistics."""

    outputs: list[dict[str, Array]]
    loss: float
    metrics: Metrics


BUILDING = threading.Lock()  # of adapters: torch's random state is of the process


class TrainedModel:
    """A model in training. Calls come from one lane, one after the other.

    Args:
        base: model and tokenizer; its weights are read, never written.
        spec: what is trained: an adapter of this rank, on these layers; rank 0: all weights.
        compute_dtype: of the products; weights are float32.
        budget: tokens of one forward pass.
    """

    def __init__(self, base: LoadedModel, spec: LoraConfig, *, compute_dtype: torch.dtype, budget: int) -> None:
        self.budget = budget
        if spec.rank > 0:  # modules of its own, on the same weights
            shared = {id(tensor): tensor for tensor in chain(base.model.parameters(), base.model.buffers())}
            model = copy.deepcopy(base.model, shared)
            lora = Lora(rank=spec.rank, alpha=ALPHA, targets=_adapted_layers(spec, base))
            with BUILDING:
                attach(model, lora, spec.seed or 0)
            self.loaded = replace(base, model=model)
        else:
            self.loaded = replace(base, model=copy.deepcopy(base.model).requires_grad_(True), base=None)
        self.policy = Policy(self.loaded, compute_dtype=compute_dtype)
        self.trained = {name: p for name, p in self.policy.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(list(self.trained.values()), fused=True)

    def run(self, data: Sequence[Datum], loss: ClientLoss, *, backward: bool) -> Generator[None, None, PassResult]:
        """The loss of a request, of examples that are checked; with `backward` its gradient is added to those since the
        last step, or, if anything fails, nothing is. It yields between forward passes.

        Raises:
            UserError: the loss is refused.
        """
        before = [(parameter, parameter.grad) for parameter in self.trained.values()]
        self.optimizer.zero_grad()
        try:
            return (yield from self._run(data, loss, backward=backward))
        except BaseException:
            self.optimizer.zero_grad()
            raise
        finally:
            for parameter, earlier in before:
                if earlier is not None:
                    if parameter.grad is None:
                        parameter.grad = earlier
                    else:
                        parameter.grad = earlier.add_(parameter.grad)

    def _run(self, data: Sequence[Datum], loss: ClientLoss, *, backward: bool) -> Generator[None, None, PassResult]:
        items = trajectories(data)
        cuts = micro_batches([(item,) for item in items], self.budget, share_prompt=self.policy.share_prompt)
        parts = [([items[i] for i in cut], [data[i] for i in cut]) for cut in cuts]
        if len(parts) == 1 or not loss.whole:
            done = []
            for of_part, examples in parts:
                with torch.set_grad_enabled(backward):
                    log_prob = self._log_prob(of_part, examples)
                    result = loss(self._targets(log_prob, examples))
                if backward and result.loss.requires_grad:
                    result.loss.backward()
                done.append(_result(log_prob.detach(), result, examples))
                yield
            return PassResult(
                outputs=[output for part in done for output in part.outputs],
                loss=sum(part.loss for part in done),
                metrics=merge_metrics([part.metrics for part in done]),
            )
        # the loss depends on all examples: first its gradient by the log-probs, then that of the weights
        found = []
        for part in parts:
            with torch.no_grad():  # not around a yield: it is of the thread, which others use meanwhile
                found.append(self._log_prob(*part))
            yield
        leaf = torch.cat(found).requires_grad_(backward)
        with torch.set_grad_enabled(backward):
            result = loss(self._targets(leaf, data))
        if backward:
            result.loss.backward()
            assert leaf.grad is not None
            for part, gradient in zip(parts, leaf.grad.split([len(log_prob) for log_prob in found]), strict=True):
                (self._log_prob(*part) * gradient).sum().backward()
                yield
        return _result(leaf.detach(), result, data)

    def _log_prob(self, items: Sequence[Trajectory], data: Sequence[Datum]) -> Tensor:
        batch = self.policy.pack(items)
        targets = torch.from_numpy(np.concatenate([datum.targets for datum in data])).to(batch.target.device)
        if targets.dim() == 1:
            return self.policy(replace(batch, target=targets)).need("log_prob")
        return self.policy(replace(batch, top_k=targets), frozenset({"top_k_gradient"})).need("top_k_log_prob")

    def _targets(self, log_prob: Tensor, data: Sequence[Datum]) -> Targets:
        device = log_prob.device
        columns = {}
        for name in COLUMNS:
            values = column(data, name, device)
            if values is not None:
                columns[name] = values
        ends = np.cumsum([0, *(len(datum.tokens) for datum in data)])
        return Targets(log_prob=log_prob, columns=columns, cu_seqlens=torch.from_numpy(ends).to(device))

    def step(self, settings: AdamParams) -> dict[str, float]:
        """Update the weights with the gradients since the last step. Returns the norm of the gradient before clipping.

        Raises:
            UserError: there is no gradient, or it is not finite, and is then dropped.
        """
        if all(p.grad is None for p in self.trained.values()):
            raise UserError("there is no gradient since the last optim_step; call forward_backward first")
        norm = float(nn.utils.clip_grad_norm_(self.trained.values(), settings.grad_clip_norm or float("inf")))
        if norm != norm or norm == float("inf"):
            self.optimizer.zero_grad()
            raise UserError(f"the norm of the gradient is {norm}: it was dropped, and the weights are unchanged")
        for group in self.optimizer.param_groups:
            group |= {
                "lr": settings.learning_rate,
                "betas": (settings.beta1, settings.beta2),
                "eps": settings.eps,
                "weight_decay": settings.weight_decay,
            }
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm": norm}

    def state(self, kept: Sequence[str] = SLOTS) -> dict[str, Tensor]:
        """What training changes, as `SLOT.NAME`: weights, moments, gradients that wait for a step."""
        out: dict[str, Tensor] = {}
        for name, parameter in self.trained.items():
            slots = {"weight": parameter.detach(), "grad": parameter.grad, **self.optimizer.state.get(parameter, {})}
            for slot in kept:
                values = slots.get(slot)
                if values is not None:
                    out[f"{slot}.{name}"] = values.contiguous().cpu()
        return out

    def load(self, state: Mapping[str, Tensor], *, optimizer: bool = True) -> None:
        """The inverse of `state`; without `optimizer` the moments begin anew.

        Raises:
            UserError: the state is of a model with other weights.
        """
        shapes = {f"weight.{name}": p.shape for name, p in self.trained.items()}
        if {name: t.shape for name, t in state.items() if name.startswith("weight.")} != shapes:
            raise UserError("these weights are of another model or of another adapter")
        self.optimizer.state.clear()
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(state[f"weight.{name}"])
                there = [slot for slot in SLOTS[1:] if f"{slot}.{name}" in state]
                slots = {slot: state[f"{slot}.{name}"].to(parameter.device, copy=True) for slot in there}
                parameter.grad = slots.pop("grad", None)
                if optimizer and slots:
                    self.optimizer.state[parameter] = slots


def _result(log_prob: Tensor, result: LossResult, data: Sequence[Datum]) -> PassResult:
    """The outputs of a loss for each example."""
    lengths = [len(datum.tokens) for datum in data]
    columns = {"logprobs": log_prob, **result.outputs}
    split = {name: values.detach().float().cpu().split(lengths) for name, values in columns.items()}
    outputs = [{name: values[i].numpy() for name, values in split.items()} for i in range(len(data))]
    return PassResult(outputs=outputs, loss=float(result.loss.detach()), metrics=result.metrics)
