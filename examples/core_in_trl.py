"""The trust region `cppo` inside TRL: a GRPOTrainer with our loss. Generation, rewards, advantages,
accumulation and logs stay TRL's.

pip install trl==1.16 .  # in the checkout
python examples/core_in_trl.py --model HuggingFaceTB/SmolLM2-135M-Instruct

TRL only keeps sampling-time log-probs when updates and generations are out of step or vLLM samples (`num_iterations` or
`steps_per_generation` above the default); otherwise the ratio is 1, and no surrogate has anything to bound.
Written for TRL 1.16, whose `_compute_loss` and batch keys it uses; neither is public API.
"""

import argparse
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from proxima.core import Cppo, PolicyBatch, TokenMean, policy_loss


class CppoTrainer(GRPOTrainer):
    """GRPOTrainer with a surrogate of `proxima.core` in place of `loss_type`; set `surrogate` on the class or the
    instance."""

    surrogate: Any = Cppo(delta=0.15)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        sampled = inputs["completion_mask"].bool()
        if "tool_mask" in inputs:
            sampled = (
                sampled & inputs["tool_mask"].bool()
            )  # a tool's output is not sampled: such a gap takes no position in CPPO's prefix
        tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        log_prob, _, _ = self._get_per_token_logps_and_entropies(model, tokens, attention, sampled.shape[1])
        behavior = inputs.get(
            "sampling_per_token_logps", inputs.get("old_per_token_logps")
        )  # vLLM's own, if there are any
        if behavior is None:
            behavior = log_prob.detach()
        else:
            behavior = torch.where(behavior.isnan(), log_prob.detach(), behavior)
        batch = PolicyBatch.from_padded(
            sampled, log_prob=log_prob, behavior_log_prob=behavior, advantage=inputs["advantages"]
        )
        loss = policy_loss(batch, surrogate=self.surrogate, aggregate=TokenMean())
        self._note(loss.metrics)
        return (loss.numerator / self._tokens_per_update(inputs)).to(log_prob.dtype)

    def _tokens_per_update(self, inputs: dict[str, Any]) -> Tensor:
        """Return TRL's own denominator: loss tokens of an optimizer update, averaged over the updates of a generation.

        TRL sums the losses of an accumulation window without dividing again, and averages gradients over processes.
        """
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        if self.model.training:
            tokens = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return tokens

    def _note(self, metrics: dict[str, Any]) -> None:
        """Add the metrics to TRL's log, exact over processes: sums and counts are gathered, not means."""
        logs = self._metrics["train" if self.model.training else "eval"]
        for name in ("masked_fraction", "approx_kl", "ratio_mean"):
            pair = torch.stack([metrics[name].sum, metrics[name].count]).to(self.accelerator.device, torch.float32)
            total, count = self.accelerator.gather(pair).view(-1, 2).sum(0)
            logs[f"proxima/{name}"].append(float(total / count.clamp(min=1)))


def ends_soon(completions: list[Any], **_: Any) -> list[float]:
    """A reward that needs no answer key: short completions."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [max(0.0, 1.0 - len(text) / 200) for text in texts]


if __name__ == "__main__":
    from datasets import Dataset

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder or name")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    questions = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a in range(2, 10) for b in range(2, 10)]
    config = GRPOConfig(
        output_dir="runs/core_in_trl",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        num_generations=8,
        num_iterations=2,  # each batch is used twice, so that the ratio leaves 1
        max_completion_length=32,
        max_steps=options.steps,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    dataset = Dataset.from_dict({"prompt": questions})
    CppoTrainer(model=options.model, reward_funcs=ends_soon, args=config, train_dataset=dataset).train()
