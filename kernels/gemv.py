"""Matrix products of few rows, with what stands before and behind them in a layer: ops `funcllm::small_linear`, ...

On CUDA they are one Triton kernel each (triton_gemv.py), on CPU the composition of cpu.py's functions, which round
like the reference and the kernels. Like the other kernels they have no derivative and refuse transforms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcllm.kernels import cpu
from funcllm.kernels.fused import refuse_transforms, runs_on_cpu
from funcllm.kernels.gemv_config import MAX_ROWS, GemvConfig, unpacked
from funcllm.kernels.ops_fused import ON_GPU, define

if ON_GPU:
    from funcllm.kernels import triton_gemv

Optional = Tensor | tuple[()]


def fits(rows: int, weight: Tensor) -> bool:
    """Whether these kernels take the product: 1 to 16 rows, a contiguous 16-bit weight with rows of whole 16 bytes."""
    narrow = weight.dtype in (torch.bfloat16, torch.float16)
    return 1 <= rows <= MAX_ROWS and narrow and weight.is_contiguous() and weight.shape[1] % 8 == 0


def small_linear(
    x_td: Tensor,
    weight_od: Tensor,
    bias_o: Optional = (),
    *,
    residual_to: Optional = (),
    silu: bool = False,
    wide: bool = False,
    config: GemvConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """x @ weight.T + bias; then silu(first half) * second half of the outputs, or the sum with the residual.

    wide: the fp32 accumulator instead of x's dtype. A sum with the residual is made in fp32 and rounded once.
    """
    refuse_transforms("small_linear", x_td, weight_od, residual_to)
    op = _small_linear_cpu if runs_on_cpu(x_td) else torch.ops.funcllm.small_linear.default
    return op(x_td, weight_od, _or_none(bias_o), None, 0.0, _or_none(residual_to), silu, wide, _packed(config), pdl)


def norm_small_linear(
    x_td: Tensor,
    norm_weight_d: Tensor,
    eps: float,
    weight_od: Tensor,
    bias_o: Optional = (),
    *,
    silu: bool = False,
    wide: bool = False,
    config: GemvConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """rms_norm(x) @ weight.T + bias; then silu(first half) * second half of the outputs if asked."""
    refuse_transforms("norm_small_linear", x_td, norm_weight_d, weight_od)
    return torch.ops.funcllm.small_linear.default(
        x_td, weight_od, _or_none(bias_o), norm_weight_d, eps, None, silu, wide, _packed(config), pdl
    )


def add_norm_small_linear(
    x_td: Tensor,
    update_td: Tensor,
    norm_weight_d: Tensor,
    eps: float,
    weight_od: Tensor,
    bias_o: Optional = (),
    *,
    silu: bool = False,
    wide: bool = False,
    config: GemvConfig | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """(x + update rounded once, norm_small_linear of that sum)."""
    refuse_transforms("add_norm_small_linear", x_td, update_td, norm_weight_d, weight_od)
    op = _add_norm_small_linear_cpu if runs_on_cpu(x_td) else torch.ops.funcllm.add_norm_small_linear.default
    return op(x_td, update_td, norm_weight_d, eps, weight_od, _or_none(bias_o), silu, wide, _packed(config), pdl)


# --- ops -------------------------------------------------------------------------------------------------------------


def _small_linear_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    silu: bool,
    wide: bool,
    config: list[int],
    pdl: bool = False,
) -> Tensor:
    dtype = x.dtype
    if norm_weight is not None:
        x = cpu.rms_norm(x, norm_weight, eps)
    wide_bias = None if bias is None else bias.float()
    y = cpu.linear(x.float(), weight.float(), wide_bias)
    if silu:
        y = cpu.silu_mul(y.to(dtype))
    if residual is not None:
        y = residual.float() + y.to(dtype).float()
    return y.to(torch.float32 if wide else dtype)


def _small_linear_cuda(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    residual: Tensor | None,
    silu: bool,
    wide: bool,
    config: list[int],
    pdl: bool = False,
) -> Tensor:
    y, _ = triton_gemv.gemv(
        x,
        weight,
        bias_o=bias,
        norm_weight_d=norm_weight,
        eps=eps,
        residual_to=residual,
        silu=silu,
        wide=wide,
        config=unpacked(config) if config else None,
        pdl=pdl,
    )
    return y


def _add_norm_small_linear_cpu(
    x: Tensor,
    update: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    wide: bool,
    config: list[int],
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    total, normed = cpu.add_rms_norm(x, update, norm_weight, eps)
    return total, _small_linear_cpu(normed, weight, bias, None, eps, None, silu, wide, config)


def _add_norm_small_linear_cuda(
    x: Tensor,
    update: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    wide: bool,
    config: list[int],
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    y, total = triton_gemv.gemv(
        x,
        weight,
        bias_o=bias,
        norm_weight_d=norm_weight,
        eps=eps,
        update_td=update,
        silu=silu,
        wide=wide,
        config=unpacked(config) if config else None,
        pdl=pdl,
    )
    return total, y


def _shape_of(x: Tensor, weight: Tensor, silu: bool, wide: bool) -> Tensor:
    out_features = weight.shape[0] // 2 if silu else weight.shape[0]
    return x.new_empty((x.shape[0], out_features), dtype=torch.float32 if wide else x.dtype)


define(
    "small_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, float eps, Tensor? residual, bool silu, "
    "bool wide, int[] config, bool pdl=False) -> Tensor",
    cpu=_small_linear_cpu,
    fake=lambda x, weight, bias, norm_weight, eps, residual, silu, wide, *_, **__: _shape_of(x, weight, silu, wide),
    cuda=_small_linear_cuda if ON_GPU else None,
)
define(
    "add_norm_small_linear(Tensor x, Tensor update, Tensor norm_weight, float eps, Tensor weight, Tensor? bias, "
    "bool silu, bool wide, int[] config, bool pdl=False) -> (Tensor, Tensor)",
    cpu=_add_norm_small_linear_cpu,
    fake=lambda x, update, norm_weight, eps, weight, bias, silu, wide, *_, **__: (
        x.new_empty(x.shape),
        _shape_of(x, weight, silu, wide),
    ),
    cuda=_add_norm_small_linear_cuda if ON_GPU else None,
)


def _packed(config: GemvConfig | None) -> list[int]:
    return [] if config is None else config.packed()


def _or_none(x: Optional) -> Tensor | None:
    return x if isinstance(x, Tensor) else None
