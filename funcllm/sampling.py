"""The sampler as a pure function of (logits, sampling inputs, seed, position).

The noise of a token is a function of (seed, position, vocabulary id) alone, so that a request draws the same tokens in
any batch, in any chunking, after preemption and at any tensor-parallel size. Each rank takes the winner of its shard of
the vocabulary; the ranks exchange one 64-bit key a row. Filters become one threshold a row.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from funcllm.group import all_reduce, all_reduce_max
from funcllm.kernels import reference
from funcllm.kernels.sampler import threshold
from funcllm.layers import vocab_ids
from funcllm.types import Context, Filters


def sample(logits_lv: Tensor, context: Context, /) -> tuple[Tensor, dict[str, Tensor]]:
    """(token_ids_l int32, {}) from this rank's fp32 logits; -1 where a row's logits hold NaN.

    Temperature 0 is the argmax, and the lowest id wins a tie. Else: temperature, then top-k, then top-p over what top-k
    left, then min-p; and the Gumbel-max choice among the rest.
    """
    sampling = context.inputs.sampling
    assert sampling != (), "a step without sampling inputs cannot sample"
    first_id, num_ids = vocab_ids(context)
    keys_l2 = sampling.noise_keys_l2
    if not isinstance(keys_l2, Tensor):
        keys_l2 = reference.noise_keys(sampling.seed_l, sampling.positions_l)
    threshold_l: Tensor | tuple[()] = ()
    if isinstance(sampling.filters, Filters):
        logits_lv = forbid(logits_lv, sampling.filters.forbidden_ls, first_id)
        threshold_l = threshold(
            logits_lv,
            sampling.temperature_l,
            sampling.filters.top_k_l,
            sampling.filters.top_p_l,
            sampling.filters.min_p_l,
            first_id,
            num_ids,
            partial(all_reduce, group=context.group),
            partial(all_reduce_max, group=context.group),
        )
    key_l = context.kernels.pick(logits_lv, sampling.temperature_l, keys_l2, threshold_l, first_id, num_ids)
    return reference.token_of(all_reduce_max(key_l, context.group)), {}


def forbid(logits_lv: Tensor, forbidden_ls: Tensor, first_id: int) -> Tensor:
    """The logits with -inf at each row's forbidden ids; ids of other ranks and -1 are passed over."""
    num_columns = logits_lv.shape[1]
    local_ls = forbidden_ls.long() - first_id
    outside_ls = (forbidden_ls < 0) | (local_ls < 0) | (local_ls >= num_columns)
    padded_lv = torch.nn.functional.pad(logits_lv, (0, 1))
    where_ls = torch.where(outside_ls, num_columns, local_ls)
    return padded_lv.scatter(1, where_ls, float("-inf"))[:, :num_columns].contiguous()
