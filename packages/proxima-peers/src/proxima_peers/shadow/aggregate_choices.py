"""From the losses of tokens to one number: which mean, over what, and who counts. Each is a factor for each answer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from proxima.core.aggregate import (
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    SequenceMeanTokenSumNorm,
    TokenMean,
    TokenSum,
)
from proxima.data.policy_batch import PolicyBatch
from proxima_peers.shadow.choices import Convention
from proxima_peers.shadow.dump import Dump

MEAN = "mean"
OVER = "over"
EMPTY = "answers without a token"
DENOMINATOR = "counted"
TOKENS = "of the tokens"
TOKEN_MEANS = "of the answers' means"
TOKEN_SUMS = "of the answers' sums"
LONGEST_ALLOWED = "of the answers' sums, over the longest answer allowed"
PADDED_WIDTH = "of the answers' sums, over the padded width"
LONGEST_PRESENT = "of the answers' sums, over the longest answer there"
SUM = "none, the sum of the tokens"
BATCH = "the batch"
MICRO_MEAN = "a micro-batch, then the mean of the micro-batches"
MICRO_ROWS = "a micro-batch, then the micro-batches by their answers"
MICRO_SUM = "a micro-batch, then the sum of the micro-batches"
RANK_MEAN = "a rank, then the mean of the ranks"
RANK_SUM = "a rank, then the sum of the ranks"
BOTH_MEANS = "a micro-batch, then the mean of its rank's, then that of the ranks"
BOTH_SUM = "a micro-batch, then the sum of its rank's, then the mean of the ranks"
OUTSIDE = "the counts in the settings"
OUTSIDE_RANKS = "the counts in the settings, times the ranks"
EMPTY_IS = {False: "are not counted", True: "are counted"}
COUNTED = {"loss": "the tokens in the loss", "mask": "all tokens of the answers", "all": "all positions, padding too"}


@dataclass(frozen=True)
class Factors:
    """What each answer's sum is multiplied by, [B] float64, under a convention."""

    convention: Convention
    factor: Tensor


def stated_mean(dump: Dump) -> Convention:
    """What the stated aggregation says on these axes; an unknown one says nothing about the mean."""
    names: dict[type, str] = {
        TokenMean: TOKENS,
        SequenceMeanTokenMean: TOKEN_MEANS,
        SequenceMeanTokenSum: TOKEN_SUMS,
        SequenceMeanTokenSumNorm: LONGEST_ALLOWED,
        TokenSum: SUM,
    }
    mean = names.get(type(dump.settings.aggregate), "")
    return {MEAN: mean, OVER: BATCH, EMPTY: EMPTY_IS[False], DENOMINATOR: COUNTED["loss"]}


def count_masks(dump: Dump) -> dict[str, Tensor]:
    """The masks that a denominator may count, [B, T] bool, without those that equal an earlier one."""
    masks = {"loss": dump.loss_mask, "mask": dump["mask"], "all": torch.ones_like(dump["mask"])}
    different: dict[str, Tensor] = {}
    for name, mask in masks.items():
        if not any(bool((mask == other).all()) for other in different.values()):
            different[name] = mask
    return different


def factor_tables(dump: Dump, counted: str, mask: Tensor) -> Iterator[Factors]:
    """All conventions, where denominators count the positions of `mask` [B, T] bool."""
    begun = {DENOMINATOR: COUNTED[counted]}
    empty = ~mask.any(1)
    for mean, spec in _specs(dump, mask).items():
        for over, parts in _parts(dump).items():
            factor = torch.zeros(len(mask), dtype=torch.float64)
            more = factor.clone()  # empty answers counted
            for rows, share in parts:
                own = _factor(dump, spec, mask, rows)
                factor[rows] = share * own
                used = int((~empty[rows]).sum())
                more[rows] = share * own * (used / len(rows))
            of_answers = mean not in (TOKENS, SUM)
            chosen = begun | {MEAN: mean, OVER: over}
            if mean == SUM and over != BATCH:
                continue
            if of_answers:
                chosen[EMPTY] = EMPTY_IS[False]
            yield Factors(chosen, factor)
            if of_answers and bool(empty.any()):
                yield Factors(chosen | {EMPTY: EMPTY_IS[True]}, more)
    yield from _counted_outside(dump, mask, begun)


def _specs(dump: Dump, mask: Tensor) -> dict[str, Any]:
    specs: dict[str, Any] = {
        TOKENS: TokenMean(),
        TOKEN_MEANS: SequenceMeanTokenMean(),
        TOKEN_SUMS: SequenceMeanTokenSum(),
        SUM: TokenSum(),
    }
    given = dump.settings.aggregate
    longest = dump.settings.max_length
    if isinstance(given, SequenceMeanTokenSumNorm):
        specs[LONGEST_ALLOWED] = given
    elif longest:
        specs[LONGEST_ALLOWED] = SequenceMeanTokenSumNorm(longest)
    lengths = {PADDED_WIDTH: dump.shape[1], LONGEST_PRESENT: int(mask.sum(1).max())}
    specs |= {name: SequenceMeanTokenSumNorm(length) for name, length in lengths.items() if length}
    return specs


def _factor(dump: Dump, spec: Any, mask: Tensor, rows: Tensor) -> Tensor:
    """[rows] what the aggregation multiplies the sum of each of these answers by; 0 for one without a token."""
    part = mask[rows]
    leaf = torch.zeros(part.shape, dtype=torch.float64).flatten().requires_grad_()
    width = dump.shape[1]
    edges = torch.arange(len(rows) + 1) * width
    b = PolicyBatch(log_prob=leaf.detach(), loss_mask=part.flatten(), cu_seqlens=edges)
    (each,) = torch.autograd.grad(spec(leaf, b), leaf)
    denominator = float(spec.denominator(b.loss_mask, b.cu_seqlens)) or 1.0
    return each.view(part.shape).amax(1) / denominator


Parts = list[tuple[Tensor, float]]  # the rows of a part, and its share


def _parts(dump: Dump) -> dict[str, Parts]:
    """The parts over each of which a mean is taken, with their shares in the sum."""
    rows = dump.shape[0]
    every = torch.arange(rows)
    over: dict[str, Parts] = {BATCH: [(every, 1.0)]}
    if "micro_batch" in dump:
        micro = dump["micro_batch"]
    else:
        micro = torch.zeros(rows, dtype=torch.long)
    if "rank" in dump:
        rank = dump["rank"]
    else:
        rank = torch.zeros(rows, dtype=torch.long)
    both = torch.unique(torch.stack([rank, micro], 1), dim=0, return_inverse=True)[1]
    pieces = [every[both == label] for label in both.unique()]
    ranks = [every[rank == label] for label in rank.unique()]
    if len(pieces) > 1 and len(pieces) > len(ranks):
        over |= {
            MICRO_MEAN: [(piece, 1 / len(pieces)) for piece in pieces],
            MICRO_ROWS: [(piece, len(piece) / rows) for piece in pieces],
            MICRO_SUM: [(piece, 1.0) for piece in pieces],
        }
    if len(ranks) > 1:
        over |= {RANK_MEAN: [(part, 1 / len(ranks)) for part in ranks], RANK_SUM: [(part, 1.0) for part in ranks]}
        if len(pieces) > len(ranks):
            of_rank = {int(label): len(both[rank == label].unique()) for label in rank.unique()}
            shares = [(piece, of_rank[int(rank[piece[0]])]) for piece in pieces]
            over[BOTH_MEANS] = [(piece, 1 / len(ranks) / count) for piece, count in shares]
            over[BOTH_SUM] = [(piece, 1 / len(ranks)) for piece in pieces]
    return over


def _counted_outside(dump: Dump, mask: Tensor, begun: Convention) -> Iterator[Factors]:
    """Denominators that the settings give: of tokens, of answers."""
    given = dump.settings
    length = mask.sum(1).clamp(min=1).double()
    one = torch.ones_like(length)
    for over, ranks in ((OUTSIDE, 1), (OUTSIDE_RANKS, given.ranks)):
        if over == OUTSIDE_RANKS and ranks == 1:
            continue
        if given.tokens:
            yield Factors({**begun, MEAN: TOKENS, OVER: over}, one * ranks / given.tokens)
        if given.sequences:
            factors = {TOKEN_MEANS: one / length, TOKEN_SUMS: one, PADDED_WIDTH: one / dump.shape[1]}
            if given.max_length:
                factors[LONGEST_ALLOWED] = one / given.max_length
            for mean, factor in factors.items():
                yield Factors({**begun, MEAN: mean, OVER: over}, factor * ranks / given.sequences)
