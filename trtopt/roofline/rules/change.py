"""The work of a layer after a change, to be predicted anew."""

from __future__ import annotations

import dataclasses
import functools
import math

from trtopt.roofline.work import AttentionSizes, Gemm, Work, alignment_of
from trtopt.support.precision import ELEMENT_BYTES, Precision

_REMEMBERED = 4096
"""Changes kept, since networks repeat their layers and rules ask for the same change."""


def channels(work: Work) -> tuple[int, int]:
    """Input and output channels of a convolution, or k and n of a product: the lengths of its contiguous rows.

    Raises:
        ValueError: ``work`` has no product.
    """
    gemm = work.gemm
    if gemm is None:
        raise ValueError("work without a product has no channels")
    if work.window is None:
        return gemm.k, gemm.n
    groups = work.window.group
    return gemm.k // math.prod(work.window.kernel) * groups, gemm.n * groups


@functools.lru_cache(_REMEMBERED)
def resized(work: Work, *, m: int | None = None, n: int | None = None, k: int | None = None) -> Work:
    """The work when its product has other sizes.

    With weights the k*n operand is the weight, m*k what is read and m*n what is written; without, both operands are
    read. What a kernel reads besides (a residual) scales along.
    """
    old = work.gemm
    if old is None:
        return work
    new = Gemm(m or old.m, n or old.n, k or old.k, old.batch)
    if work.weight_bytes:
        read = _scaled(work.read_bytes, new.m * new.k, old.m * old.k)
    else:
        read = _scaled(work.read_bytes, new.k * (new.m + new.n), old.k * (old.m + old.n))
    changed = dataclasses.replace(
        work,
        gemm=new,
        attention=_with_sizes(work.attention, new),
        flop=_scaled(work.flop, new.m * new.n * new.k, old.m * old.n * old.k),
        read_bytes=read,
        weight_bytes=_scaled(work.weight_bytes, new.n * new.k, old.n * old.k),
        write_bytes=_scaled(work.write_bytes, new.m * new.n, old.m * old.n),
    )
    return dataclasses.replace(changed, alignment_bytes=_alignment(work, changed))


def _with_sizes(attention: AttentionSizes | None, scores: Gemm) -> AttentionSizes | None:
    """The attention with the sizes of its score product changed."""
    if attention is None:
        return None
    kv_heads = attention.kv_heads * scores.batch // attention.heads
    return dataclasses.replace(
        attention, queries=scores.m, keys=scores.n, size=scores.k, heads=scores.batch, kv_heads=kv_heads
    )


def _scaled(count: int, by: int, of: int) -> int:
    """``count * by / of``, rounded."""
    return (2 * count * by + of) // (2 * of)


def _alignment(old: Work, new: Work) -> int:
    """The alignment of ``new``, where the channels are what decides that of ``old``; else unchanged."""
    if old.alignment_bytes != alignment_of(*channels(old), dtype=old.dtype):
        return old.alignment_bytes
    return alignment_of(*channels(new), dtype=new.dtype)


@functools.lru_cache(_REMEMBERED)
def retyped(work: Work, dtype: Precision) -> Work:
    """The work with operands of another type. With 8-bit operands the result is written in 16 bits."""
    ratio = ELEMENT_BYTES[dtype] / ELEMENT_BYTES[work.dtype]
    written = max(ELEMENT_BYTES[dtype], 2) / max(ELEMENT_BYTES[work.dtype], 2)
    changed = dataclasses.replace(
        work,
        dtype=dtype,
        accumulate_fp16=work.accumulate_fp16 and dtype == Precision.FP16,
        read_bytes=round(work.read_bytes * ratio),
        weight_bytes=round(work.weight_bytes * ratio),
        write_bytes=round(work.write_bytes * written),
    )
    if work.gemm is None or work.kind not in ("gemm", "conv"):
        return changed
    return dataclasses.replace(changed, alignment_bytes=_alignment(work, changed))


def at_batch(work: Work, batch: int, now: int) -> Work:
    """The work at another batch size. What does not depend on the batch (m is no multiple of it) stays as it is.

    A product of two activations has a matrix per sample, one with weights a row per sample.
    """
    gemm = work.gemm
    if gemm is not None:
        rows, count = (batch, 1) if work.weight_bytes else (1, batch)
        of_rows, of_count = (now, 1) if work.weight_bytes else (1, now)
        if gemm.m * rows % of_rows or gemm.batch * count % of_count:
            return work
        gemm = Gemm(gemm.m * rows // of_rows, gemm.n, gemm.k, gemm.batch * count // of_count)
    reduced = work.rows
    if reduced is not None and reduced.count % now == 0:
        reduced = dataclasses.replace(reduced, count=reduced.count // now * batch)
    return dataclasses.replace(
        work,
        gemm=gemm,
        attention=None if gemm is None else _with_sizes(work.attention, gemm),
        rows=reduced,
        flop=_scaled(work.flop, batch, now),
        read_bytes=_scaled(work.read_bytes, batch, now),
        write_bytes=_scaled(work.write_bytes, batch, now),
    )
