"""The trust region `cppo` in a plain PyTorch loop with its own network and padded [B, T] tensors: no transformers, no
recipe, no trainer.

python examples/core_in_plain_pytorch.py --steps 50 --surrogate cppo

The policy is a small recurrent network over ten digits. It is given a digit and has to count up from it, 3 → 4 5 6 7 …,
until it chooses to stop; a completion's reward is the share of six places with the right digit. Each batch is used for
four updates, so that the ratio leaves 1 and the surrogate has something to bound. The parts that use proxima are marked
with (1), (2), (3).
"""

import argparse

import torch
from torch import Tensor, nn

from proxima.core import SURROGATES, PolicyBatch, TokenMean, policy_loss  # (1) loads torch and numpy only

DIGITS, STOP, LONGEST, PROMPTS, GROUP, UPDATES = 10, 10, 8, 10, 16, 4


class Counter(nn.Module):
    """The policy: an embedding, a GRU, logits over the ten digits and the stop token."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIGITS + 1, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, DIGITS + 1)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden, state = self.memory(self.embedding(tokens), state)
        return self.head(hidden).log_softmax(-1), state


@torch.no_grad()
def generate(policy: Counter, prompt: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sample completions of prompts [B]. Return their tokens [B, T], the log-probs [B, T], and the mask [B, T] of the
    sampled tokens, which include the stop token."""
    tokens, log_probs, masks = [], [], []
    last, state, going = prompt, None, torch.ones(len(prompt), dtype=torch.bool)
    for _ in range(LONGEST):
        logits, state = policy(last[:, None], state)
        last = torch.multinomial(logits[:, 0].exp(), 1, generator=generator)[:, 0]
        tokens.append(last)
        log_probs.append(logits[:, 0].gather(1, last[:, None])[:, 0])
        masks.append(going)
        going = going & (last != STOP)
    return torch.stack(tokens, 1), torch.stack(log_probs, 1), torch.stack(masks, 1)


def log_prob_of(policy: Counter, prompt: Tensor, tokens: Tensor) -> Tensor:
    """Return log π of the tokens, [B, T], with gradient; its values in the padding are arbitrary."""
    logits, _ = policy(torch.cat([prompt[:, None], tokens[:, :-1]], 1))
    return logits.gather(2, tokens[..., None])[..., 0]


def reward_of(prompt: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return the share of the first six places that were sampled and hold the right digit, [B]."""
    right = (prompt[:, None] + torch.arange(1, 7)) % DIGITS
    return ((tokens[:, :6] == right) & mask[:, :6]).float().mean(1)


def train(steps: int = 50, surrogate: object = None, seed: int = 1, verbose: bool = True) -> list[dict[str, float]]:
    """Train from scratch and return a record for each step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Counter()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    if surrogate is None:
        surrogate = SURROGATES["cppo"]()
    history = []
    for step in range(1, steps + 1):
        prompt = torch.arange(PROMPTS).repeat_interleave(GROUP)
        tokens, behavior, mask = generate(policy, prompt, generator)
        reward = reward_of(prompt, tokens, mask)
        advantage = reward - reward.view(PROMPTS, GROUP).mean(1).repeat_interleave(GROUP)
        for _ in range(UPDATES):
            # (2) padded rows become a packed batch; [B] advantages are spread over their tokens
            batch = PolicyBatch.from_padded(
                mask, log_prob=log_prob_of(policy, prompt, tokens), behavior_log_prob=behavior, advantage=advantage
            )
            loss = policy_loss(batch, surrogate=surrogate, aggregate=TokenMean())  # (3) numerator, denominator, metrics
            optimizer.zero_grad()
            loss.value.backward()
            optimizer.step()
        metrics = {
            name: m.value for name, m in loss.metrics.items()
        }  # of the last update, where the policy has moved farthest
        history.append({"reward": float(reward.mean()), "length": float(mask.sum(1).float().mean()), **metrics})
        if verbose and step % 10 == 0:
            m = history[-1]
            print(
                f"step {step:3d}   reward {m['reward']:.3f}   ratio max {m['ratio_max']:.2f}   masked "
                f"{100 * m['masked_fraction']:.1f} %"
            )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--surrogate", choices=sorted(SURROGATES), default="cppo")
    options = parser.parse_args()
    train(options.steps, SURROGATES[options.surrogate]())
