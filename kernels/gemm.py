"""A matrix product of 9 to 256 rows that asks for its weight before its predecessor ends: op `funcllm::ahead_linear`.

On CUDA it is one Triton kernel (see gemm_config.py), on CPU the composition of cpu.py's functions, which round like the
reference and the kernel. Like the other kernels it has no derivative and refuses transforms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcllm.kernels import cpu
from funcllm.kernels.fused import refuse_transforms, runs_on_cpu
from funcllm.kernels.gemm_config import MAX_ROWS, GemmConfig, unpacked
from funcllm.kernels.ops_fused import ON_GPU, define

if ON_GPU:
    from funcllm.kernels import triton_gemm

Optional = Tensor | tuple[()]


def fits(rows: int, weight: Tensor) -> bool:
    """Whether the kernel takes the product: 1 to 256 rows, a contiguous 16-bit weight with rows of whole 16 bytes."""
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    return 1 <= rows <= MAX_ROWS and narrow and weight.is_contiguous() and weight.shape[1] % 8 == 0


def ahead_linear(
    x_td: Tensor,
    weight_od: Tensor,
    bias_o: Optional = (),
    *,
    silu: bool = False,
    counters_p: Optional = (),
    config: GemmConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """x @ weight.T + bias; with silu, silu(first half) * second half of the outputs.

    counters_p: int32 zeros, left at 0, for launches that split columns (see triton_gemm.gemm); without them none does.
    """
    refuse_transforms("ahead_linear", x_td, weight_od, bias_o)
    op = _ahead_linear_cpu if runs_on_cpu(x_td) else torch.ops.funcllm.ahead_linear.default
    packed = [] if config is None else config.packed()
    return op(x_td, weight_od, _or_none(bias_o), silu, _or_none(counters_p), packed, pdl)


def counters(device: torch.device) -> Tensor:
    """Counters for any launch on this device; launches that may run at the same time need ones of their own."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


MAX_TILES = 1024  # of a launch that splits columns; one with more has programs enough


# --- ops -------------------------------------------------------------------------------------------------------------


def _ahead_linear_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    counters: Tensor | None,
    config: list[int],
    pdl: bool = False,
) -> Tensor:
    y = cpu.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    return cpu.silu_mul(y) if silu else y


def _ahead_linear_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    counters: Tensor | None,
    config: list[int],
    pdl: bool = False,
) -> Tensor:
    given = unpacked(config) if config else None
    return triton_gemm.gemm(x, weight, bias_o=bias, silu=silu, counters_p=counters, config=given, pdl=pdl)


def _ahead_linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, *_: object, **__: object) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2 if silu else weight.shape[0]))


define(
    "ahead_linear(Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor? counters, int[] config, bool pdl=False) "
    "-> Tensor",
    cpu=_ahead_linear_cpu,
    fake=_ahead_linear_fake,
    cuda=_ahead_linear_cuda if ON_GPU else None,
)


def _or_none(x: Optional) -> Tensor | None:
    return x if isinstance(x, Tensor) else None
