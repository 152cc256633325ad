"""A model of seven tokens whose log-probs are a formula, so that every test knows them to the last digit."""

from collections.abc import Sequence

import numpy as np

VOCABULARY, STOP = 8, 7
LETTERS = "abcdefg"


class LetterTokenizer:
    """A token a letter; the stop token is special and has no text."""

    def __init__(self, letters: str = LETTERS) -> None:
        self.letters = letters

    def decode(self, tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False):
        return "".join(self.letters[i] if i < len(self.letters) else "" for i in tokens)

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [self.letters.find(letter) + 1 for letter in text]}


def states(weights: float, tokens: Sequence[int], earlier: Sequence[float] = ()) -> list[float]:
    """The KV of a sequence: a number a token. `known` is a prefix of it, as a cache keeps it."""
    return [*earlier, *(float(np.sin(weights * (tokens[t] + 1) + t)) for t in range(len(earlier), len(tokens)))]


def log_probs(weights: float, last: int, kv: Sequence[float], temperature: float = 1.0) -> np.ndarray:
    """[VOCABULARY] nats, of the next token."""
    k = np.arange(VOCABULARY)
    logits = 1.5 * np.cos(weights * k + 3 * np.mean(kv) + last * (k + 1)) - 0.7 * (k == STOP)
    logits = logits / (temperature or 1.0)
    return logits - np.log(np.exp(logits).sum())


def sequence_log_probs(
    weights: float | Sequence[float], prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> np.ndarray:
    """[T] of each token after all before it, each by its own weights, with the KV of these weights."""
    everything, values = [*prompt, *tokens], []
    each = [weights] * len(tokens) if isinstance(weights, float) else weights
    for t, (token, own) in enumerate(zip(tokens, each, strict=True), len(prompt)):
        values.append(log_probs(own, everything[t - 1], states(own, everything[:t]), temperature)[token])
    return np.array(values, np.float32)


def truncated(full: np.ndarray, top_k: int) -> np.ndarray:
    """Renormalised over the `top_k` most probable tokens; 0 keeps all."""
    if not top_k:
        return full
    kept = np.where(full >= np.sort(full)[-top_k], full, -np.inf)
    return kept - np.log(np.exp(kept).sum())


def draw(log_prob: np.ndarray, uniform: float, temperature: float) -> int:
    if not temperature:
        return int(log_prob.argmax())
    return int(min(np.searchsorted(np.exp(log_prob).cumsum(), uniform, side="right"), VOCABULARY - 1))


def rows_of(fed: Sequence[int], weights: float) -> np.ndarray:
    """[N, 2, 2] experts of the tokens that were fed: token and place say which, and the weights say another."""
    first = np.array([[[(3 * token + at + mixture) % 64] for mixture in (0, 1)] for at, token in enumerate(fed)])
    first = first.reshape(len(fed), 2, 1)
    return np.concatenate([first, (first + 1 + round(10 * weights)) % 64], -1).astype(np.int8)
