"""Writes sampling_mask.npz: log-probs over the tokens that could be sampled, in numpy, float64, token by token.

    python tests/golden/make_sampling_mask.py

It knows nothing of proxima or torch: the sets are those of top-k, top-p and min-p as their definitions say, the
gradient is that of a PPO clip around the policy that sampled, by the chain rule over plain softmaxes.
"""

from pathlib import Path

import numpy as np

TOKENS, WIDTH, VOCABULARY = 24, 6, 40
TOP_K, TOP_P, MIN_P, CLIP = 25, 0.85, 0.01, 0.2


def softmax(x):
    weight = np.exp(x - x.max())
    return weight / weight.sum()


def kept(p):
    """Ids that top-k, then top-p, then min-p leave of probabilities p, each renormalised before the next."""
    order = np.argsort(-p, kind="stable")[:TOP_K]
    mass, left = 0.0, []
    for token in order:
        if mass >= TOP_P * p[order].sum():
            break
        left.append(int(token))
        mass += p[token]
    return sorted(token for token in left if p[token] >= MIN_P * p.max())


def main():
    draw = np.random.default_rng(20)
    weight, bias = draw.normal(size=(VOCABULARY, WIDTH)), draw.normal(size=VOCABULARY)
    before = draw.normal(size=(TOKENS, WIDTH))  # the states under the weights that sampled
    hidden = before + 0.3 * draw.normal(size=before.shape)
    temperature = draw.choice([0.7, 1.0, 1.3], TOKENS)
    advantage = draw.normal(size=TOKENS)
    columns = {name: [] for name in ("target", "behavior", "log_prob", "entropy", "log_sum_square", "ratio", "loss")}
    ids, counts, of_hidden = [], [], np.zeros_like(hidden)
    of_weight, of_bias = np.zeros_like(weight), np.zeros_like(bias)
    for n in range(TOKENS):
        sampling = softmax((weight @ before[n] + bias) / temperature[n])
        own = kept(sampling)
        mu = sampling[own] / sampling[own].sum()
        place = draw.choice(len(own), p=mu)
        p = softmax((weight @ hidden[n] + bias) / temperature[n])
        pi = p[own] / p[own].sum()
        ratio, a = pi[place] / mu[place], advantage[n]
        free, clipped = -a * ratio, -a * np.clip(ratio, 1 - CLIP, 1 + CLIP)
        slope = -a * ratio if free >= clipped else 0.0  # d loss / d log pi
        d_logits = np.zeros(VOCABULARY)
        d_logits[own] = -pi
        d_logits[own[place]] += 1
        d_logits *= slope / TOKENS / temperature[n]
        of_hidden[n] = d_logits @ weight
        of_weight += np.outer(d_logits, hidden[n])
        of_bias += d_logits
        row = (own[place], np.log(mu[place]), np.log(pi[place]), -(p * np.log(p)).sum(), np.log((pi**2).sum()))
        for name, value in zip(columns, (*row, ratio, max(free, clipped)), strict=True):
            columns[name].append(value)
        ids += own
        counts.append(len(own))
    arrays = {"hidden": hidden, "weight": weight, "bias": bias, "temperature": temperature, "advantage": advantage}
    arrays |= {name: np.array(values) for name, values in columns.items()}
    arrays |= {"ids": np.array(ids), "counts": np.array(counts)}
    arrays |= {"grad_hidden": of_hidden, "grad_weight": of_weight, "grad_bias": of_bias}
    np.savez_compressed(Path(__file__).with_name("sampling_mask.npz"), **arrays)


if __name__ == "__main__":
    main()
