"""The least time of a kernel's necessary work: what is left of it whatever the compiler fuses, and however well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trtopt.hardware.spec import GpuSpec
from trtopt.roofline.attention import fitted_time
from trtopt.roofline.batch import Batch
from trtopt.roofline.constants import Constants, constants_for
from trtopt.roofline.gemm import Array
from trtopt.roofline.quantized import main_loop_share
from trtopt.roofline.work import Work


@dataclass(frozen=True)
class Necessary:
    """Least times of kernels; each field an array [kernels], in microseconds.

    Attributes:
        math: Its products at the rate that an endless tile of their type reaches on this GPU, those of an attention for
            the pairs that its mask leaves; 0 of a kernel without a product.
        memory: The bytes at the bandwidth that a large stream reaches; at that of the L2 cache, as far as the
            prediction has them there.
    """

    math: Array
    memory: Array

    @property
    def total(self) -> Array:
        """The slower of the two: kernels run one after another, so that each has a bound of its own."""
        return np.maximum(self.math, self.memory)


def necessary_times(works: Sequence[Work], needed_bytes: Sequence[int], gpu: GpuSpec) -> Necessary:
    """The least times of kernels, by the constants that their times are predicted with.

    Each is at most the predicted time without the launch: the same rates without what keeps a kernel from reaching them
    (tiles and waves, filling the pipeline, alignment, the kind of kernel, a stream's start, a long kernel's power).

    Args:
        works: What the kernels do.
        needed_bytes: Of what each moves, what has to be moved.
        gpu: The GPU.

    Example:
        >>> from trtopt.hardware.spec import find_gpu
        >>> from trtopt.roofline.work import Gemm
        >>> from trtopt.support.precision import Precision
        >>> product = Gemm(4096, 4096, 4096)
        >>> work = Work("gemm", product.flop, 2 * 4096**2, 2 * 4096**2, 2 * 4096**2, Precision.FP16, gemm=product)
        >>> bound = necessary_times([work], [work.weight_bytes], find_gpu("A100"))
        >>> round(float(bound.math[0])), round(float(bound.memory[0]))
        (441, 18)
    """
    c = constants_for(gpu)
    batch = Batch.of(works, gpu)
    return Necessary(_math(batch, c), _memory(batch, np.array(needed_bytes, dtype=np.float64), c))


def _math(batch: Batch, c: Constants) -> Array:
    kinds = np.array([_rate_of(work) for work in batch.works])
    loop = np.array([main_loop_share(work, c) for work in batch.works])
    gain = np.where(batch.saving > 1, c.winograd_gain, 1.0)
    tensor_cores = batch.rate * batch.speed * gain * c.peak_share * loop
    rate = np.where(kinds == "product", tensor_cores, batch.fp32_rate * c.cuda_core_share) * batch.sustained_share
    found = np.where(kinds == "none", 0.0, batch.flop / rate)
    fused = kinds == "attention"
    if fused.any():
        works = [work for work in batch.works if work.attention is not None]
        times = fitted_time(works, batch.rate[fused], batch.sustained_share, c, batch.compute_capability)
        found[fused] = times * batch.steps[fused]
    return found


def _rate_of(work: Work) -> str:
    """Whose rate a kernel's products run at."""
    if work.attention is not None:
        return "attention"
    if work.gemm is None:
        return "none"
    return "CUDA cores" if work.kind == "depthwise" else "product"


def _memory(batch: Batch, needed: Array, c: Constants) -> Array:
    moved = np.minimum(needed, [work.moved_bytes for work in batch.works])
    share = max(c.dram_share, c.stream_share)
    step = moved / batch.steps * c.dram_share / share
    chip = batch.chip
    cold = np.minimum(batch.cold * batch.moved * batch.steps / np.maximum(moved, 1.0), 1.0)
    resident = (1 - cold) / (1 + (step / (c.l2_share * chip.l2_bytes)) ** 3)
    l2 = c.l2_bytes_per_clock * chip.clock * batch.sustained_share * chip.sm
    found: Array = step * ((1 - resident) / (c.dram_share * chip.bandwidth) + resident / l2) * batch.steps
    return found
