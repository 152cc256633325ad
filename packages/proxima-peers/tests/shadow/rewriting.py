"""The conventions written a second time, in plain numpy, from their words alone; nothing here reads our mathematics.

Every function takes the arrays of a dump by name, float64, and a convention: axis → choice.
"""

import math
from typing import Any

import numpy as np

Arrays = dict[str, Any]


# --- advantages ---


def advantages(a: Arrays, convention: dict[str, str]) -> np.ndarray:
    reward, group, mask = a["reward"], a["group"], a["loss_mask"]
    length = mask.sum(1)
    subtracted = convention["subtracted"]
    left = np.zeros(len(reward))
    for i in range(len(reward)):
        mates = np.flatnonzero(group == group[i])
        others = mates[mates != i]
        if subtracted == "nothing":
            left[i] = reward[i]
        elif subtracted == "the mean of the batch":
            left[i] = reward[i] - reward.mean()
        elif len(mates) == 1:
            left[i] = 0.0
        elif subtracted == "the mean of the group":
            left[i] = reward[i] - reward[mates].mean()
        elif subtracted == "the mean of the others in the group":
            left[i] = reward[i] - reward[others].mean()
        elif subtracted == "the mean of the group, by length":
            total = length[mates].sum()
            left[i] = reward[i] - (length[mates] * reward[mates]).sum() / total if total else 0.0
    single = np.array([(group == label).sum() == 1 for label in group])
    keeps = convention.get("a group of one") == "keeps its reward"
    if keeps:
        left[single] = reward[single]
    divided = convention["divided by"]
    if divided == "nothing":
        return left
    fewer = 0 if convention["deviation with"] == "n" else 1
    epsilon = float(convention["epsilon"])

    def deviation(values: np.ndarray) -> float:
        return 0.0 if len(values) < 2 else float(np.sqrt(((values - values.mean()) ** 2).sum() / (len(values) - fewer)))

    if divided == "the deviation of the group":
        each = np.array([deviation(reward[group == label]) for label in group])
        if keeps:
            each[single] = 1.0
    elif divided == "the deviation of the batch's rewards":
        each = np.full(len(reward), deviation(reward))
    else:
        tokens = divided == "the deviation of what is left, over the loss tokens"
        spread = np.repeat(left, length) if tokens else left
        left = left - spread.mean()
        each = np.full(len(reward), deviation(spread))
    root = convention.get("epsilon is added") == "to the variance, under the root"
    below = np.sqrt(each**2 + epsilon) if root else each + epsilon
    return np.divide(left, below, out=np.zeros_like(left), where=below > 0)


def kl_reward(a: Arrays, convention: dict[str, str], coefficient: float) -> np.ndarray:
    """[B, T] what the KL takes from the reward of each token that has one."""
    mask = a["mask" if convention.get("tokens with a reward") == "all of the answers" else "loss_mask"]
    name = convention.get("KL in the reward", "none")
    if name == "none":
        return np.zeros(mask.shape)
    policy = {"the policy before the update": "old_log_prob", "the engine's policy": "rollout_log_prob"}
    gap = np.where(mask, a[policy[convention["KL of"]]] - a["reference_log_prob"], 0.0)
    near = np.clip(gap, -20, 20)
    third = np.exp(-near) - 1 + near
    kinds = {"k1": gap, "k2": gap**2 / 2, "k3": third, "k3 up to 10": np.minimum(third, 10.0), "|k1|": abs(gap)}
    return np.where(mask, coefficient * kinds[name], 0.0)


def token_advantages(a: Arrays, convention: dict[str, str], coefficient: float) -> np.ndarray:
    """[B, T], 0 outside the loss."""
    mask = a["mask" if convention.get("tokens with a reward") == "all of the answers" else "loss_mask"]
    paid = kl_reward(a, convention, coefficient)
    gamma, lam = map(float, convention["γ and λ"].split(" and "))
    out = np.zeros(mask.shape)
    for row in range(len(mask)):
        at = np.flatnonzero(mask[row])
        reward = -paid[row][at]
        if len(at):
            reward[-1] += a["reward"][row]
        value = a["value"][row][at]
        total = 0.0
        for i in reversed(range(len(at))):
            if convention["estimate"] == "GAE":
                after = value[i + 1] if i + 1 < len(at) else 0.0
                total = reward[i] + gamma * after - value[i] + gamma * lam * total
            else:
                total = reward[i] + gamma * total
            out[row][at[i]] = total
    inside = a["loss_mask"]
    chosen = out[inside]
    if convention["standardised"] != "no":
        fewer = 0 if convention["deviation with"] == "n" else 1
        variance = ((chosen - chosen.mean()) ** 2).sum() / (len(chosen) - fewer)
        epsilon = float(convention["epsilon"])
        root = convention.get("epsilon is added") == "to the variance, under the root"
        below = math.sqrt(variance + epsilon) if root else math.sqrt(variance) + epsilon
        out = (out - chosen.mean()) / below
    return np.where(inside, out, 0.0)


# --- weights ---


def weights(a: Arrays, convention: dict[str, str], upper: float) -> np.ndarray:
    """[B, T]; the lower bound is 0 or 1 / upper, and has six digits in its name."""
    mask = a["loss_mask"]
    numerator = "old_log_prob" if convention["numerator"] == "the policy before the update" else "log_prob"
    rho = np.where(mask, a[numerator] - a["rollout_log_prob"], 0.0)
    out = np.zeros(mask.shape)
    for row in range(len(mask)):
        inside = rho[row][mask[row]]
        total = inside.sum()
        of_level = {
            "the token": inside,
            "the answer, the product of its tokens": np.full(len(inside), total),
            "the answer, the geometric mean of its tokens": np.full(len(inside), total / max(len(inside), 1)),
        }[convention["weight of"]]
        out[row][mask[row]] = np.exp(np.clip(of_level, -20, 20))
    lower = 0.0 if convention.get("lower bound") == "0" else 1 / upper
    bound = convention["bound"]
    if bound == "capped":
        out = np.minimum(out, upper)
    elif bound == "0 outside":
        out = np.where((out >= lower) & (out <= upper), out, 0.0)
    elif bound == "moved to the nearest bound":
        out = np.where(mask, np.clip(out, lower, upper), 0.0)
    if convention["divided by their mean"] == "yes":
        if convention["weight of"] == "the token":
            mean = out[mask].mean()
        else:
            mean = np.mean([out[row][mask[row]][0] for row in range(len(mask)) if mask[row].any()])
        out = out / (mean or 1.0)
    return out


# --- the loss of tokens ---

SUMMED = {
    "the tokens in the loss": "loss_mask",
    "all tokens of the answers": "mask",
    "all positions, padding with its values": "every",
}
BEFORE = {
    "the log-probs recomputed before the update": "old_log_prob",
    "the log-probs of the engine": "rollout_log_prob",
    "its own log-probs, so that it is 1, with their gradient": "log_prob",
}


def policy(a: Arrays, convention: dict[str, str], low: float, high: float, dual: float | None) -> np.ndarray:
    """[B, T] the clipped loss, with its weights."""
    mask = a[SUMMED[convention["summed"]]]
    log_ratio = np.where(mask, a["log_prob"] - a[BEFORE[convention["ratio to"]]], 0.0)
    advantage = np.where(mask, a["advantage"], 0.0)
    level = convention["ratio of"]
    if level.startswith("the answer"):
        for row in range(len(mask)):
            if mask[row].any():
                log_ratio[row][mask[row]] = log_ratio[row][mask[row]].mean()
                if level == "the answer, gradient through the mean":
                    advantage[row][mask[row]] = advantage[row][mask[row]].mean()
    if convention.get("log-ratios") != "not clamped":
        log_ratio = np.clip(log_ratio, -20, 20)
    ratio = np.exp(log_ratio)
    floor, ceiling = {
        "1 − ε to 1 + ε": (1 - low, 1 + high),
        "the numbers are the bounds themselves": (low, high),
        "the upper number is the bound itself, no lower one": (0.0, high),
        "e^−ε to e^ε": (math.exp(-low), math.exp(high)),
    }[convention["clip range"]]
    kind = convention["bound where A < 0"]
    if kind == "of the ratio before the clip, whatever A is":
        first = np.minimum(ratio, dual)
        loss = -np.minimum(first * advantage, np.clip(ratio, floor, ceiling) * advantage)
    else:
        cap = {"as stated": dual, "none": None, "3, verl's default": 3.0}[kind]
        loss = np.maximum(-ratio * advantage, -np.clip(ratio, floor, ceiling) * advantage)
        if cap is not None:
            loss = np.where(advantage < 0, np.minimum(loss, -cap * advantage), loss)
    loss = np.where(mask, loss, 0.0)
    if convention["weights"] == "those of the dump, each token's":
        return loss * np.where(mask, a["weight"], 0.0)
    if convention["weights"] == "those of the dump, geometric mean":
        for row in range(len(mask)):
            kept = mask[row] & (a["weight"][row] > 0)
            mean = np.exp(np.log(a["weight"][row][kept]).mean()) if kept.any() else 0.0
            loss[row] = np.where(kept, loss[row] * mean, 0.0)
    return loss


def penalty(a: Arrays, convention: dict[str, str], coefficient: float, summed: str, before: str) -> np.ndarray:
    """[B, T] the KL's term."""
    mask = a[SUMMED[summed]]
    name = convention["KL"]
    if name == "none":
        return np.zeros(mask.shape)
    kind, _, times = name.removesuffix(" with the gradient of k2").partition(" times ")
    gap = np.where(mask, a["log_prob"] - a["reference_log_prob"], 0.0)
    near = np.clip(gap, -20, 20)
    third = np.exp(-near) - 1 + near
    values = {"k1": gap, "k2": gap**2 / 2, "k3": third, "k3 up to 10": np.clip(third, -10, 10), "|k1|": abs(gap)}[kind]
    moved = np.where(mask, a["log_prob"] - a[BEFORE[before]], 0.0)
    if times == "the answer's ratio":
        for row in range(len(mask)):
            if mask[row].any():
                moved[row][mask[row]] = moved[row][mask[row]].mean()
    if times:
        values = values * np.exp(np.clip(moved, -20, 20))
    if convention["KL is weighted"] == "yes":
        values = values * a["weight"]
    return np.where(mask, coefficient * values, 0.0)


# --- the mean ---


def factors(a: Arrays, convention: dict[str, str], given: dict[str, int]) -> np.ndarray:
    """[B] what the sum of each answer is multiplied by."""
    counted = {
        "the tokens in the loss": "loss_mask",
        "all tokens of the answers": "mask",
        "all positions, padding too": "every",
    }
    mask = a[counted[convention["counted"]]]
    length = mask.sum(1)
    rows = len(mask)
    mean = convention["mean"]
    over = convention["over"]
    horizon = {
        "of the answers' sums, over the longest answer allowed": given.get("max_length", 0),
        "of the answers' sums, over the padded width": mask.shape[1],
        "of the answers' sums, over the longest answer there": int(length.max()),
    }.get(mean, 1)
    if over.startswith("the counts"):
        ranks = given["ranks"] if over.endswith("times the ranks") else 1
        if mean == "of the tokens":
            return np.full(rows, ranks / given["tokens"])
        own = np.maximum(length, 1) if mean == "of the answers' means" else np.ones(rows)
        return ranks / given["sequences"] / horizon / own
    if mean == "none, the sum of the tokens":
        return np.where(length > 0, 1.0, 0.0)
    where = list(zip(a["rank"].tolist(), a["micro_batch"].tolist(), strict=True))
    whole = {"the batch": lambda i: 0, "a micro-batch": lambda i: where[i], "a rank": lambda i: where[i][0]}
    label = whole[over.partition(",")[0]]
    pieces: dict[Any, list[int]] = {}
    for i in range(rows):
        pieces.setdefault(label(i), []).append(i)
    ranks = len({rank for rank, _ in where})
    out = np.zeros(rows)
    for name, piece in pieces.items():
        of_rank = sum(both[0] == name[0] for both in pieces) if isinstance(name, tuple) else 1
        share = {
            "the batch": 1.0,
            "a micro-batch, then the mean of the micro-batches": 1 / len(pieces),
            "a micro-batch, then the micro-batches by their answers": len(piece) / rows,
            "a micro-batch, then the sum of the micro-batches": 1.0,
            "a rank, then the mean of the ranks": 1 / ranks,
            "a rank, then the sum of the ranks": 1.0,
            "a micro-batch, then the mean of its rank's, then that of the ranks": 1 / ranks / of_rank,
            "a micro-batch, then the sum of its rank's, then the mean of the ranks": 1 / ranks,
        }[over]
        some = sum(length[i] > 0 for i in piece)
        answers = len(piece) if convention.get("answers without a token") == "are counted" else some
        for i in piece:
            if length[i] == 0:
                continue
            below = {"of the tokens": sum(length[j] for j in piece), "of the answers' means": answers * length[i]}
            out[i] = share / below.get(mean, answers) / horizon
    return out
