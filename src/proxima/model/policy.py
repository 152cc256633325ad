"""The policy: log-probs of the response tokens of packed trajectories."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from proxima.data import FieldError, PackedBatch, Trajectory, UserError, pack
from proxima.model.attention import ATTENTION, hugging_face_name, mixes_elsewhere, unpackable
from proxima.model.load import LoadedModel
from proxima.model.log_prob import token_log_prob


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """log_prob [N] float32, nats, at the batch's temperature; entropy [N] float32, nats, or None unless requested.

    top_k_log_prob [N, K] float32, nats, without gradient, of the ids in the batch's `top_k`; None without these.
    """

    log_prob: Tensor
    entropy: Tensor | None = None
    top_k_log_prob: Tensor | None = None


def parts(model: nn.Module) -> tuple[Any, Any]:
    """The decoder stack of a causal language model, and its output head.

    Raises:
        UserError: the logits are not a linear function of the last hidden state: their log-probs would be wrong here.
    """
    whole: Any = model
    backbone = whole.get_decoder() if hasattr(whole, "get_decoder") else whole.base_model
    head, name = whole.get_output_embeddings(), type(model).__name__
    if backbone is whole:
        raise UserError(f"{name} is not supported: it does not say which of its modules is the decoder")
    if type(head) is not nn.Linear:
        raise UserError(f"{name} is not supported: its output head is a {type(head).__name__}, not a linear layer")
    config = whole.config.get_text_config()
    for field, neutral in AFTER_THE_HEAD:
        value = getattr(config, field, neutral)
        if value is not None and value != neutral:
            raise UserError(f"{name} is not supported: it changes the logits after its output head ({field}={value})")
    return backbone, head


# what architectures of transformers do to logits after the head, with the value at which nothing happens
AFTER_THE_HEAD = (
    ("final_logit_softcapping", None),
    ("logit_scale", 1.0),
    ("logits_scaling", 1.0),
    ("lm_head_multiplier", 1.0),
    ("output_multiplier_scale", 1.0),
)


class Policy:
    """A loaded model that runs packed batches.

    Args:
        loaded: model and tokenizer.
        attention: `auto`, or a key of `proxima.model.attention.ATTENTION`. `auto` is `packed` unless the architecture
            is `unpackable`, then `padded`.
        share_prompt: run the prompt of neighbouring trajectories of a group once.
        compute_dtype: autocast dtype; float32 switches autocast off.
        log_prob_chunk: rows of logits in memory at once.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        attention: str = "auto",
        share_prompt: bool = True,
        compute_dtype: torch.dtype = torch.float32,
        log_prob_chunk: int = 512,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.loaded = loaded
        self.model = loaded.model
        other = mixes_elsewhere(self.model) if attention in ("mask", "native") else unpackable(self.model)
        if attention == "auto":
            attention = "padded" if other else "packed"
        elif other and attention != "padded":
            remedy = "set model.attention=auto, or padded"
            raise FieldError("model.attention", attention, f"mixes sequences: this model {other}", remedy=remedy)
        self.attention = attention
        self.share_prompt = share_prompt and attention in ("packed", "mask")
        self.compute_dtype = compute_dtype
        self.log_prob_chunk = log_prob_chunk
        # a model without attention takes no name for it
        if attention == "packed" or getattr(self.model, "_supports_sdpa", False):
            self.model.set_attn_implementation(hugging_face_name(attention))
        self.set_gradient_checkpointing(gradient_checkpointing)
        self.backbone, self.head = parts(self.model)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def set_gradient_checkpointing(self, on: bool) -> None:
        """Recompute activations in the backward pass instead of keeping them."""
        if on:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            self.model.train()  # Hugging Face checkpoints in training mode only; dropout must then be 0
            dropout = [m.p for m in self.model.modules() if isinstance(m, nn.Dropout) and m.p > 0]
            if dropout:
                field = "model.gradient_checkpointing=true"
                raise UserError(f"{field} needs a model without dropout; this one has {dropout[0]}.")

    def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        """The packed batch for this policy, on its device."""
        return pack(trajectories, share_prompt=self.share_prompt).to(self.device)

    def autocast(self) -> AbstractContextManager[None]:
        """bf16 matrix products on float32 weights, or nothing."""
        if self.compute_dtype == next(self.model.parameters()).dtype:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def __call__(self, batch: PackedBatch, *, entropy: bool = False, entropy_gradient: bool = False) -> TokenOutputs:
        """Log-probs of `batch.target` given all before, at `batch.temperature`; with gradient when grad is enabled.

        Law: `log_prob[t]` is of token t of the response given the prompt and response tokens 0 … t-1.
        The entropy carries no gradient unless `entropy_gradient`.

        An empty batch (no response tokens) gives empty outputs without running the model.
        """
        if len(batch.target) == 0:
            empty = torch.zeros(0, device=self.device)
            return TokenOutputs(log_prob=empty, entropy=empty if entropy else None)
        with self.autocast():
            hidden = ATTENTION[self.attention](self.backbone, batch)
            outputs = token_log_prob(
                hidden,
                self.head.weight,
                batch.target,
                batch.temperature,
                bias=self.head.bias,
                entropy=entropy,
                entropy_gradient=entropy_gradient,
                others=batch.top_k,
                chunk=self.log_prob_chunk,
            )
        return TokenOutputs(log_prob=outputs.log_prob, entropy=outputs.entropy, top_k_log_prob=outputs.others)
