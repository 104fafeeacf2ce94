"""The fast bundle's cache and attention functions: signatures and contracts of their twins in reference.py, in place.

They dispatch on the tensors' device, never by a global. They have no derivative and no batching rule, so they raise
under torch.func and where an input requires grad, instead of returning a wrong value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funcllm.kernels import cpu, ops
from funcllm.kernels.fused import refuse_transforms, runs_on_cpu
from funcllm.kernels.reference import ChunkTensors, DecodeTensors


def write_kv(
    k_tkh: Tensor, v_tkh: Tensor, k_cache_pskh: Tensor, v_cache_pskh: Tensor, slots_t: Tensor
) -> tuple[Tensor, Tensor]:
    """The caches passed in, with k and v written at the given slots."""
    refuse_transforms("write_kv", k_tkh, v_tkh)
    torch.ops.funcllm.write_kv.default(k_tkh, v_tkh, k_cache_pskh, v_cache_pskh, slots_t)
    return k_cache_pskh, v_cache_pskh


def attend(
    q_tnh: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    decode: DecodeTensors,
    chunks: ChunkTensors,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_n: Tensor | tuple[()] = (),
    early: bool = False,
) -> Tensor:
    """reference.attend by our own kernels; on CUDA the block size is a power of two >= 16."""
    options = (sinks_n, scale, window, softcap, ops.TRITON, early)
    return _attend(q_tnh, k_cache_pskh, v_cache_pskh, decode, chunks, *options)


def attend_flash(
    q_tnh: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    decode: DecodeTensors,
    chunks: ChunkTensors,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks_n: Tensor | tuple[()] = (),
    early: bool = False,
) -> Tensor:
    """As `attend`, chunks of FLASH_TOKENS packed tokens and more by flash-attn-4.

    It wants the unused slots of a sequence's last block to be finite. The choice is made inside the op, out of the
    compiler's sight: a compiled unit is one for all sizes.
    """
    options = (sinks_n, scale, window, softcap, ops.FLASH, early)
    return _attend(q_tnh, k_cache_pskh, v_cache_pskh, decode, chunks, *options)


def copy_slots(k_cache_pskh: Tensor, v_cache_pskh: Tensor, copies_n3: Tensor) -> None:
    """Copies the first slots of blocks within a layer's caches, in place, before a step.

    Rows are (source block, destination block, number of slots), int32, on the caches' device. No block is both a source
    and a destination, or a destination twice: the copies run at the same time.
    """
    if k_cache_pskh.device.type == "cpu":
        cpu.copy_slots(k_cache_pskh, v_cache_pskh, copies_n3)
        return
    from funcllm.kernels import kv

    kv.copy_slots(k_cache_pskh, v_cache_pskh, copies_n3)


def _attend(
    q_tnh: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    decode: DecodeTensors,
    chunks: ChunkTensors,
    sinks_n: Tensor | tuple[()],
    scale: float,
    window: int,
    softcap: float,
    prefill: str,
    early: bool,
) -> Tensor:
    refuse_transforms("attend", q_tnh, k_cache_pskh, v_cache_pskh, sinks_n)
    op: Callable[..., Tensor] = ops.attend_cpu if runs_on_cpu(q_tnh) else torch.ops.funcllm.attend.default
    return op(
        q_tnh,
        k_cache_pskh,
        v_cache_pskh,
        *(decode[:2] or (None, None)),
        *(chunks or (None, None, None, None)),
        sinks_n if isinstance(sinks_n, Tensor) else None,
        scale,
        window,
        softcap,
        prefill,
        decode[2] if len(decode) > 2 and isinstance(decode[2], Tensor) else None,
        early,
    )
