"""Training without a run: trajectories with rewards in, new weights out. No recipe, no engine, no folder.

python examples/train_from_trajectories.py models/smollm2-135m-instruct

The trajectories are texts that already have rewards; those of an engine, an agent or a log are used in the same way.
"""

import sys
from dataclasses import replace

import torch

from proxima.core import ADVANTAGES, Outcomes, PpoClip, TokenMean
from proxima.data.trajectory import Trajectory
from proxima.model.load import load
from proxima.model.policy import Policy
from proxima.training.objectives.policy_objective import PolicyObjective
from proxima.training.optimizer import AdamW
from proxima.training.stack import TrainStack, UpdateResult

PROMPT = "The capital of France is"
REWARDS = {" Paris.": 1.0, " Lyon.": 0.0, " Paris, as far as I know.": 0.5, " Rome.": 0.0}


def train(path: str, updates: int = 4) -> list[UpdateResult]:
    loaded = load(path)
    stack = TrainStack(Policy(loaded, compute_dtype=torch.float32), optimizer=AdamW(lr=1e-5))
    prompt, *answers = (loaded.tokenizer.encode(text, add_special_tokens=False) for text in (PROMPT, *REWARDS))
    rewards, group = torch.tensor([*REWARDS.values()]), torch.zeros(len(REWARDS), dtype=torch.long)
    advantage = ADVANTAGES["grpo"](scale="none")(Outcomes.of(rewards, group)).tolist()
    trajectories = [
        Trajectory(uid=0, sample=i, group=0, prompt_tokens=prompt, tokens=answer, advantage=advantage[i])
        for i, answer in enumerate(answers)
    ]
    behavior = stack.log_prob(trajectories)  # the centre of the trust region; an engine reports its own
    batch = [replace(item, behavior_log_prob=x) for item, x in zip(trajectories, behavior, strict=True)]
    objective = PolicyObjective(surrogate=PpoClip(epsilon_low=0.2, epsilon_high=0.28), aggregate=TokenMean())
    return [stack.update(objective, [batch]) for _ in range(updates)]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: train_from_trajectories.py MODEL, a Hugging Face folder or a name on the hub")
    for number, result in enumerate(train(sys.argv[1]), start=1):
        print(f"update {number}  loss {result.metrics['loss']:+.4f}")
        for (text, reward), tokens in zip(REWARDS.items(), result.token_statistics.values(), strict=True):
            print(f"    {text!r:28} reward {reward}  log-prob {tokens.log_prob.sum():.2f}")
