"""The cache and attention ops as torch ops `funcllm::write_kv` and `funcllm::attend`: opaque to the compiler.

Schemas carry counts as tensor sizes only; scale, window, softcap and the prefill back end are static facts of a model.
`attend` finds its counters at zero and leaves them so, hence they do not count as written; early is decode_attention's.
fast.py wraps them and refuses transforms before it gets here. Triton is imported at the first CUDA call.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor
from torch.library import Library, register_fake

from funcllm.kernels import cpu

LIBRARY = Library("funcllm", "FRAGMENT")
TRITON, FLASH = "triton", "flash-attn-4"  # the prefill back ends
FLASH_TOKENS = 512  # packed prompt tokens of a step, padding included, from which FLASH is not TRITON

LIBRARY.define("write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()")
LIBRARY.define(
    "attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? decode_table, Tensor? decode_lens, Tensor? chunk_table, "
    "Tensor? chunk_lens, Tensor? chunk_starts, Tensor? chunk_span, Tensor? sinks, float scale, int window, "
    "float softcap, str prefill, Tensor? counters=None, bool early=False) -> Tensor"
)


def _write_cpu(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    cpu.write_kv(k, v, k_cache, v_cache, slots)


def _write_cuda(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    _triton()[0].write_kv(_dense_in_token(k), _dense_in_token(v), k_cache, v_cache, slots)


def _write_fake(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    return None


def attend_cpu(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    decode_table: Tensor | None,
    decode_lens: Tensor | None,
    chunk_table: Tensor | None,
    chunk_lens: Tensor | None,
    chunk_starts: Tensor | None,
    chunk_span: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    prefill: str,
    counters: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """What the op does on the CPU."""
    out = torch.empty(q.shape, dtype=q.dtype)
    batch = 0 if decode_table is None else decode_table.shape[0]
    if decode_table is not None and decode_lens is not None:
        cpu.attend_decode(
            q[:batch],
            k_cache,
            v_cache,
            decode_table,
            decode_lens,
            out[:batch],
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_n=sinks,
        )
    if chunk_table is not None and chunk_lens is not None and chunk_starts is not None:
        cpu.attend_chunks(
            q[batch:],
            k_cache,
            v_cache,
            chunk_table,
            chunk_lens,
            chunk_starts,
            out[batch:],
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_n=sinks,
        )
    else:
        out[batch:] = 0.0
    return out


def _attend_cuda(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    decode_table: Tensor | None,
    decode_lens: Tensor | None,
    chunk_table: Tensor | None,
    chunk_lens: Tensor | None,
    chunk_starts: Tensor | None,
    chunk_span: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    prefill: str,
    counters: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    _, decode, chunks = _triton()
    q = _dense_in_token(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    batch = 0 if decode_table is None else decode_table.shape[0]
    if decode_table is not None and decode_lens is not None:
        decode.decode_attention(
            q[:batch],
            k_cache,
            v_cache,
            decode_table,
            decode_lens,
            out[:batch],
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_n=sinks,
            counters_bk=counters,
            early=early,
        )
    if batch == q.shape[0]:
        return out
    if chunk_table is None or chunk_lens is None or chunk_starts is None:
        out[batch:].zero_()
    elif prefill == FLASH and q.shape[0] - batch >= FLASH_TOKENS:
        chunks.flash_prefill(
            q[batch:],
            k_cache,
            v_cache,
            chunk_table,
            chunk_lens,
            chunk_starts,
            q.shape[0] if chunk_span is None else chunk_span.shape[0],
            out[batch:],
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_n=sinks,
        )
    else:
        chunks.prefill_attention(
            q[batch:],
            k_cache,
            v_cache,
            chunk_table,
            chunk_lens,
            chunk_starts,
            out[batch:],
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_n=sinks,
        )
    return out


def _attend_fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    decode_table: Tensor | None,
    decode_lens: Tensor | None,
    chunk_table: Tensor | None,
    chunk_lens: Tensor | None,
    chunk_starts: Tensor | None,
    chunk_span: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    prefill: str,
    counters: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    return q.new_empty(q.shape)


def _dense_in_token(x_tnh: Tensor) -> Tensor:
    """The same values, contiguous within a token (a slice of a packed projection is so already)."""
    head_dim = x_tnh.shape[2]
    dense = x_tnh.stride(2) == 1 and (x_tnh.shape[1] == 1 or x_tnh.stride(1) == head_dim)
    return x_tnh if dense else x_tnh.contiguous()


@functools.cache
def _triton() -> tuple[ModuleType, ModuleType, ModuleType]:
    from funcllm.kernels import attention_decode, attention_prefill, kv

    return kv, attention_decode, attention_prefill


LIBRARY.impl("write_kv", _write_cpu, "CPU")
LIBRARY.impl("write_kv", _write_cuda, "CUDA")
register_fake("funcllm::write_kv", _write_fake, lib=LIBRARY)
LIBRARY.impl("attend", attend_cpu, "CPU")
LIBRARY.impl("attend", _attend_cuda, "CUDA")
register_fake("funcllm::attend", _attend_fake, lib=LIBRARY)
