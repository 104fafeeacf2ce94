"""What a decode step reads out of the state rows and what it writes back, on the CPU: NumPy over the tensors' memory.

The twins of `inputs_of` (pure decode) and `advance` in funcllm/state.py, equal to them in every bit. On a handful of
rows a NumPy call takes a fraction of a torch call's time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# top_k_r, top_p_r, min_p_r, min_length_r, stop_ids_rs
StateFilters = tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | tuple[()]
RowFilters = tuple[Tensor, Tensor, Tensor, Tensor] | tuple[()]  # top_k, top_p, min_p, forbidden
Array = npt.NDArray[Any]

_ROUNDS = np.arange(10, dtype=np.uint64)[:, None, None]
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_MASK32, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


class DecodeStep(NamedTuple):
    """The inputs of a pure decode step: one token a row, so that t = l = b. Names and types as in StepInputs."""

    rows_b: Tensor
    token_ids_b: Tensor
    positions_b: Tensor
    slots_b: Tensor
    prompt_lens_b: Tensor
    query_lens_b: Tensor
    logit_tokens_b: Tensor
    samples_b: Tensor
    block_table_bm: Tensor
    kv_lens_b: Tensor
    temperature_b: Tensor
    seed_b: Tensor
    lengths_b: Tensor
    noise_keys_b2: Tensor
    filters: RowFilters
    counters_bk: Tensor | tuple[()] = ()


def decode_inputs(
    decode_rows_b: Tensor,
    token_ids_re: Tensor,
    length_r: Tensor,
    computed_r: Tensor,
    prompt_length_r: Tensor,
    alive_r: Tensor,
    block_table_rm: Tensor,
    temperature_r: Tensor,
    seed_r: Tensor,
    filters: StateFilters = (),
    *,
    block_size: int,
) -> DecodeStep:
    """triton_step.decode_inputs."""
    rows_b = decode_rows_b.numpy()
    rows_b = np.where(alive_r.numpy()[rows_b], rows_b, np.int32(0))
    is_live_b = rows_b > 0
    length_b, computed_b, seed_b = length_r.numpy()[rows_b], computed_r.numpy()[rows_b], seed_r.numpy()[rows_b]
    block_b = block_table_rm.numpy()[rows_b, computed_b // block_size]
    tensor = torch.from_numpy
    return DecodeStep(
        rows_b=tensor(rows_b),
        token_ids_b=tensor(token_ids_re.numpy()[rows_b, computed_b]),
        positions_b=tensor(computed_b),
        slots_b=tensor(block_b.astype(np.int64) * block_size + computed_b % block_size),
        prompt_lens_b=tensor(prompt_length_r.numpy()[rows_b]),
        query_lens_b=tensor(is_live_b.astype(np.int32)),
        logit_tokens_b=tensor(np.arange(len(rows_b), dtype=np.int64)),
        samples_b=tensor(is_live_b & (computed_b + 1 == length_b)),
        block_table_bm=tensor(block_table_rm.numpy()[rows_b]),
        kv_lens_b=tensor(computed_b + np.int32(1)),
        temperature_b=tensor(temperature_r.numpy()[rows_b]),
        seed_b=tensor(seed_b),
        lengths_b=tensor(length_b),
        noise_keys_b2=tensor(noise_keys(seed_b, length_b)),
        filters=_filters(rows_b, length_b, filters),
    )


def _filters(
    rows_b: Array, length_b: Array, filters: StateFilters
) -> tuple[Tensor, Tensor, Tensor, Tensor] | tuple[()]:
    if not filters:
        return ()
    top_k_b, top_p_b, min_p_b, min_length_b, stop_ids_bs = (column.numpy()[rows_b] for column in filters)
    forbidden_bs = np.where((length_b < min_length_b)[:, None], stop_ids_bs, np.int32(-1))
    top_k, top_p, min_p, forbidden = map(torch.from_numpy, (top_k_b, top_p_b, min_p_b, forbidden_bs))
    return top_k, top_p, min_p, forbidden


def noise_keys(seed_b: Array, position_b: Array) -> Array:
    """reference.noise_keys: counters 0 and 2 of each round together, then 1 and 3."""
    seed_b = seed_b.view(np.uint64)
    keys_x2b = (np.stack([seed_b & _MASK32, seed_b >> _HALF]) + _ROUNDS * _WEYL) & _MASK32
    even_2b, odd_2b = np.zeros((2, len(seed_b)), np.uint64), np.uint64(0)
    even_2b[0] = position_b.view(np.uint32)
    for key_2b in keys_x2b:
        product_2b = even_2b * _MULTIPLIERS
        even_2b, odd_2b = (product_2b >> _HALF)[::-1] ^ odd_2b ^ key_2b, (product_2b & _MASK32)[::-1]
    return np.stack([even_2b[0], odd_2b[0]], axis=1).view(np.int64)


def advance(
    rows_b: Tensor,
    query_lens_b: Tensor,
    samples_b: Tensor,
    token_ids_b: Tensor,
    token_ids_re: Tensor,
    length_r: Tensor,
    computed_r: Tensor,
    limit_r: Tensor,
    alive_r: Tensor,
    min_length_r: Tensor,
    stop_ids_rs: Tensor,
) -> tuple[Tensor, Tensor]:
    """Writes what a step sampled into the state rows; (count int32, alive bool) [b].

    No row but 0 stands twice in rows_b; row 0 does not change.
    """
    rows, samples, tokens = rows_b.numpy(), samples_b.numpy(), token_ids_b.numpy()
    length_b = length_r.numpy()[rows]
    token_ids_re.numpy()[rows[samples], length_b[samples]] = np.maximum(tokens[samples], 0)
    is_stop_b = (tokens[:, None] == stop_ids_rs.numpy()[rows]).any(1) & (length_b >= min_length_r.numpy()[rows])
    count_b = samples.astype(np.int32)
    new_length_b = length_b + count_b
    alive_b = (rows > 0) & ~(samples & (is_stop_b | (tokens < 0) | (new_length_b >= limit_r.numpy()[rows])))
    computed_r.numpy()[rows] += query_lens_b.numpy()
    length_r.numpy()[rows] = new_length_b
    alive_r.numpy()[rows] = alive_b
    return torch.from_numpy(count_b), torch.from_numpy(alive_b)
