"""Bundles of kernels: which function does each op. A bundle is a static argument of a model, never a global switch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from funcllm.kernels import cpu_step, fast, fused, gemm, gemm_config, gemv, ops, reference


def _never(rows: int, out_features: int, in_features: int, silu: bool) -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One function an op, each with the signature and the contract of its twin in reference.py.

    decode_inputs, advance: the kernels before and after a step; None: plain PyTorch, as funcllm/state.py has it.
    in_place: whether the ops that write the cache do so in place (the caches returned are those passed in).
    fused: names of the fused blocks (funcllm/fusion.py) that may use these kernels. small_rows: up to how many decode
    rows a step counts as small. worth(rows, outputs, inputs, silu): whether ahead_linear is worth it for so many decode
    rows and these sizes. prefill, decode: the back ends in use, and why: for people, and part of the graph key.
    """

    name: str
    write_kv: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[..., Tensor]
    embed_rows: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
    rope_angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    qk_norm_rope_write: Callable[..., tuple[Tensor, Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    head_logits: Callable[[Tensor, Tensor], Tensor]
    noise_keys: Callable[[Tensor, Tensor], Tensor]
    pick: Callable[..., Tensor]
    token_of: Callable[[Tensor], Tensor]
    small_linear: Callable[..., Tensor]
    add_norm_small_linear: Callable[..., tuple[Tensor, Tensor]]
    ahead_linear: Callable[..., Tensor]
    decode_inputs: Callable[..., Any] | None = None
    advance: Callable[..., tuple[Tensor, Tensor]] | None = None
    in_place: bool = False
    fused: frozenset[str] = frozenset()
    small_rows: int = 0
    worth: Callable[[int, int, int, bool], bool] = _never
    prefill: str = "reference"
    decode: str = "reference"
    why: tuple[str, ...] = ()


REFERENCE = Kernels(
    name="reference",
    write_kv=reference.write_kv,
    attend=reference.attend,
    embed_rows=reference.embed_rows,
    rope_angles=reference.rope_angles,
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    qk_norm_rope_write=reference.qk_norm_rope_write,
    silu_mul=reference.silu_mul,
    head_logits=reference.head_logits,
    noise_keys=reference.noise_keys,
    pick=reference.pick,
    token_of=reference.token_of,
    small_linear=reference.small_linear,
    add_norm_small_linear=reference.add_norm_small_linear,
    ahead_linear=reference.small_linear,
)
"""The plain PyTorch twin of every kernel: out of place, good under torch.func, the oracle of the fast versions."""

FAST = Kernels(
    name="fast",
    write_kv=fast.write_kv,
    attend=fast.attend,
    embed_rows=fused.embed_rows,
    rope_angles=fused.rope_angles,
    rms_norm=fused.rms_norm,
    add_rms_norm=fused.add_rms_norm,
    qk_norm_rope_write=fused.qk_norm_rope_write,
    silu_mul=fused.silu_mul,
    head_logits=fused.head_logits,
    noise_keys=fused.noise_keys,
    pick=fused.pick,
    token_of=fused.token_of,
    small_linear=gemv.small_linear,
    add_norm_small_linear=gemv.add_norm_small_linear,
    ahead_linear=gemm.ahead_linear,
    in_place=True,
    fused=frozenset({"embed", "add_norm", "qk_norm_rope_write", "silu_mul"}),
    prefill=ops.TRITON,
    decode=ops.TRITON,
)
"""Ops that dispatch on the tensors' device: batched PyTorch on the CPU, Triton on CUDA. They refuse transforms."""


_CHAINED: dict[str, Any] = {
    "small_linear": partial(gemv.small_linear, pdl=True),
    "add_norm_small_linear": partial(gemv.add_norm_small_linear, pdl=True),
    "qk_norm_rope_write": partial(fused.qk_norm_rope_write, pdl=True),
}
"""Ops that may start by programmatic dependent launch (sm_90 and later; a product's configuration has the last word).
Each waits for its predecessor before it reads or writes anything but weights, so any kernel may stand before and behind
it."""

SMALL_BLOCKS = frozenset({"small_linear", "small_qkv", "small_mlp", "small_head"})
SMALL_ROWS = 8
AHEAD_BLOCKS = frozenset({"ahead_linear", "ahead_mlp"})


def fast_kernels(device: torch.device, head_dim: int, dtype: torch.dtype, block_size: int) -> Kernels:
    """The fast bundle with the best prefill back end for this device and model, and the reasons in `why`.

    Where that is flash-attn-4, it is found but not imported: `flash_fault` does so, and says whether it can be used.
    Raises ValueError for a block size that the CUDA kernels do not take, RuntimeError where Triton is missing.
    """
    if device.type != "cuda":
        why = (f"attention: batched PyTorch, since the device is {device.type}",)
        bundle = replace(FAST, decode_inputs=cpu_step.decode_inputs, advance=cpu_step.advance)
        bundle = replace(bundle, prefill="cpu", decode="cpu", why=why)
        if dtype != torch.float32:
            return bundle
        return replace(bundle, fused=FAST.fused | SMALL_BLOCKS, small_rows=SMALL_ROWS)
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"block_size={block_size} is not a power of two >= 16, as CUDA needs; use 16, 32, 64 or 128")
    try:
        from funcllm.kernels import triton_step
        from funcllm.kernels.attention_prefill import flash_refusal
    except ImportError as error:
        raise RuntimeError(f"the CUDA kernels need triton ({error}); pip install triton") from error
    bundle = replace(FAST, decode_inputs=triton_step.decode_inputs, advance=triton_step.advance)
    if torch.cuda.get_device_capability(device) >= (9, 0):
        bundle = replace(bundle, **_CHAINED)
    if dtype in (torch.bfloat16, torch.float16):
        bundle = replace(bundle, fused=FAST.fused | SMALL_BLOCKS, small_rows=SMALL_ROWS)
        if torch.cuda.get_device_capability(device) >= (9, 0) and gemm_config.MEASURED:
            bundle = with_ahead_blocks(bundle, device)
    decode = "decode: Triton, split over the keys, grouped query heads"
    refusal = flash_refusal(device, head_dim, dtype)
    if refusal:
        return replace(bundle, why=(decode, f"prefill: Triton; {refusal}"))
    sizes = f"prefill: flash-attn-4 for steps of {ops.FLASH_TOKENS} prompt tokens and more, Triton below"
    return replace(bundle, attend=fast.attend_flash, prefill=ops.FLASH, why=(decode, sizes))


def with_ahead_blocks(kernels: Kernels, device: torch.device) -> Kernels:
    """The bundle with the products that are measured to be worth asking for their weights early.

    Their counters live as long as the bundle; its launches run one after the other. The norm before a product lets it
    start early.
    """
    return replace(
        kernels,
        fused=kernels.fused | AHEAD_BLOCKS,
        add_rms_norm=partial(fused.add_rms_norm, pdl=True),
        ahead_linear=partial(gemm.ahead_linear, counters_p=gemm.counters(device), pdl=True),
        worth=gemm_config.worth,
    )


def without_flash(kernels: Kernels) -> Kernels:
    """The bundle with Triton prefill in place of flash-attn-4."""
    return replace(kernels, attend=fast.attend, prefill=ops.TRITON)


def has_flash(device: torch.device, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the fast bundle of this device and model is to have flash-attn-4. Imports nothing for it."""
    from funcllm.kernels.attention_prefill import flash_refusal

    return not flash_refusal(device, head_dim, dtype)


def import_flash_ahead() -> threading.Thread:
    """The thread that imports flash-attn-4, to be joined before `flash_fault`."""
    from funcllm.kernels import attention_prefill

    return attention_prefill.import_flash_ahead()


def flash_fault(kernels: Kernels, device: torch.device, head_dim: int, dtype: torch.dtype, block_size: int) -> str:
    """Why flash-attn-4 cannot be used here after all: what it raised, or how far it is from Triton; '' where it is good
    or not in use. Two chunks of two rows are computed by both, one of them behind a cached prefix.
    """
    if kernels.prefill != ops.FLASH:
        return ""
    generator = torch.Generator(device).manual_seed(0)
    size = (9, block_size, 1, head_dim)
    k_cache, v_cache = (torch.randn(size, device=device, dtype=dtype, generator=generator) for _ in range(2))
    q = torch.randn(ops.FLASH_TOKENS, 2, head_dim, device=device, dtype=dtype, generator=generator)
    table = torch.arange(1, 9, dtype=torch.int32, device=device).view(2, 4)
    lens, starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([3 * block_size + 5, 20], [0, 28, 48]))
    chunks = (table, lens, starts, torch.empty(1, dtype=torch.uint8, device=device).expand(32))
    try:
        ours = kernels.attend(q, k_cache, v_cache, (), chunks, scale=head_dim**-0.5).float()
        expected = without_flash(kernels).attend(q, k_cache, v_cache, (), chunks, scale=head_dim**-0.5).float()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    off = ((ours - expected).norm() / expected.norm()).item()
    return "" if off < 2e-2 else f"its result is {off:.0%} off"
