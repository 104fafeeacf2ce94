"""The embedding, the elementwise ops, the head and the pick as torch ops `funcllm::...`.

Opaque to the compiler, any token count. On CUDA they launch Triton kernels; on CPU they run the functions of cpu.py and
cpu_sampler.py. They have no derivative and no batching rule: fused.py refuses transforms before it gets here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from funcllm.kernels import cpu, cpu_sampler

ON_GPU = torch.version.cuda is not None or torch.version.hip is not None

if ON_GPU:
    from funcllm.kernels import triton_fused, triton_sampler

LIBRARY = Library("funcllm", "FRAGMENT")
_CHUNK_ELEMENTS = 1 << 22  # of a weight that is widened to fp32 at a time


def define(schema: str, *, cpu: Callable[..., Any], fake: Callable[..., Any], cuda: Callable[..., Any] | None) -> None:
    """Registers one op by its schema, its implementations and the function that gives the shape of its result."""
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)
    LIBRARY.impl(name, cpu, "CPU")
    if cuda is not None:
        LIBRARY.impl(name, cuda, "CUDA")
    register_fake(f"funcllm::{name}", fake, lib=LIBRARY)


def _new(like: Tensor, shape: Any = None, dtype: torch.dtype | None = None) -> Tensor:
    return like.new_empty(like.shape if shape is None else shape, dtype=dtype or like.dtype)


# --- embedding and rotary angles -------------------------------------------------------------------------------------


def _embed_rows_fake(token_ids: Tensor, weight: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    shape = (token_ids.shape[0], weight.shape[1])
    return _new(weight, shape), _new(weight, shape)


def _rope_angles_fake(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    shape = (positions.shape[0], frequencies.shape[0] - 1)
    return _new(frequencies, shape), _new(frequencies, shape)


define(
    "embed_rows(Tensor token_ids, Tensor weight, SymInt first_id) -> (Tensor, Tensor)",
    cpu=cpu.embed_rows,
    fake=_embed_rows_fake,
    cuda=triton_fused.embed_rows if ON_GPU else None,
)
define(
    "rope_angles(Tensor positions, Tensor frequencies) -> (Tensor, Tensor)",
    cpu=cpu.rope_angles,
    fake=_rope_angles_fake,
    cuda=triton_fused.rope_angles if ON_GPU else None,
)


# --- norms and activation --------------------------------------------------------------------------------------------


def _rms_norm_cpu(x: Tensor, weight: Tensor, eps: float, pdl: bool = False) -> Tensor:
    return cpu.rms_norm(x, weight, eps)


def _rms_norm_cuda(x: Tensor, weight: Tensor, eps: float, pdl: bool = False) -> Tensor:
    return triton_fused.rms_norm(x, weight, eps, pdl=pdl)


def _add_rms_norm_cpu(
    x: Tensor, update: Tensor, weight: Tensor, eps: float, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    return cpu.add_rms_norm(x, update, weight, eps)


def _add_rms_norm_cuda(
    x: Tensor, update: Tensor, weight: Tensor, eps: float, pdl: bool = False
) -> tuple[Tensor, Tensor]:
    return triton_fused.add_rms_norm(x, update, weight, eps, pdl=pdl)


def _silu_mul_cpu(gate_up: Tensor, pdl: bool = False) -> Tensor:
    return cpu.silu_mul(gate_up)


def _silu_mul_cuda(gate_up: Tensor, pdl: bool = False) -> Tensor:
    return triton_fused.silu_mul(gate_up, pdl=pdl)


define(
    "rms_norm(Tensor x, Tensor weight, float eps, bool pdl=False) -> Tensor",
    cpu=_rms_norm_cpu,
    fake=lambda x, weight, eps, pdl=False: _new(x),
    cuda=_rms_norm_cuda if ON_GPU else None,
)
define(
    "add_rms_norm(Tensor x, Tensor update, Tensor weight, float eps, bool pdl=False) -> (Tensor, Tensor)",
    cpu=_add_rms_norm_cpu,
    fake=lambda x, update, weight, eps, pdl=False: (_new(x), _new(x)),
    cuda=_add_rms_norm_cuda if ON_GPU else None,
)
define(
    "silu_mul(Tensor gate_up, bool pdl=False) -> Tensor",
    cpu=_silu_mul_cpu,
    fake=lambda gate_up, pdl=False: _new(gate_up, (*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
    cuda=_silu_mul_cuda if ON_GPU else None,
)


# --- q/k norm, rotary embedding, cache write -------------------------------------------------------------------------


def _qk_norm_rope_write_cpu(*args: Any) -> Tensor:
    return cpu.qk_norm_rope_write(*args[:11])


def _qk_norm_rope_write_cuda(*args: Any) -> Tensor:
    return triton_fused.qk_norm_rope_write(*args[:11], pdl=args[11:] == (True,))  # a default at the end is not passed


define(
    "qk_norm_rope_write(Tensor q, Tensor k, Tensor v, Tensor? q_weight, Tensor? k_weight, float eps, Tensor cos, "
    "Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, bool pdl=False) -> Tensor",
    cpu=_qk_norm_rope_write_cpu,
    fake=lambda q, *_, **__: _new(q),
    cuda=_qk_norm_rope_write_cuda if ON_GPU else None,
)


# --- head and sampler ------------------------------------------------------------------------------------------------


def _head_logits_cpu(x: Tensor, weight: Tensor) -> Tensor:
    """A narrow weight is widened in pieces, so that a step never holds a second vocabulary matrix in fp32."""
    x = x.float()
    if weight.dtype == torch.float32:
        return cpu.linear(x, weight)
    rows = max(1, _CHUNK_ELEMENTS // max(1, weight.shape[1]))
    pieces = [torch.nn.functional.linear(x, part.float()) for part in weight.split(rows)]
    return torch.cat(pieces, dim=-1) if pieces else x.new_empty((x.shape[0], 0))


def _head_logits_cuda(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.nn.functional.linear(x.float(), weight.float())


def _pick_cpu(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    threshold: Tensor | None,
    first_id: int,
    num_ids: int,
    pdl: bool = False,
    forbidden: Tensor | None = None,
) -> Tensor:
    return cpu_sampler.pick(logits, temperature, keys, threshold, first_id, num_ids, forbidden)


def _pick_cuda(
    logits: Tensor,
    temperature: Tensor,
    keys: Tensor,
    threshold: Tensor | None,
    first_id: int,
    num_ids: int,
    pdl: bool = False,
    forbidden: Tensor | None = None,
) -> Tensor:
    return triton_sampler.pick(logits, temperature, keys, threshold, first_id, num_ids, forbidden, pdl=pdl)


define(
    "head_logits(Tensor x, Tensor weight) -> Tensor",
    cpu=_head_logits_cpu,
    fake=lambda x, weight: _new(x, (x.shape[0], weight.shape[0]), torch.float32),
    cuda=_head_logits_cuda,
)
define(
    "pick(Tensor logits, Tensor temperature, Tensor keys, Tensor? threshold, SymInt first_id, SymInt num_ids, "
    "bool pdl=False, Tensor? forbidden=None) -> Tensor",
    cpu=_pick_cpu,
    fake=lambda logits, *_, **__: _new(logits, (logits.shape[0],), torch.int64),
    cuda=_pick_cuda if ON_GPU else None,
)
define(
    "noise_keys(Tensor seed, Tensor position) -> Tensor",
    cpu=cpu_sampler.noise_keys,
    fake=lambda seed, position: _new(seed, (seed.shape[0], 2), torch.int64),
    cuda=triton_sampler.noise_keys if ON_GPU else None,
)
define(
    "token_of(Tensor key) -> Tensor",
    cpu=cpu_sampler.token_of,
    fake=lambda key: _new(key, key.shape, torch.int32),
    cuda=triton_sampler.token_of if ON_GPU else None,
)
