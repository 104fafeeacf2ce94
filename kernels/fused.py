"""The fast bundle's embedding, elementwise kernels, head and pick: signatures and contracts are those of reference.py.

They call the ops of ops_fused.py, which have no derivative and no batching rule: under torch.func or with gradients
they raise instead of returning a wrong value. `pdl=True` launches a kernel by programmatic dependent launch (sm_90 and
later) and is right only where every kernel of the chain waits for its predecessor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcllm.kernels import (
    cpu,
    cpu_sampler,
    ops_fused,  # noqa: F401  registers the ops
)


def embed_rows(token_ids_t: Tensor, weight_vd: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    """(zeros, the embeddings of the shard that starts at first_id) [t, d]; ids of other shards have rows of 0."""
    refuse_transforms("embed_rows", weight_vd)
    if runs_on_cpu(token_ids_t):
        return cpu.embed_rows(token_ids_t, weight_vd, first_id)
    return torch.ops.funcllm.embed_rows.default(token_ids_t, weight_vd, first_id)


def rope_angles(positions_t: Tensor, frequencies_h: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of position x frequency in fp32, times the last of the frequencies; accurate at any position."""
    refuse_transforms("rope_angles", frequencies_h)
    if runs_on_cpu(positions_t):
        return cpu.rope_angles(positions_t, frequencies_h)
    return torch.ops.funcllm.rope_angles.default(positions_t, frequencies_h)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> Tensor:
    """x / rms(x) over the last axis in fp32, rounded to x's dtype, times weight; contiguous."""
    refuse_transforms("rms_norm", x, weight)
    return torch.ops.funcllm.rms_norm.default(x, weight, eps, pdl)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float, *, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """(x + update summed in fp32 and rounded once, the rms norm of the rounded sum)."""
    refuse_transforms("add_rms_norm", x, update, weight)
    if runs_on_cpu(x):
        return cpu.add_rms_norm(x, update, weight, eps)
    return torch.ops.funcllm.add_rms_norm.default(x, update, weight, eps, pdl)


def qk_norm_rope_write(
    q_tnh: Tensor,
    k_tkh: Tensor,
    v_tkh: Tensor,
    q_weight_h: Tensor | tuple[()],
    k_weight_h: Tensor | tuple[()],
    eps: float,
    cos_th: Tensor,
    sin_th: Tensor,
    k_cache_pskh: Tensor,
    v_cache_pskh: Tensor,
    slots_t: Tensor,
    *,
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """q after norm and rotation, and the caches, written in place: those passed in are those returned.

    q, k and v may be strided views of one packed tensor; the caches are contiguous; slots are int64.
    """
    refuse_transforms("qk_norm_rope_write", q_tnh, k_tkh, v_tkh, q_weight_h, k_weight_h, k_cache_pskh, v_cache_pskh)
    weights = (_or_none(q_weight_h), _or_none(k_weight_h))
    arguments = (q_tnh, k_tkh, v_tkh, *weights, eps, cos_th, sin_th, k_cache_pskh, v_cache_pskh, slots_t)
    if runs_on_cpu(q_tnh):
        out_tnh = cpu.qk_norm_rope_write(*arguments)
    else:
        out_tnh = torch.ops.funcllm.qk_norm_rope_write.default(*arguments, pdl)
    return out_tnh, k_cache_pskh, v_cache_pskh


def silu_mul(gate_up: Tensor, *, pdl: bool = False) -> Tensor:
    """silu(gate) * up of [..., 2f], gate first; silu is rounded to the dtype before the product; contiguous."""
    refuse_transforms("silu_mul", gate_up)
    return torch.ops.funcllm.silu_mul.default(gate_up, pdl)


def head_logits(x_ld: Tensor, weight_vd: Tensor) -> Tensor:
    """x @ weight.T as fp32, written from the accumulators: not rounded to the dtype in between."""
    refuse_transforms("head_logits", x_ld, weight_vd)
    return torch.ops.funcllm.head_logits.default(x_ld, weight_vd)


def pick(
    logits_lv: Tensor,
    temperature_l: Tensor,
    keys_l2: Tensor,
    threshold_l: Tensor | tuple[()],
    first_id: int,
    num_ids: int,
    *,
    forbidden_ls: Tensor | tuple[()] = (),
    pdl: bool = False,
) -> Tensor:
    """This shard's winner of every row as an int64 key (see reference.pick); without ids, the smallest int64."""
    refuse_transforms("pick", logits_lv)
    return torch.ops.funcllm.pick.default(
        logits_lv, temperature_l, keys_l2, _or_none(threshold_l), first_id, num_ids, pdl, _or_none(forbidden_ls)
    )


def noise_keys(seed_l: Tensor, position_l: Tensor) -> Tensor:
    """reference.noise_keys: two 32-bit words a row, as int64 [l, 2]."""
    refuse_transforms("noise_keys")
    if runs_on_cpu(seed_l):
        return cpu_sampler.noise_keys(seed_l, position_l)
    return torch.ops.funcllm.noise_keys.default(seed_l, position_l)


def token_of(key_l: Tensor) -> Tensor:
    """The vocabulary id in a winner's key, int32; -1 where a logit was NaN."""
    refuse_transforms("token_of")
    if runs_on_cpu(key_l):
        return cpu_sampler.token_of(key_l)
    return torch.ops.funcllm.token_of.default(key_l)


def refuse_transforms(name: str, *tensors: Tensor | tuple[()]) -> None:
    """Raises where a kernel's result would be silently wrong: under torch.func, or with inputs that require grad."""
    if torch._C._functorch.maybe_current_level() is not None:
        raise RuntimeError(
            f"{name} runs as a kernel and has no rule for torch.func transforms; "
            "build the model with kernels=REFERENCE for grad, jvp and vmap"
        )
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        raise RuntimeError(
            f"{name} runs as a kernel and has no derivative; "
            "build the model with kernels=REFERENCE to differentiate, or call it under torch.no_grad()"
        )


def runs_on_cpu(x: Tensor) -> bool:
    """Whether the CPU's function may be called itself: an op around it costs time, and only the compiler and a profile,
    which names ops, need it.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.device.type != "cpu":
        return False
    return not torch.autograd._profiler_enabled()


def _or_none(x: Tensor | tuple[()]) -> Tensor | None:
    return x if isinstance(x, Tensor) else None
