"""Launches the kernels of whole steps for sm_90 without a GPU, in a process of its own: python tests/launches_sm90.py.

Triton's driver is replaced by one that compiles and loads, but runs nothing. So arguments are specialised as in
production (a size of 1 becomes a constant, multiples of 16 are known), which a written signature does not show. Prints
one JSON line a batch size: the kernels that were compiled, with their shared memory.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

BF16, I32, I64, F32 = torch.bfloat16, torch.int32, torch.int64, torch.float32
NUM_SMS, SHARED = 132, 232448
compiled: list[tuple[str, int]] = []


class Utils:
    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        compiled.append((name, shared))
        return 1, 1, 32, 0, 1024  # module, function, registers, spills, threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED, "multiprocessor_count": NUM_SMS, "warpSize": 32, "max_num_regs": 65536}


class Launcher:
    """Called in place of the launch."""

    def __init__(self, src: Any, metadata: Any) -> None: ...

    def __call__(self, *args: Any) -> None: ...


class Driver:
    launcher_cls = Launcher
    utils = Utils()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Of one layer and the head."""

    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 3072
    vocabulary: int = 151936


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16)


def step_of_decode_rows(rows: int, s: Shapes) -> None:
    """Every kernel of a decode step, with and without early start."""
    from funcllm.kernels import triton_fused, triton_gemv, triton_step

    rows_r = 9
    ints, floats = (lambda *tail: torch.zeros(rows_r, *tail, dtype=I32)), (lambda: torch.zeros(rows_r))
    filters = (ints(), floats(), floats(), ints(), ints(8))
    alive_r, seed_r = torch.zeros(rows_r, dtype=torch.bool), torch.zeros(rows_r, dtype=I64)
    step: Any = None
    for asked in ((), filters):
        step = triton_step.decode_inputs(
            torch.zeros(rows, dtype=I32),
            ints(512),
            ints(),
            ints(),
            ints(),
            alive_r,
            ints(64),
            floats(),
            seed_r,
            asked,  # type: ignore[arg-type]
            block_size=32,
        )
    triton_fused.embed_rows(step.token_ids_b, bf16(s.vocabulary, s.hidden), 0)
    x_td, norm_d = bf16(rows, s.hidden), bf16(s.hidden)
    triton_fused.add_rms_norm(x_td, x_td, norm_d, 1e-6)
    width, qkv_width = s.heads * s.head_dim, (s.heads + 2 * s.kv_heads) * s.head_dim
    if rows <= 8:
        behind_norm = {"update_td": x_td, "norm_weight_d": norm_d, "eps": 1e-6}
        for pdl in (False, True):
            triton_gemv.gemv(x_td, bf16(qkv_width, s.hidden), **behind_norm, pdl=pdl)
            triton_gemv.gemv(bf16(rows, width), bf16(s.hidden, width), pdl=pdl)
            triton_gemv.gemv(x_td, bf16(2 * s.ffn, s.hidden), **behind_norm, silu=True, pdl=pdl)
            triton_gemv.gemv(bf16(rows, s.ffn), bf16(s.hidden, s.ffn), pdl=pdl)
            triton_gemv.gemv(x_td, bf16(s.vocabulary, s.hidden), **behind_norm, wide=True, pdl=pdl)
    else:
        triton_fused.silu_mul(bf16(rows, 2 * s.ffn))
    attention(rows, s, step)
    tail(rows, s, step)
    ring = (torch.zeros(4, 64, 3, dtype=I32), torch.zeros(1, dtype=I64))
    triton_step.advance(
        step.rows_b,
        step.query_lens_b,
        step.samples_b,
        torch.zeros(rows, dtype=I32),
        ints(512),
        ints(),
        ints(),
        ints(),
        alive_r,
        ints(),
        ints(8),
        ring=ring,
    )


def attention(rows: int, s: Shapes, step: Any) -> None:
    from funcllm.kernels import attention_decode, attention_prefill, triton_fused

    cos_th, sin_th = triton_fused.rope_angles(step.positions_b, torch.empty(s.head_dim // 2 + 1))
    q_tnh, k_tkh, v_tkh = bf16(rows, s.heads + 2 * s.kv_heads, s.head_dim).split([s.heads, s.kv_heads, s.kv_heads], 1)
    k_cache, v_cache = bf16(20, 32, s.kv_heads, s.head_dim), bf16(20, 32, s.kv_heads, s.head_dim)
    norm_h = bf16(s.head_dim)
    for pdl in (False, True):
        triton_fused.qk_norm_rope_write(
            q_tnh, k_tkh, v_tkh, norm_h, norm_h, 1e-6, cos_th, sin_th, k_cache, v_cache, step.slots_b, pdl=pdl
        )
    out_tnh = bf16(rows, s.heads, s.head_dim)
    attention_decode.decode_attention(
        q_tnh.contiguous(), k_cache, v_cache, step.block_table_bm, step.kv_lens_b, out_tnh, scale=0.1
    )
    starts = torch.tensor([0, 1, rows], dtype=I32)
    attention_prefill.prefill_attention(
        q_tnh.contiguous(),
        k_cache,
        v_cache,
        torch.zeros(2, 64, dtype=I32),
        torch.ones(2, dtype=I32),
        starts,
        out_tnh,
        scale=0.1,
    )


def tail(rows: int, s: Shapes, step: Any) -> None:
    """From the logits to the token."""
    from funcllm.kernels import triton_candidates, triton_radix, triton_sampler

    logits_lv = torch.empty(rows, s.vocabulary)
    forbidden_ls, row_l = torch.zeros(rows, 8, dtype=I32), torch.empty(rows)
    columns, settings = (logits_lv, forbidden_ls, 0, s.vocabulary), (step.temperature_b, forbidden_ls[:, 0], row_l)
    value_l, largest_l = triton_candidates.threshold(*columns, *settings, row_l)
    triton_radix.largest(*columns)
    threshold_l = triton_sampler.with_min_p(value_l, largest_l, step.temperature_b, row_l)
    sampling = (logits_lv, step.temperature_b, step.noise_keys_b2)
    triton_sampler.pick(*sampling, None, 0, s.vocabulary)
    key_l = triton_sampler.pick(*sampling, threshold_l, 0, s.vocabulary, forbidden_ls)
    triton_sampler.token_of(key_l)
    triton_sampler.noise_keys(step.seed_b, step.lengths_b)


def main(batches: list[int]) -> None:
    driver.set_active(Driver())
    from funcllm.kernels import attention_decode, attention_prefill, triton_gemv

    attention_decode.device_size = attention_prefill.device_size = lambda device: (NUM_SMS, SHARED)  # type: ignore
    triton_gemv.multiprocessors = lambda device: NUM_SMS  # type: ignore[assignment]
    for rows in batches:
        compiled.clear()
        step_of_decode_rows(rows, Shapes())
        print(json.dumps({"rows": rows, "kernels": compiled}), flush=True)


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]])
