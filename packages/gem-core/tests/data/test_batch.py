"""Batches are pytrees of plain tensors."""

from __future__ import annotations

import numpy as np
import torch
from test_encode import assert_same
from test_loader import LOG
from torch.utils import _pytree as pytree

from gem_core.data.batch import Batch, Jagged


def batch(requests: int) -> Batch:
    return LOG.load("train").batch(np.arange(requests))


def test_requests_and_rows() -> None:
    assert batch(4).rows == 9 and batch(4).requests == 4


def test_jagged() -> None:
    ragged = Jagged(torch.arange(5), torch.tensor([0, 2, 2, 5]), 9)
    assert ragged.lengths().tolist() == [2, 0, 3] and len(ragged) == 3


def test_maps_over_its_tensors() -> None:
    whole = batch(3)
    assert_same(whole.to("cpu"), whole)
    doubled = whole.map(lambda t: t * 2)
    assert doubled.ids["tags"].max_length == whole.ids["tags"].max_length
    assert torch.equal(doubled.ids["tags"].values, whole.ids["tags"].values * 2)


def test_its_tree_can_be_written_and_read() -> None:
    leaves, tree = pytree.tree_flatten(batch(2))
    again = pytree.treespec_loads(pytree.treespec_dumps(tree))
    assert again == tree
    assert_same(pytree.tree_unflatten(leaves, again), batch(2))
