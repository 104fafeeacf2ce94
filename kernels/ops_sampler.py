"""The passes of the sampler's threshold as torch ops: Triton on CUDA, radix.py and cpu_sampler.py on CPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcllm.kernels import cpu_sampler, radix
from funcllm.kernels.ops_fused import ON_GPU, define

if ON_GPU:
    from funcllm.kernels import triton_candidates, triton_radix, triton_sampler


def _histogram_fake(
    logits: Tensor, forbidden: Tensor, first_id: int, num_ids: int, prefix: Tensor, index: int, *_: Any
) -> Tensor:
    return prefix.new_empty((logits.shape[0], 1 << radix.DIGITS[index][1]))


define(
    "filter_threshold(Tensor logits, Tensor forbidden, SymInt first_id, SymInt num_ids, Tensor temperature, "
    "Tensor top_k, Tensor top_p, Tensor min_p) -> (Tensor, Tensor)",
    cpu=cpu_sampler.filter_threshold,
    fake=lambda logits, *_: (logits.new_empty(logits.shape[0]), logits.new_empty(logits.shape[0])),
    cuda=triton_candidates.threshold if ON_GPU else None,
)
define(
    "largest_logit(Tensor logits, Tensor forbidden, SymInt first_id, SymInt num_ids) -> Tensor",
    cpu=radix.largest,
    fake=lambda logits, *_: logits.new_empty(logits.shape[0]),
    cuda=triton_radix.largest if ON_GPU else None,
)
define(
    "radix_histogram(Tensor logits, Tensor forbidden, SymInt first_id, SymInt num_ids, Tensor prefix, int index, "
    "Tensor floor, Tensor largest, Tensor heat, bool by_mass) -> Tensor",
    cpu=radix.histogram,
    fake=_histogram_fake,
    cuda=triton_radix.histogram if ON_GPU else None,
)
define(
    "radix_select(Tensor histogram, Tensor missing, Tensor prefix) -> (Tensor, Tensor)",
    cpu=radix.select,
    fake=lambda histogram, missing, prefix: (prefix.new_empty(prefix.shape), missing.new_empty(missing.shape)),
    cuda=triton_radix.select if ON_GPU else None,
)
define(
    "with_min_p(Tensor threshold, Tensor largest, Tensor temperature, Tensor min_p) -> Tensor",
    cpu=cpu_sampler.with_min_p,
    fake=lambda threshold, *_: threshold.new_empty(threshold.shape),
    cuda=triton_sampler.with_min_p if ON_GPU else None,
)
