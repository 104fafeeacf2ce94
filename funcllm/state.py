"""The device-resident state of all sequences: pure functions around `SequenceState`, which is donated.

A step is `inputs = inputs_of(state, ...)`, `outputs, cache = model.step(params, cache, inputs)`,
`state, outputs = advance(state, inputs, outputs)`: sampled tokens go into the state on the device, so the next step can
be launched before the host has read them. Row 0 is the trash row: dead rows and padding act as it, and it never
changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcllm.types import (
    MAX_STOP_IDS,
    ChunkRows,
    DecodeRows,
    Extra,
    Filters,
    SamplingInputs,
    SamplingState,
    SequenceState,
    StepInputs,
    StepOutputs,
)


class Admissions(NamedTuple):
    """Sequences that take a row in this step, with their tokens one after the other."""

    rows_a: Tensor
    length_a: Tensor
    computed_a: Tensor
    prompt_length_a: Tensor
    limit_a: Tensor
    sampling: SamplingState  # [a] and [a, MAX_STOP_IDS]
    token_ids_x: Tensor  # int32, of all admissions
    extras: dict[str, Tensor]  # [a, ...]


def init_state(
    num_rows: int,
    capacity: int,
    table_width: int,
    extras: Sequence[Extra] = (),
    device: torch.device | str = "cpu",
) -> SequenceState:
    """The empty state of `num_rows` rows (row 0 is trash) of up to `capacity` tokens and `table_width` blocks each."""

    def full(value: float, dtype: torch.dtype, *tail: int) -> Tensor:
        return torch.full((num_rows, *tail), value, dtype=dtype, device=device)

    def extra_rows(extra: Extra) -> Tensor:
        value = torch.as_tensor(extra.default, dtype=extra.dtype, device=device)
        return value.expand(num_rows, *extra.shape).clone()

    i32, f32 = torch.int32, torch.float32
    return SequenceState(
        token_ids_re=full(0, i32, capacity),
        length_r=full(0, i32),
        computed_r=full(0, i32),
        prompt_length_r=full(0, i32),
        limit_r=full(0, i32),
        alive_r=full(0, torch.bool),
        block_table_rm=full(0, i32, table_width),
        sampling=SamplingState(
            temperature_r=full(0, f32),
            top_k_r=full(0, i32),
            top_p_r=full(1, f32),
            min_p_r=full(0, f32),
            seed_r=full(0, torch.int64),
            min_length_r=full(0, i32),
            stop_ids_rs=full(-1, i32, MAX_STOP_IDS),
        ),
        extras={extra.name: extra_rows(extra) for extra in extras},
    )


def apply_edits(
    state: SequenceState, admissions: Admissions | tuple[()] = (), appends_x3: Tensor | tuple[()] = ()
) -> SequenceState:
    """The state with new rows and with blocks appended (state row, index in its table, block), in place."""
    if isinstance(admissions, Admissions):
        _admit(state, admissions)
    if isinstance(appends_x3, Tensor):
        row_x, index_x, block_x = appends_x3.long().unbind(1)
        state.block_table_rm[row_x, index_x] = block_x.to(torch.int32)
    return state


def inputs_of(
    state: SequenceState,
    decode_rows_b: Tensor,
    chunk_rows_c: Tensor | tuple[()] = (),
    chunk_lens_c: Tensor | tuple[()] = (),
    *,
    num_tokens: int,
    block_size: int,
    span: int = 0,
    filtered: bool = False,
    capturing: bool = False,
    decode_inputs: Callable[..., Any] | None = None,
) -> StepInputs:
    """The inputs of a step over these state rows, made on the device.

    Decode rows get one query each, chunk rows chunk_lens_c; both are padded with row 0. num_tokens: packed tokens with
    padding, at least the decode rows and all chunks; span: at least the longest chunk. filtered: whether any row
    narrows its choice of tokens; capturing: whether sites record (the tokens whose logits are taken).
    decode_inputs: the kernel that makes a pure decode step's inputs (Kernels.decode_inputs), the same in every bit;
    None: plain PyTorch.
    """
    if decode_inputs is not None and not isinstance(chunk_rows_c, Tensor):
        return _decode_inputs(decode_inputs, state, decode_rows_b, block_size, filtered, capturing)
    rows_b = _live(state, decode_rows_b)
    num_decode = rows_b.shape[0]
    index_b = torch.arange(num_decode, device=rows_b.device)
    rows_t, lens_b, last_b = rows_b, (rows_b > 0).to(torch.int32), index_b
    offset_t = torch.zeros_like(rows_t)
    chunks: ChunkRows | tuple[()] = ()
    if isinstance(chunk_rows_c, Tensor) and isinstance(chunk_lens_c, Tensor):
        rows_c = _live(state, chunk_rows_c)
        lens_c = torch.where(rows_c > 0, chunk_lens_c, 0)
        ends_c = lens_c.cumsum(0, dtype=torch.int32)
        starts_c1 = torch.nn.functional.pad(ends_c, (1, 0))
        index_x = torch.arange(num_tokens - num_decode, device=rows_b.device, dtype=torch.int32)
        chunk_x = torch.searchsorted(ends_c, index_x, right=True)
        inside_x = chunk_x < rows_c.shape[0]
        chunk_x = chunk_x.clamp(max=rows_c.shape[0] - 1)
        rows_t = torch.cat([rows_t, torch.where(inside_x, rows_c[chunk_x], 0)])
        offset_t = torch.cat([offset_t, torch.where(inside_x, index_x - starts_c1[chunk_x], 0)])
        rows_b, lens_b = torch.cat([rows_b, rows_c]), torch.cat([lens_b, lens_c])
        last_b = torch.cat([last_b, (num_decode + ends_c - 1).clamp(min=0, max=num_tokens - 1).long()])
        chunks = ChunkRows(
            block_table_cm=state.block_table_rm[rows_c],
            kv_lens_c=torch.where(lens_c > 0, state.computed_r[rows_c] + lens_c, 0),
            query_starts_c1=starts_c1,
            span_q=torch.empty(1, dtype=torch.uint8, device=rows_b.device).expand(span),
        )
    positions_t = state.computed_r[rows_t] + offset_t
    block_t = state.block_table_rm[rows_t, (positions_t // block_size).long()]
    decode_rows = rows_b[:num_decode]
    return StepInputs(
        token_ids_t=state.token_ids_re[rows_t, positions_t.long()],
        positions_t=positions_t,
        slots_t=block_t.long() * block_size + positions_t % block_size,
        rows_t=rows_t,
        rows_b=rows_b,
        prompt_lens_b=state.prompt_length_r[rows_b],
        query_lens_b=lens_b,
        logit_tokens_l=last_b,
        samples_l=(rows_b > 0) & (lens_b > 0) & (state.computed_r[rows_b] + lens_b == state.length_r[rows_b]),
        decode=DecodeRows(state.block_table_rm[decode_rows], state.computed_r[decode_rows] + 1),
        chunks=chunks,
        sampling=_sampling_inputs(state, rows_b, filtered),
        capture_tokens_k=last_b if capturing else (),
        extras=state.extras,
    )


def advance(
    state: SequenceState,
    inputs: StepInputs,
    outputs: StepOutputs,
    *,
    advance_rows: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> tuple[SequenceState, StepOutputs]:
    """The state after the step, in place, and the outputs with what became of each row.

    A row that sampled takes its token. It dies when that is one of its stop ids at a length of at least its min_length,
    when its length reaches its limit, or when its logits held NaN (token -1). A row that did not sample keeps its
    extras. advance_rows: the kernel that does this (Kernels.advance with its ring bound), all but the extras, the same
    in every bit; None: plain PyTorch.
    """
    advance_rows = _advance_rows if advance_rows is None else advance_rows
    count_b, alive_b = advance_rows(
        inputs.rows_b,
        inputs.query_lens_b,
        inputs.samples_l,
        outputs.token_ids_l,
        state.token_ids_re,
        state.length_r,
        state.computed_r,
        state.limit_r,
        state.alive_r,
        state.sampling.min_length_r,
        state.sampling.stop_ids_rs,
    )
    _keep_extras(state, inputs, outputs)
    return state, outputs._replace(count_l=count_b, alive_l=alive_b)


def _advance_rows(
    rows_b: Tensor,
    query_lens_b: Tensor,
    counts_b: Tensor,
    token_b: Tensor,
    token_ids_re: Tensor,
    length_r: Tensor,
    computed_r: Tensor,
    limit_r: Tensor,
    alive_r: Tensor,
    min_length_r: Tensor,
    stop_ids_rs: Tensor,
) -> tuple[Tensor, Tensor]:
    rows_b = rows_b.long()
    length_b = length_r[rows_b]
    where_b = torch.where(counts_b, length_b, 0).long()
    token_ids_re[torch.where(counts_b, rows_b, 0), where_b] = torch.where(counts_b, token_b.clamp(min=0), 0)
    is_stop_b = (token_b[:, None] == stop_ids_rs[rows_b]).any(1) & (length_b >= min_length_r[rows_b])
    count_b = counts_b.to(torch.int32)
    new_length_b = length_b + count_b
    ends_b = counts_b & (is_stop_b | (token_b < 0) | (new_length_b >= limit_r[rows_b]))
    alive_b = (rows_b > 0) & ~ends_b
    computed_r[rows_b] = computed_r[rows_b] + query_lens_b
    length_r[rows_b] = new_length_b
    alive_r[rows_b] = alive_b
    return count_b, alive_b


def _keep_extras(state: SequenceState, inputs: StepInputs, outputs: StepOutputs) -> None:
    """Writes the extras that the sampler changed into the rows that sampled."""
    rows_b = inputs.rows_b.long() if outputs.extras else inputs.rows_b
    for name, changed in outputs.extras.items():
        value_r = state.extras[name]
        kept_b = inputs.samples_l.view(-1, *(1,) * (value_r.dim() - 1))
        value_r[rows_b] = torch.where(kept_b, changed.to(value_r.dtype), value_r[rows_b])


def _live(state: SequenceState, rows: Tensor) -> Tensor:
    return torch.where(state.alive_r[rows.long()], rows, 0).to(torch.int32)


def _decode_inputs(
    decode_inputs: Callable[..., Any],
    state: SequenceState,
    decode_rows_b: Tensor,
    block_size: int,
    filtered: bool,
    capturing: bool,
) -> StepInputs:
    sampling = state.sampling
    columns = (sampling.top_k_r, sampling.top_p_r, sampling.min_p_r, sampling.min_length_r, sampling.stop_ids_rs)
    step = decode_inputs(
        decode_rows_b,
        state.token_ids_re,
        state.length_r,
        state.computed_r,
        state.prompt_length_r,
        state.alive_r,
        state.block_table_rm,
        sampling.temperature_r,
        sampling.seed_r,
        columns if filtered else (),
        block_size=block_size,
    )
    return StepInputs(
        token_ids_t=step.token_ids_b,
        positions_t=step.positions_b,
        slots_t=step.slots_b,
        rows_t=step.rows_b,
        rows_b=step.rows_b,
        prompt_lens_b=step.prompt_lens_b,
        query_lens_b=step.query_lens_b,
        logit_tokens_l=step.logit_tokens_b,
        samples_l=step.samples_b,
        decode=DecodeRows(step.block_table_bm, step.kv_lens_b, step.counters_bk),
        chunks=(),
        sampling=SamplingInputs(
            temperature_l=step.temperature_b,
            seed_l=step.seed_b,
            positions_l=step.lengths_b,
            filters=Filters(*step.filters) if filtered else (),
            noise_keys_l2=step.noise_keys_b2,
        ),
        capture_tokens_k=step.logit_tokens_b if capturing else (),
        extras=state.extras,
    )


def _sampling_inputs(state: SequenceState, rows_b: Tensor, filtered: bool) -> SamplingInputs:
    sampling, length_b = state.sampling, state.length_r[rows_b]
    filters: Filters | tuple[()] = ()
    if filtered:
        early_b = length_b < sampling.min_length_r[rows_b]
        filters = Filters(
            top_k_l=sampling.top_k_r[rows_b],
            top_p_l=sampling.top_p_r[rows_b],
            min_p_l=sampling.min_p_r[rows_b],
            forbidden_ls=torch.where(early_b[:, None], sampling.stop_ids_rs[rows_b], -1),
        )
    return SamplingInputs(sampling.temperature_r[rows_b], sampling.seed_r[rows_b], length_b, filters)


def _admit(state: SequenceState, admissions: Admissions) -> None:
    rows_a = admissions.rows_a.long()
    state.length_r[rows_a] = admissions.length_a
    state.computed_r[rows_a] = admissions.computed_a
    state.prompt_length_r[rows_a] = admissions.prompt_length_a
    state.limit_r[rows_a] = admissions.limit_a
    state.alive_r[rows_a] = rows_a > 0
    state.block_table_rm[rows_a] = 0
    for target_r, value_a in zip(state.sampling, admissions.sampling):
        if isinstance(target_r, Tensor):
            target_r[rows_a] = value_a
    for name, value_a in admissions.extras.items():
        state.extras[name][rows_a] = value_a
    ends_a = admissions.length_a.cumsum(0)
    index_x = torch.arange(admissions.token_ids_x.shape[0], device=ends_a.device)
    owner_x = torch.searchsorted(ends_a, index_x, right=True)
    offset_x = index_x - (ends_a - admissions.length_a)[owner_x]
    state.token_ids_re[rows_a[owner_x], offset_x] = admissions.token_ids_x
