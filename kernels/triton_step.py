"""Triton kernels around a step: what it reads out of the state rows, and what it writes back. One launch each.

They are the twins of `inputs_of` (pure decode) and `advance` in funcllm/state.py, equal to them in every bit. All that
they read and write lies on the device, so that they may be captured.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcllm.kernels.cpu_step import DecodeStep, StateFilters
from funcllm.kernels.triton_sampler import philox_words

_TABLE_BLOCK = 1024
_COUNTERS = 32  # KV heads that have a counter, of every row
_ADVANCE_BLOCK = 512  # rows that the one program of `advance` takes at a time


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
    """What a step with one query a row reads, from state rows on the device; dead rows act as row 0.

    Tensors are contiguous, with the types of SequenceState; filters: the columns that narrow the choice of a token,
    stop ids last, or () where no row asks. Block tables are copied whole. The noise keys are reference.noise_keys of
    seed and length.
    """
    num_rows, width = decode_rows_b.shape[0], block_table_rm.shape[1]

    def empty(dtype: torch.dtype, *tail: int) -> Tensor:
        return torch.empty((num_rows, *tail), dtype=dtype, device=decode_rows_b.device)

    i32, i64, f32 = torch.int32, torch.int64, torch.float32
    num_stops = filters[-1].shape[1] if filters else 0
    step = DecodeStep(
        rows_b=empty(i32),
        token_ids_b=empty(i32),
        positions_b=empty(i32),
        slots_b=empty(i64),
        prompt_lens_b=empty(i32),
        query_lens_b=empty(i32),
        logit_tokens_b=empty(i64),
        samples_b=empty(torch.bool),
        block_table_bm=empty(i32, width),
        kv_lens_b=empty(i32),
        temperature_b=empty(f32),
        seed_b=empty(i64),
        lengths_b=empty(i32),
        noise_keys_b2=empty(i64, 2),
        filters=(empty(i32), empty(f32), empty(f32), empty(i32, num_stops)) if filters else (),
        counters_bk=empty(i32, _COUNTERS),
    )
    if num_rows == 0:
        return step
    unused = (temperature_r,)
    _decode_inputs_kernel[(num_rows,)](
        decode_rows_b,
        token_ids_re,
        length_r,
        computed_r,
        prompt_length_r,
        alive_r.view(torch.uint8),
        block_table_rm,
        temperature_r,
        seed_r,
        *(filters or unused * 5),
        *step[:7],
        step.samples_b.view(torch.uint8),
        *step[8:14],
        *(step.filters or unused * 4),
        step.counters_bk,
        token_ids_re.shape[1],
        width,
        block_size,
        **decode_constants(num_stops),
        num_warps=4,
    )
    return step


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
    *,
    ring: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Writes what a step sampled into the state rows and into the next slot of a ring; (count int32, alive bool) [b].

    No row but 0 stands twice in rows_b; row 0 is never written. ring: the slots, int32 [slots, rows, 3] of (token,
    count, alive), and how many slots have been written since the start, int64 [1], which is moved on by 1.
    """
    slots_xb3, written_1 = ring
    num_rows = rows_b.shape[0]
    assert num_rows <= slots_xb3.shape[1], (num_rows, slots_xb3.shape)
    count_b = torch.empty(num_rows, dtype=torch.int32, device=rows_b.device)
    alive_b = torch.empty(num_rows, dtype=torch.bool, device=rows_b.device)
    _advance_kernel[(1,)](
        rows_b,
        query_lens_b,
        samples_b.view(torch.uint8),
        token_ids_b.contiguous(),
        token_ids_re,
        length_r,
        computed_r,
        limit_r,
        alive_r.view(torch.uint8),
        min_length_r,
        stop_ids_rs,
        count_b,
        alive_b.view(torch.uint8),
        slots_xb3,
        written_1,
        num_rows,
        token_ids_re.shape[1],
        slots_xb3.shape[0],
        slots_xb3.shape[1],
        NUM_STOPS=stop_ids_rs.shape[1],
        BLOCK=_ADVANCE_BLOCK,
        num_warps=8,
    )
    return count_b, alive_b


def decode_constants(num_stops: int) -> dict[str, Any]:
    """The compile-time arguments of the inputs' kernel; num_stops: 0 without filters."""
    padded = max(1, triton.next_power_of_2(num_stops))
    return {"NUM_STOPS": num_stops, "PADDED_STOPS": padded, "BLOCK": _TABLE_BLOCK, "COUNTERS": _COUNTERS}


# --- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_inputs_kernel(
    decode_rows_ptr,
    token_ids_re_ptr,
    length_r_ptr,
    computed_r_ptr,
    prompt_length_r_ptr,
    alive_r_ptr,
    block_table_rm_ptr,
    temperature_r_ptr,
    seed_r_ptr,
    top_k_r_ptr,
    top_p_r_ptr,
    min_p_r_ptr,
    min_length_r_ptr,
    stop_ids_rs_ptr,
    rows_ptr,
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    prompt_lens_ptr,
    query_lens_ptr,
    logit_tokens_ptr,
    samples_ptr,
    block_table_ptr,
    kv_lens_ptr,
    temperature_ptr,
    seed_ptr,
    lengths_ptr,
    noise_keys_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    forbidden_ptr,
    counters_ptr,
    capacity,
    width,
    block_size,
    NUM_STOPS: tl.constexpr,
    PADDED_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTERS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(decode_rows_ptr + index)
    row = tl.where(tl.load(alive_r_ptr + row) != 0, row, 0)
    wide = row.to(tl.int64)
    position = tl.load(computed_r_ptr + row)
    length = tl.load(length_r_ptr + row)
    seed = tl.load(seed_r_ptr + row)
    temperature = tl.load(temperature_r_ptr + row)
    prompt_length = tl.load(prompt_length_r_ptr + row)
    table_row_ptr = block_table_rm_ptr + wide * width
    token = tl.load(token_ids_re_ptr + wide * capacity + position)
    block = tl.load(table_row_ptr + position // block_size).to(tl.int64)

    at = tl.arange(0, BLOCK)
    for start in range(0, width, BLOCK):
        inside = start + at < width
        blocks = tl.load(table_row_ptr + start + at, mask=inside)
        tl.store(block_table_ptr + index * width + start + at, blocks, mask=inside)

    tl.store(counters_ptr + index * COUNTERS + tl.arange(0, COUNTERS), tl.zeros([COUNTERS], tl.int32))
    is_live = row > 0
    tl.store(rows_ptr + index, row)
    tl.store(token_ids_ptr + index, token)
    tl.store(positions_ptr + index, position)
    tl.store(slots_ptr + index, block * block_size + position % block_size)
    tl.store(prompt_lens_ptr + index, prompt_length)
    tl.store(query_lens_ptr + index, is_live.to(tl.int32))
    tl.store(logit_tokens_ptr + index, index)
    tl.store(samples_ptr + index, (is_live & (position + 1 == length)).to(tl.uint8))
    tl.store(kv_lens_ptr + index, position + 1)
    tl.store(temperature_ptr + index, temperature)
    tl.store(seed_ptr + index, seed)
    tl.store(lengths_ptr + index, length)
    first, second = philox_words(seed, length)
    tl.store(noise_keys_ptr + index * 2, first)
    tl.store(noise_keys_ptr + index * 2 + 1, second)
    if NUM_STOPS > 0:
        tl.store(top_k_ptr + index, tl.load(top_k_r_ptr + row))
        tl.store(top_p_ptr + index, tl.load(top_p_r_ptr + row))
        tl.store(min_p_ptr + index, tl.load(min_p_r_ptr + row))
        stop = tl.arange(0, PADDED_STOPS)
        ids = tl.load(stop_ids_rs_ptr + wide * NUM_STOPS + stop, mask=stop < NUM_STOPS, other=-1)
        is_early = length < tl.load(min_length_r_ptr + row)
        tl.store(forbidden_ptr + index * NUM_STOPS + stop, tl.where(is_early, ids, -1), mask=stop < NUM_STOPS)


@triton.jit(do_not_specialize=["num_rows", "ring_rows"])
def _advance_kernel(
    rows_ptr,
    query_lens_ptr,
    samples_ptr,
    token_ids_ptr,
    token_ids_re_ptr,
    length_r_ptr,
    computed_r_ptr,
    limit_r_ptr,
    alive_r_ptr,
    min_length_r_ptr,
    stop_ids_rs_ptr,
    count_ptr,
    alive_ptr,
    ring_ptr,
    written_ptr,
    num_rows,
    capacity,
    ring_slots,
    ring_rows,
    NUM_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program, so that the slot is read and moved on once.
    slot = tl.atomic_add(written_ptr, 1) % ring_slots
    for start in range(0, num_rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_rows
        row = tl.load(rows_ptr + at, mask=inside, other=0)
        token = tl.load(token_ids_ptr + at, mask=inside, other=0)
        query_len = tl.load(query_lens_ptr + at, mask=inside, other=0)
        samples = tl.load(samples_ptr + at, mask=inside, other=0) != 0
        length = tl.load(length_r_ptr + row, mask=inside, other=0)
        computed = tl.load(computed_r_ptr + row, mask=inside, other=0)
        limit = tl.load(limit_r_ptr + row, mask=inside, other=0)
        min_length = tl.load(min_length_r_ptr + row, mask=inside, other=0)
        is_stop = token < 0
        for stop in tl.static_range(NUM_STOPS):
            stop_id = tl.load(stop_ids_rs_ptr + row.to(tl.int64) * NUM_STOPS + stop, mask=inside, other=-1)
            is_stop = is_stop | ((token == stop_id) & (length >= min_length))
        count = samples.to(tl.int32)
        ends = samples & (is_stop | (length + count >= limit))
        alive = ((row > 0) & (ends == 0)).to(tl.int32)

        live = inside & (row > 0)
        where = row.to(tl.int64) * capacity + length
        tl.store(token_ids_re_ptr + where, tl.maximum(token, 0), mask=live & samples)
        tl.store(length_r_ptr + row, length + count, mask=live)
        tl.store(computed_r_ptr + row, computed + query_len, mask=live)
        tl.store(alive_r_ptr + row, alive.to(tl.uint8), mask=live)
        tl.store(count_ptr + at, count, mask=inside)
        tl.store(alive_ptr + at, alive.to(tl.uint8), mask=inside)
        ring_at = ring_ptr + (slot * ring_rows + at) * 3
        tl.store(ring_at, token, mask=inside)
        tl.store(ring_at + 1, count, mask=inside)
        tl.store(ring_at + 2, alive, mask=inside)


# --- for the check without a GPU -------------------------------------------------------------------------------------


def compile_variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """(name, kernel, signature, constants, options) of production launches, to be compiled for sm_90 in tests."""
    return [
        ("inputs", _decode_inputs_kernel, _signature(_decode_inputs_kernel), decode_constants(0), {"num_warps": 4}),
        ("filtered", _decode_inputs_kernel, _signature(_decode_inputs_kernel), decode_constants(8), {"num_warps": 4}),
        (
            "advance",
            _advance_kernel,
            _signature(_advance_kernel),
            {"NUM_STOPS": 8, "BLOCK": _ADVANCE_BLOCK},
            {"num_warps": 8},
        ),
    ]


def _signature(kernel: Any) -> dict[str, str]:
    """The argument types of a kernel of this file, by its names."""
    words = {"*i64": ("seed", "slots", "logit_tokens", "noise_keys", "written"), "*u8": ("alive", "samples")}
    words["*fp32"] = ("temperature", "top_p", "min_p")
    types = {word: pointer for pointer, group in words.items() for word in group}
    signature = {}
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            stem = name.removesuffix("_ptr").removesuffix("_r")
            signature[name] = types.get(stem, "*i32")
        elif name.islower():
            signature[name] = "i32"
    return signature
