"""The policy: log-probs of the response tokens of packed trajectories."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from proxima.data.packed_batch import PackedBatch
from proxima.model.architecture import parts, scalar_head, weight_of
from proxima.model.log_prob import TokenLogProbs, log_sum_square, rows_on, sampled_log_prob, token_log_prob
from proxima.model.masked_logits import PackedSamplingMask
from proxima.model.packed_model import PackedModel, PassSettings, TokenOutputs
from proxima.model.parallel.shard import shard_head
from proxima.model.parallel.sharding import is_sharded
from proxima.model.parallel.tensor import VocabularyPart
from proxima.model.pretrained import LoadedModel


class Policy(PackedModel):
    """A causal language model that gives log-probs.

    Args:
        loaded: model and tokenizer.
        log_prob_chunk: rows of logits in memory at once; None: by the device, see `rows_on`.
        value_head: a linear layer without bias, hidden size to 1, on the last hidden states: a critic that shares the
            policy's trunk. Its weights are trained and saved as `value_head.weight`.
        settings: of `PackedModel`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        log_prob_chunk: int | None = None,
        value_head: nn.Linear | None = None,
        **settings: Unpack[PassSettings],
    ) -> None:
        super().__init__(loaded, **settings)
        self.value_head = value_head
        self.backbone, self.head = parts(self.model)
        sharding = loaded.sharding
        rows = self.model.config.get_text_config().vocab_size
        if sharding is not None:
            rows //= sharding.tensor_parallel
        self.log_prob_chunk = log_prob_chunk or rows_on(self.device, rows)
        if value_head is not None and sharding is not None and not is_sharded(value_head):
            shard_head(value_head, sharding, self.device)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        of_head = () if self.value_head is None else self.value_head.named_parameters("value_head")
        yield from chain(super().named_parameters(), of_head)

    def roots(self) -> list[Any]:
        if self.value_head is None:
            return super().roots()
        return [*super().roots(), self.value_head]

    def values_of(self, hidden: Tensor) -> Tensor:
        if self.value_head is None:
            raise ValueError("this policy has no value head: `value` needs one")

        return scalar_head(hidden, self.value_head)

    def __call__(self, batch: PackedBatch, needs: frozenset[str] = frozenset()) -> TokenOutputs:
        """Log-probs of `batch.target` given all before, at `batch.temperature`; with gradient when grad is enabled.
        Values of tokens that are not `sampled` have no meaning.

        Law: `log_prob[t]` is of token t of the response given the prompt and response tokens 0 … t-1. With a
        `sampling_mask` in the batch it is of the distribution over these tokens, and so is `log_sum_square`; entropy
        and the log-probs of other tokens are of the whole vocabulary.
        The entropy carries no gradient unless `needs` has "entropy_gradient".

        An empty batch (no response tokens) gives empty outputs.
        """
        if len(batch.target) == 0:
            bucket = None if batch.bucket_token is None else batch.bucket_token.float()
            return replace(self._nothing(needs), bucket_log_prob=bucket)
        return TokenOutputs(**self.run(lambda part: self._outputs(part, needs), batch))

    def _outputs(self, batch: PackedBatch, needs: frozenset[str]) -> dict[str, Tensor | None]:
        routing = self.routing(batch, needs)
        with self.autocast():
            hidden = self.hidden(batch, routing)
            score = self._scorer(batch)
            outputs = score(
                hidden,
                **self.head_parts(),
                entropy="entropy" in needs or "entropy_gradient" in needs,
                entropy_gradient="entropy_gradient" in needs,
                others=_joined(batch.top_k, batch.bucket_token),
                others_gradient=batch.bucket_token is not None or "top_k_gradient" in needs,
                chunk=self.log_prob_chunk,
                fused=self.compiles,
            )
        values: dict[str, Tensor | None] = {"log_prob": outputs.log_prob, "entropy": outputs.entropy}
        if routing is not None:
            values |= routing.outputs(batch, needs)
        if "value" in needs:
            values["value"] = self.values_of(hidden)
        if outputs.others is not None:  # the columns of `_joined`
            split = 0 if batch.top_k is None else batch.top_k.shape[1]
            if batch.top_k is not None:
                values["top_k_log_prob"] = outputs.others[:, :split]
            if batch.bucket_token is not None:
                values["bucket_log_prob"] = outputs.others[:, split:]
        if "log_sum_square" in needs:
            values["log_sum_square"] = self._log_sum_square(hidden, batch)
        return values

    def _scorer(self, batch: PackedBatch) -> Callable[..., TokenLogProbs]:
        """`token_log_prob` of all targets; of the sampled ones alone if others exist and neither masks nor a context
        forbid it."""
        if batch.sampled_of == batch.tokens_of or batch.sampling_mask is not None or self.context is not None:
            mask = _sampling_mask(batch)
            return partial(token_log_prob, target=batch.target, temperature=batch.temperature, mask=mask)
        return partial(sampled_log_prob, batch)

    def _log_sum_square(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        head = self.head_parts()
        mask = _sampling_mask(batch)
        with self.autocast():
            return log_sum_square(hidden, temperature=batch.temperature, **head, mask=mask, chunk=self.log_prob_chunk)

    def head_parts(self) -> dict[str, Any]:
        """Weight and bias of the output head, or this rank's part of them."""
        weight: Any = weight_of(self.head)
        bias = self.head.bias
        if not hasattr(weight, "to_local"):
            return {"weight": weight, "bias": bias}

        part = VocabularyPart.of(weight)
        if bias is not None:
            bias = bias.to_local()
        return {"weight": weight.to_local(), "bias": bias, "part": part}


def _sampling_mask(batch: PackedBatch) -> PackedSamplingMask | None:
    if batch.sampling_mask is None or batch.sampling_mask_cu is None:
        return None

    return PackedSamplingMask(batch.sampling_mask, batch.sampling_mask_cu, batch.sampling_mask_edges)


def _joined(*ids: Tensor | None) -> Tensor | None:
    """The given columns of token ids, joined side by side."""
    present = [columns for columns in ids if columns is not None]
    if len(present) > 1:
        return torch.cat(present, 1)
    return next(iter(present), None)
