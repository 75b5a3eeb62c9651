"""AUC and calibration of weighted predictions, vectorised: from all rows, or from a histogram of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

DECILES = 10


def grouped_auc(score: Tensor, label: Tensor, weight: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Area under the ROC curve within each group; ties count one half.

    Args:
        score, label, weight: (n,), labels 0 or 1.
        group: (n,) integers.

    Returns:
        (g,) AUC of each group that has both classes, in the groups' order, and (g,) their total weights.
    """
    order = score.sort(stable=True).indices
    order = order[group[order].sort(stable=True).indices]
    score, label, weight, group = score[order], label[order], weight[order].double(), group[order]
    new_group = torch.ones_like(group, dtype=torch.bool)
    new_group[1:] = group[1:] != group[:-1]
    new_tie = new_group.clone()
    new_tie[1:] |= score[1:] != score[:-1]
    tie, groups = new_tie.cumsum(0) - 1, new_group.cumsum(0) - 1
    # Per run of equal scores within a group: weights of positives and of negatives.
    runs = torch.zeros(int(new_tie.sum()), 2, dtype=torch.float64)
    runs.index_add_(0, tie, torch.stack([label * weight, (1 - label) * weight], 1))
    run_group = groups[new_tie]
    totals = torch.zeros(int(new_group.sum()), 2, dtype=torch.float64).index_add_(0, run_group, runs)
    before = totals[:, 1].cumsum(0) - totals[:, 1]
    below = runs[:, 1].cumsum(0) - runs[:, 1] - before[run_group]
    pairs = torch.zeros(len(totals), dtype=torch.float64)
    pairs.index_add_(0, run_group, runs[:, 0] * (below + runs[:, 1] / 2))
    possible = totals.prod(1)
    defined = possible > 0
    return pairs[defined] / possible[defined], totals.sum(1)[defined]


def histogram_auc(positive: Tensor, negative: Tensor) -> tuple[float, float] | None:
    """AUC of (bins,) weights in ascending order of score, and the most by which it can be wrong.

    Rows of one bin count as ties, so the error is at most half of the share of pairs that fall into one bin.
    """
    possible = float(positive.sum() * negative.sum())
    if possible <= 0:
        return None
    below = negative.cumsum(0) - negative
    pairs = float((positive * (below + negative / 2)).sum())
    return pairs / possible, float((positive * negative).sum()) / 2 / possible


def deciles(weight: Tensor, label: Tensor, prediction: Tensor) -> list[tuple[float, float]]:
    """Observed rate and mean prediction in ten equal shares of the weight, for (n,) sums in ascending order of score.

    An item that straddles a border goes to the share in which its middle lies; a share without items gives NaN.
    """
    middle = weight.cumsum(0) - weight / 2
    share = (middle * (DECILES / weight.sum())).long().clamp_(0, DECILES - 1)
    sums = torch.zeros(DECILES, 3, dtype=torch.float64)
    sums.index_add_(0, share, torch.stack([weight, label, prediction], 1).double())
    return [(y / w, p / w) if w else (math.nan, math.nan) for w, y, p in sums.tolist()]
