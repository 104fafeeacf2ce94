"""Gradients at tensor-parallel sizes above 1."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from funcllm.group import Group, all_reduce
from funcllm.specs import part_views, spec_leaves
from funcllm.types import Part, PyTree, Spec


def sync_grads(grads: PyTree, specs: PyTree, group: Group) -> PyTree:
    """The gradients of a loss that every rank computes in full, finished: equal to those at tp 1.

    The transpose of a sum over ranks is a sum over ranks, so what a rank gets by differentiating is, summed over the
    ranks that hold the same slice, tp times the gradient. Each part is therefore summed over its holders (all ranks, a
    few, or one) and divided by tp. `grads` and `specs` have the structure of this rank's parameters.
    """
    if group.size == 1:
        return grads
    leaves, structure = pytree.tree_flatten(grads)
    leaf_specs = spec_leaves(specs)
    if len(leaves) != len(leaf_specs):
        raise ValueError(f"{len(leaves)} gradients for {len(leaf_specs)} parameters; both trees must be of this rank")
    return pytree.tree_unflatten([_finish(g, s, group) for g, s in zip(leaves, leaf_specs)], structure)


def _finish(grad: Tensor, spec: Spec, group: Group) -> Tensor:
    summed = [_sum_holders(piece, part, group) for part, piece in part_views(spec, grad, group)]
    return (torch.stack(summed) if spec.stack else torch.cat(summed)) / group.size


def _sum_holders(grad: Tensor, part: Part, group: Group) -> Tensor:
    if part.owner is not None:
        return grad
    shards = 1 if part.axis is None else part.shards
    if shards == group.size:
        return grad
    if shards == 1:
        return all_reduce(grad, group)
    shard = group.rank * shards // group.size
    placed = torch.zeros((shards, *grad.shape), dtype=grad.dtype, device=grad.device)
    placed[shard] = grad
    return all_reduce(placed, group)[shard]
