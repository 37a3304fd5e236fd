"""Why a layer takes longer than it could, as data: what its kernel's name, its formats and the performance model say.

Times are microseconds that a reason is estimated to account for. Reasons of one layer may overlap.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from trtopt.engine.achieved import uses_tensor_cores
from trtopt.hardware.spec import GpuSpec
from trtopt.profiling.measured import MeasuredLayer
from trtopt.report.schema.analysis import LayerRow
from trtopt.report.schema.profile import Deviation, Launching, Reason
from trtopt.report.text.format import percent, time_text
from trtopt.roofline.constants import constants_for
from trtopt.roofline.layer import PredictedTime, layer_times
from trtopt.roofline.work import Work
from trtopt.support.precision import Precision

NARROW_BYTES: dict[str, int] = {Precision.FP16: 2, Precision.BF16: 2, Precision.INT8: 1, Precision.FP8: 1}
"""Bytes of an element of the types below 32 bits."""

_PRODUCTS = ("gemm", "conv", "attention", "recurrent")


@dataclass(frozen=True)
class Network:
    """What the reasons of one layer depend on beyond it.

    Attributes:
        gpu: What it ran on; None for a CPU.
        launching: How the layers were launched and timed.
        narrow: The type most of the arithmetic of its products is in, where that is one of 8 or 16 bits; else empty.
        made: Names of the tensors that its layers write.
        clock_share: Measured clock over that of the datasheet, at most 1.
    """

    gpu: GpuSpec | None
    launching: Launching = "profile"
    narrow: str = ""
    made: frozenset[str] = frozenset()
    clock_share: float = 1.0


@dataclass(frozen=True)
class LayerInNetwork:
    """A layer, its prediction (None without one), and the network it is of."""

    layer: MeasuredLayer
    row: LayerRow | None
    network: Network

    @property
    def product(self) -> Work | None:
        """Its work, where that is a matrix product that Tensor Cores could do."""
        work = self.layer.work
        return work if work is not None and work.gemm is not None and work.kind in _PRODUCTS else None

    def time(self, work: Work, launching: Launching) -> PredictedTime:
        """The prediction of other work on the same GPU."""
        gpu = self.network.gpu
        if gpu is None:
            raise ValueError("no GPU")
        return layer_times((work,), gpu, constants_for(gpu), timing=launching)[0]

    @property
    def reads_network_input(self) -> bool:
        """Whether it reads a tensor that no layer writes."""
        return any(item.name not in self.network.made for item in self.layer.info.inputs)


def network_of(layers: Sequence[MeasuredLayer], gpu: GpuSpec | None, launching: Launching, clock: float) -> Network:
    """What all layers together say."""
    flop: dict[str, int] = {}
    for layer in layers:
        if layer.work is not None and layer.work.gemm is not None:
            flop[layer.work.dtype] = flop.get(layer.work.dtype, 0) + layer.work.flop
    most = max(flop, key=lambda dtype: flop[dtype], default="")
    made = frozenset(item.name for layer in layers for item in layer.info.outputs)
    return Network(gpu, launching, most if most in NARROW_BYTES else "", made, clock)


FAR = 1.2
"""A layer is far from its prediction from this ratio on, either way: the model's error is 13 to 18 % per layer on
engines it was not fitted to (``benchmarks/predictor``)."""

LEAST_US = 1.0
"""Differences below this are within the resolution of a profile (1.024 us where one run was timed)."""

_WAVE_SHARE = 0.8
"""A last wave is called a tail where it leaves more than a fifth of all waves' slots empty."""

_ALIGNED_BYTES = 16
_QDQ = re.compile(r"(?:de)?quantizelinear", re.IGNORECASE)
_REFORMAT = re.compile(r"^reformat|reformatting copynode", re.IGNORECASE)
_FIRST_LAYER = re.compile(r"first_layer|r\d+s\d+c4")
_WIDE = "Float"
_PACKED = re.compile(r"channel % (\d+) == 0|(four|eight|sixteen|thirty-two) wide", re.IGNORECASE)


Why = Iterator[tuple[float, str, str]]
"""Microseconds a reason accounts for, what is so, and what to do."""


def deviations(subject: LayerInNetwork) -> tuple[Deviation, ...]:
    """Every reason that holds for a layer, the most time first."""
    if subject.layer.measured_us <= 0:
        return ()
    rules = REASONS if subject.network.gpu is not None else {}
    found = [Deviation(name, *why) for name, rule in rules.items() for why in rule(subject)]
    found += _against_prediction(subject, found)
    return tuple(sorted(found, key=lambda item: -item.us))


def no_tensor_core(subject: LayerInNetwork) -> Why:
    """A matrix product that does not run on Tensor Cores.

    What:
        A convolution or matrix product whose kernel's name says CUDA cores (simt, scudnn, sgemm, ffma,
        DP4A), although the GPU has Tensor Cores for a type it could use.
    Why:
        Tensor Cores multiply 8 to 32 times as many numbers per clock. TensorRT takes CUDA cores where
        the type has no Tensor Core kernel (FP32 without TF32), or sizes or formats fit none.
    Example:
        INT8 on three input channels: `ampere_fp32_icudnn_int8x4_...`.
    Remedy:
        FP32: --fp16 or --tf32. A first layer of three channels: feed four (--io NAME:fp16:hwc4). Others:
        channels in multiples of 8 (FP16) or 16 (INT8). The gain is the difference to what the layer is
        predicted to take on Tensor Cores, timed in the same way.
    """
    work, layer, gpu = subject.product, subject.layer, subject.network.gpu
    if work is None or gpu is None or uses_tensor_cores(layer.info.tactic) is not False:
        return
    dtype = work.dtype
    if dtype == Precision.FP32:
        dtype = Precision.TF32 if Precision.TF32 in gpu.tflops else Precision.FP16
    if dtype not in gpu.tflops and dtype != Precision.BF16:
        return
    if work.gemm is not None and min(work.gemm.m, work.gemm.n) == 1:
        return  # a matrix by a vector: bound by the matrix's bytes on any core
    us = layer.measured_us - subject.time(replace(work, dtype=dtype), subject.network.launching).predicted_us
    remedy = "give it channels in multiples of 8 (FP16) or 16 (INT8)"
    if _channels(layer) < 4 and work.window is not None:
        remedy = "feed four channels in the layer's own format (--io NAME:fp16:hwc4), or leave it in FP16"
    elif work.dtype == Precision.FP32:
        remedy = "build it with --fp16 or --tf32"
    if us >= LEAST_US:
        yield us, f"{work.dtype.upper()} product on CUDA cores: kernel {layer.info.tactic}", remedy


def reformat_copy(subject: LayerInNetwork) -> Why:
    """A kernel that only changes a tensor's format or type.

    What:
        A layer of type Reformat that takes time.
    Why:
        Two neighbouring layers want different memory formats or types, or the network's inputs and
        outputs have others than the layers inside.
    Example:
        "Reformatting CopyNode for Input Tensor 0 to Conv_0": FP32 NCHW in, FP16 with channels last out.
    Remedy:
        At the borders of the network, feed and take what the layers use: --io NAME:fp16:hwc8. Inside,
        let neighbours run in one type.
    """
    info = subject.layer.info
    if _is_reformat(subject.layer):
        before, after = (
            " ".join(dict.fromkeys(t.format or t.dtype for t in side)) for side in (info.inputs, info.outputs)
        )
        remedy = "let the layers before and behind it run in one type and format"
        if subject.reads_network_input:
            remedy = "feed what the first layer reads: --io NAME:fp16:hwc4 (or hwc8)"
        yield subject.layer.measured_us, f"copy from {before or '?'} to {after or '?'}", remedy


def unfused_qdq(subject: LayerInNetwork) -> Why:
    """A quantizer or dequantizer that is a kernel of its own.

    What:
        A layer that computes QuantizeLinear or DequantizeLinear nodes and nothing else.
    Why:
        It reads and writes a whole tensor to round it. TensorRT fuses quantizers into the layer before
        or behind them where the graph lets it.
    Example:
        A network input quantized at its start; a quantizer behind a Concat.
    Remedy:
        Move Q/DQ next to the layers they serve, or leave these in 16 bits: `trtopt build --int8` places
        them by what the compiler fuses.
    """
    names = subject.layer.info.onnx_nodes or (subject.layer.info.name,)
    if _only_quantizes(subject.layer):
        remedy = "place Q/DQ where it is fused: `trtopt build --int8` on the model without them"
        if subject.reads_network_input:
            remedy = "leave the first layer in FP16, as `trtopt build --int8` does, or feed it quantized"
        alone = names == (subject.layer.info.name,)
        message = "only quantizes" if alone else f"only quantizes: {', '.join(names[:3])}"
        yield subject.layer.measured_us, message, remedy


def misaligned_channels(subject: LayerInNetwork) -> Why:
    """A product whose rows are no multiples of 16 bytes.

    What:
        The channels (or k and n) of a product times the bytes of its type are no multiple of 16.
    Why:
        Tensor Core kernels load 16 bytes at a time; others pad or load less.
    Example:
        61 channels in FP16: 122 bytes.
    Remedy:
        Pad the channels: recipe misaligned-channels of `trtopt build`, or a multiple of 8 (FP16) or 16
        (INT8) when the network is trained. The gain is predicted.
    """
    work = subject.product
    if work is not None and work.alignment_bytes < _ALIGNED_BYTES:
        better = replace(work, alignment_bytes=_ALIGNED_BYTES)
        us = subject.time(work, "graph").predicted_us - subject.time(better, "graph").predicted_us
        if us >= LEAST_US:
            message = f"rows of its tensors are aligned to {work.alignment_bytes} bytes, not {_ALIGNED_BYTES}"
            yield us, message, "pad the channels: recipe misaligned-channels of `trtopt build`"


def padded_input(subject: LayerInNetwork) -> Why:
    """A first layer that computes channels the image does not have.

    What:
        A convolution of fewer than four input channels in a format that packs them in fours or more,
        or in a kernel made for that (`first_layer`, `c4` in its name).
    Why:
        Tensor Core kernels want at least four channels: those missing are zeros, and a copy writes them.
    Example:
        An RGB image in `Channel major FP16 format where channel % 4 == 0`.
    Remedy:
        Feed four channels in the format of the layer (--io NAME:fp16:hwc4), so that the copy goes away.
    """
    work, info = subject.product, subject.layer.info
    if work is None or work.window is None or work.gemm is None or not info.inputs:
        return
    channels, form = _channels(subject.layer), info.inputs[0].format
    if channels < 4 and (_FIRST_LAYER.search(info.tactic) or _PACKED.search(form)):
        kernel = f"kernel {info.tactic}" if info.tactic else f"format {form}"
        remedy = f"feed four channels in the layer's own format: --io NAME:{work.dtype}:hwc4"
        yield 0.0, f"{channels} input channels are computed as at least 4: {kernel}", remedy


def tail_wave(subject: LayerInNetwork) -> Why:
    """Thread blocks that do not fill the GPU to the end.

    What:
        A product bound by arithmetic whose last wave of thread blocks leaves more than a fifth of all
        slots empty, with the tile the model thinks is fastest.
    Why:
        A wave takes as long with one block as with all.
    Example:
        117 tiles on the 108 SMs of an A100: two waves, 54 % used.
    Remedy:
        Another batch size or channel count: `trtopt analyze --batch-sweep`. The time is at most that of
        the empty slots.
    """
    row = subject.row
    if row is not None and row.tiles and row.limiter == "math" and row.wave_efficiency < _WAVE_SHARE:
        us = row.math_us * (1 / row.wave_efficiency - 1)
        slots = f"{row.tiles} tiles in {row.waves} wave{'s' if row.waves > 1 else ''}"
        message = f"{slots} use {percent(row.wave_efficiency)} of the GPU"
        yield min(us, subject.layer.measured_us), message, "try other batch sizes: `trtopt analyze --batch-sweep`"


def launch_bound(subject: LayerInNetwork) -> Why:
    """A kernel that is over about as soon as it has started.

    What:
        A layer whose launch and idle SMs are predicted to take at least half of its time in a CUDA
        graph.
    Why:
        Starting a kernel takes 2 to 4 us, whatever it does, and a small one leaves most SMs idle.
    Example:
        An element-wise kernel on a vector.
    Remedy:
        A larger batch, or fewer kernels. The time is that of the launch: at most what fusing the layer
        into another would win.
    """
    work = subject.layer.work
    if work is None:
        return
    time = subject.time(work, "graph")
    if time.limiter == "latency":
        busy = max(time.math_us, time.memory_us)
        message = f"{time_text(time.predicted_us)} predicted in a CUDA graph, {time_text(busy)} of it work"
        yield min(time.latency_us, subject.layer.measured_us), message, "a larger batch, or fewer kernels"


def wide_tensors(subject: LayerInNetwork) -> Why:
    """A layer that reads or writes FP32 between layers of fewer bits.

    What:
        A layer with an FP32 activation in an engine whose products run in 8 or 16 bits. Copies and
        quantizers are reasons of their own.
    Why:
        FP32 is two to four times the bytes, and the layer behind it has to convert. An INT8 kernel that
        writes FP32 is a slower one.
    Example:
        A convolution in INT8 that writes FP32 for a MaxPool in FP32, because Q/DQ stands behind the pool.
    Remedy:
        Let the layer run in the type of its neighbours: Q/DQ on the residual and behind the pooling, FP16
        instead of FP32 for what stays unquantized. The time is that of the extra bytes; for a product that
        is slower than predicted, what it is slower.
    """
    info, network, gpu = subject.layer.info, subject.network, subject.network.gpu
    if gpu is None or not network.narrow or _is_reformat(subject.layer) or _only_quantizes(subject.layer):
        return
    wide = [item for item in (*info.inputs, *info.outputs) if item.dtype == _WIDE and item.name in network.made]
    elements = sum(math.prod(max(dim, 1) for dim in item.shape) for item in wide)
    us = elements * (4 - NARROW_BYTES[network.narrow]) / (gpu.bandwidth_gbs * 1e3)
    if subject.product is not None and subject.row is not None:
        us = max(us, subject.layer.measured_us - subject.row.predicted_us)
    if wide and us >= LEAST_US:
        names = ", ".join(dict.fromkeys(item.name for item in wide))
        remedy = f"let it run in {network.narrow.upper()}: Q/DQ behind it or on its residual, FP16 for what has none"
        yield min(us, subject.layer.measured_us), f"FP32 tensors among {network.narrow.upper()} layers: {names}", remedy


def low_clock(subject: LayerInNetwork) -> Why:
    """The GPU ran below the clock of its datasheet.

    What:
        The clock recorded during the run is less than 95 % of the one the prediction is made with.
    Why:
        A power or temperature limit, or a clock that was locked lower.
    Example:
        A 70 W card after a minute of work.
    Remedy:
        Look at the recorded temperature and power; compare runs at one locked clock.
    """
    share = subject.network.clock_share
    if share < 0.95 and subject.row is not None and subject.row.limiter == "math":
        message = f"the clock was {percent(share)} of the datasheet's"
        remedy = "look at temperature and power in the report; compare runs at one locked clock"
        yield subject.layer.measured_us * (1 - share), message, remedy


Rule = Callable[[LayerInNetwork], Why]

REASONS: dict[Reason, Rule] = {
    "no-tensor-core": no_tensor_core,
    "reformat-copy": reformat_copy,
    "unfused-qdq": unfused_qdq,
    "misaligned-channels": misaligned_channels,
    "padded-input": padded_input,
    "tail-wave": tail_wave,
    "launch-bound": launch_bound,
    "wide-tensors": wide_tensors,
    "low-clock": low_clock,
}

_FAR_PAGE = f"""A layer that takes {{}} than predicted.

What:
    Its measured time is {{}} its prediction by a factor of {FAR} or more, and by {LEAST_US:g} us.
Why:
    The prediction is a model of what such a kernel takes on this device. What the layer's other reasons
    do not explain is a kernel that could be better, or something the model does not know.
Example:
    A kernel that TensorRT chose for its sum with a neighbour; a convolution by Winograd.
Remedy:
    Look at the kernel's name, formats and sizes in the report.
"""

PAGES: dict[str, str] = {
    **{name: inspect.getdoc(rule) or "" for name, rule in REASONS.items()},
    "slower-than-predicted": _FAR_PAGE.format("longer", "above").rstrip(),
    "faster-than-predicted": _FAR_PAGE.format("less", "below").rstrip(),
}
"""The page of every reason by name: a line of summary, then headings, as of the rules of ``trtopt analyze``."""

_MEASURED_ONLY: tuple[Reason, ...] = ("no-tensor-core", "low-clock", "reformat-copy", "unfused-qdq", "wide-tensors")
"""Reasons that explain a difference to the prediction, which knows the others."""


def _against_prediction(subject: LayerInNetwork, found: Sequence[Deviation]) -> Iterator[Deviation]:
    """How far a layer is from its prediction, beyond what its other reasons explain."""
    if subject.row is None or subject.row.predicted_us <= 0:
        return
    measured, predicted = subject.layer.measured_us, subject.row.predicted_us
    if abs(measured - predicted) < LEAST_US or max(measured / predicted, predicted / measured) < FAR:
        return
    text = f"{time_text(measured)} measured, {time_text(predicted)} predicted"
    tactic = subject.layer.info.tactic
    if tactic:
        text += f", kernel {tactic}"
    if measured < predicted:
        yield Deviation("faster-than-predicted", 0.0, text, "nothing to change: the prediction is off here")
        return
    explained = sum(item.us for item in found if item.reason in _MEASURED_ONLY)
    left = measured - predicted - explained
    if left >= LEAST_US:
        yield Deviation(
            "slower-than-predicted", left, text, "look at the kernel's name, formats and sizes in the report"
        )


def _is_reformat(layer: MeasuredLayer) -> bool:
    info = layer.info
    return bool(_REFORMAT.search(info.type) or _REFORMAT.search(info.name)) and not _QDQ.search(info.name)


def _only_quantizes(layer: MeasuredLayer) -> bool:
    return all(_QDQ.search(name) for name in layer.info.onnx_nodes or (layer.info.name,))


def _channels(layer: MeasuredLayer) -> int:
    """Channels of what a layer reads, [N, C, ...]; many where that is not told."""
    shape = layer.info.inputs[0].shape if layer.info.inputs else ()
    return shape[1] if len(shape) >= 3 and shape[1] > 0 else 1 << 16
