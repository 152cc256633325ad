"""TRL's RLOOTrainer: leave-one-out advantages, with the KL in the reward; defaults of 1.16."""

from proxima_peers.convert.draft import Draft
from proxima_peers.convert.options import Options
from proxima_peers.convert.trl import questions_and_rewards, sampling_and_training, without_truncated

PATH = "algorithm.surrogate"
ONE_UPDATE = "With one update a batch every ratio is 1, and the gradient is that of RLOO."


def convert_rloo(o: Options) -> Draft:
    """A recipe from a RLOOConfig."""
    d = Draft()
    columns = questions_and_rewards(d, o)
    d.put("algorithm.proximal", "recompute", "TRL computes old_logps with the trainer")
    normalised = (o.flag("normalize_advantages"), o.origin("normalize_advantages"))
    d.spec("algorithm.advantage", "rloo", "RLOOTrainer", normalise=normalised)
    low = o.sourced("epsilon", default=0.2)
    high = o.sourced("epsilon_high", "epsilon", default=0.2)
    note = f"TRL clips the ratio of a whole completion, here each token's. {ONE_UPDATE}"
    d.spec(PATH, "ppo_clip", "RLOOTrainer", note, epsilon_low=low, epsilon_high=high)
    note = "a sum over the tokens of each completion, as TRL's log-prob of the whole; then the mean over completions"
    d.spec("algorithm.aggregate", "sequence_mean_token_sum", "RLOOTrainer", note)
    _kl_in_reward(d, o)
    if o.given("reward_clip_range"):
        d.lacks("reward_clip_range", f"{o.get('reward_clip_range')}: no reward is clipped here")
    why = "TRL counts such completions in the mean over completions, and takes no KL of them"
    without_truncated(d, o, f"after the advantages of the whole group, as in TRL; {why}")
    made = sampling_and_training(d, o, columns, group=2)
    if made > 1:
        if o.whole("num_iterations", default=1) > 1:
            name = "num_iterations"
        else:
            name = "steps_per_generation"
        bound = "from the second on TRL clips the ratio of a whole completion, the product of its tokens' ratios"
        d.lacks(name, f"{made} updates on a batch: {bound}; here each token's is clipped")
    return d


def _kl_in_reward(d: Draft, o: Options) -> None:
    """`beta`, .05 by default: the sum of the log-ratios to the reference over a completion."""
    beta, origin = o.sourced("beta", default=0.05)
    if not beta:
        d.put("algorithm.reward_kl", None, f"{origin}: 0")
        return
    note = "summed over the completion and taken off its reward before the baseline, in both"
    d.put("algorithm.reward_kl.coefficient", beta, origin, note)
    d.put("algorithm.reward_kl.estimator", "k1", "RLOOTrainer")
