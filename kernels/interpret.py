"""Triton's interpreter with a right bfloat16: a set-up for tests that run kernels on CPU tensors.

The interpreter keeps bfloat16 as 16-bit integers and computes on those: products of `tl.dot` and sums are then of raw
bits, and casts truncate. `repair()` makes these go through float32 and round to nearest even. TRITON_INTERPRET=1 must
be set before triton is imported, so tests start a fresh process.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def to_float32(bits: Any) -> Any:
    """bfloat16 bits (uint16) as float32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: Any) -> Any:
    """float32 as bfloat16 bits (uint16), rounded to nearest even; a NaN stays one."""
    values = np.asarray(values, dtype=np.float32)
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def repair() -> None:
    """Replaces the interpreter's bfloat16 arithmetic, casts and dot products by right ones, for this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    if getattr(builder, "bfloat16_repaired", False):
        return
    binary_op, unary_op, cast_impl, create_dot = (
        builder.binary_op,
        builder.unary_op,
        builder.cast_impl,
        builder.create_dot,
    )

    def is_bfloat16(x: Any) -> bool:
        return x.dtype.scalar == tl.bfloat16

    def widened(x: Any) -> Any:
        return handle(to_float32(x.data), tl.float32) if is_bfloat16(x) else x

    def narrowed(x: Any) -> Any:
        return handle(to_bfloat16(x.data), tl.bfloat16)

    def right_binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not (is_bfloat16(lhs) and is_bfloat16(rhs)):
            return binary_op(self, lhs, rhs, op)
        result = binary_op(self, widened(lhs), widened(rhs), op)
        return handle(result.data, tl.bfloat16) if result.data.dtype == np.bool_ else narrowed(result)

    def right_unary_op(self: Any, arg: Any, op: Any) -> Any:
        return narrowed(unary_op(self, widened(arg), op)) if is_bfloat16(arg) else unary_op(self, arg, op)

    def right_cast(self: Any, src: Any, dst_type: Any) -> Any:
        if is_bfloat16(src):
            src = widened(src)
        if dst_type.scalar == tl.bfloat16:
            return handle(to_bfloat16(src.data), tl.bfloat16)
        return handle(src.data, tl.float32) if dst_type.scalar == src.dtype.scalar else cast_impl(self, src, dst_type)

    def right_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        return create_dot(self, widened(a), widened(b), d, input_precision, max_num_imprecise_acc)

    def right_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return right_cast(self, src, dst_type)

    builder.binary_op = right_binary_op
    builder.unary_op = right_unary_op
    builder.cast_impl = right_cast
    builder.create_fp_to_fp = right_fp_to_fp
    builder.create_dot = right_dot
    builder.bfloat16_repaired = True
