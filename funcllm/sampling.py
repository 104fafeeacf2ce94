"""The sampler as a pure function of (logits, sampling inputs, seed, position).

The noise of a token is a function of (seed, position, vocabulary id) alone, so that a request draws the same tokens in
any batch, in any chunking, after preemption and at any tensor-parallel size. Each rank takes the winner of its shard of
the vocabulary; the ranks exchange one 64-bit key a row. Filters become one threshold a row.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from funcllm.group import all_reduce, all_reduce_max
from funcllm.kernels.reference import forbid
from funcllm.kernels.sampler import identity, threshold
from funcllm.layers import vocab_ids
from funcllm.types import Context, Filters, SamplingInputs


def sample(logits_lv: Tensor, context: Context, /) -> tuple[Tensor, dict[str, Tensor]]:
    """(token_ids_l int32, {}) from this rank's fp32 logits; -1 where a row's logits hold NaN.

    Temperature 0 is the argmax, and the lowest id wins a tie. Else: temperature, then top-k, then top-p over what top-k
    left, then min-p; and the Gumbel-max choice among the rest.
    """
    sampling = context.inputs.sampling
    assert isinstance(sampling, SamplingInputs), "a step without sampling inputs cannot sample"
    first_id, num_ids = vocab_ids(context)
    keys_l2 = sampling.noise_keys_l2
    if not isinstance(keys_l2, Tensor):
        keys_l2 = context.kernels.noise_keys(sampling.seed_l, sampling.positions_l)
    threshold_l: Tensor | tuple[()] = ()
    forbidden: dict[str, Tensor] = {}
    if isinstance(sampling.filters, Filters):
        filters = sampling.filters
        is_alone = context.group.size == 1
        threshold_l = threshold(
            logits_lv,
            sampling.temperature_l,
            filters.top_k_l,
            filters.top_p_l,
            filters.min_p_l,
            first_id,
            num_ids,
            identity if is_alone else partial(all_reduce, group=context.group),
            identity if is_alone else partial(all_reduce_max, group=context.group),
            filters.forbidden_ls,
        )
        forbidden = {"forbidden_ls": filters.forbidden_ls}
    key_l = context.kernels.pick(
        logits_lv, sampling.temperature_l, keys_l2, threshold_l, first_id, num_ids, **forbidden
    )
    return context.kernels.token_of(all_reduce_max(key_l, context.group)), {}


__all__ = ["forbid", "sample"]
