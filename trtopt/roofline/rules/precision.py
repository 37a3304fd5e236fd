"""Rules about types: what a narrower one would win, what it cannot, and arithmetic the GPU does faster."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

from trtopt.graph.edit import constant_tensor_of, input_of, is_op, maker_of
from trtopt.report.text.format import count, time_text
from trtopt.roofline.rules.change import channels, retyped
from trtopt.roofline.rules.subject import Proposal, Subject
from trtopt.roofline.work import Layer, Work, sparse_work
from trtopt.support.precision import SIXTEEN_BIT_TYPES, Precision

_WORTH = 0.05
"""Share of the network's time that a change of precision must win."""
_MOSTLY = 0.5
_SPARSE_CHANNELS = 256
_SPARSE_TYPES: tuple[Precision, ...] = (Precision.FP16, Precision.INT8)
"""Those that TensorRT's documentation names for sparse weights."""


def precision_too_wide(subject: Subject) -> Iterator[Proposal]:
    """A narrower type would make the network faster.

    What:
        Most of the arithmetic is in FP32 or TF32 and FP16 is predicted to save at least 5 % of the
        time; or TF32 for FP32 products, on GPUs that have it.
    Why:
        FP32 products run on CUDA cores; in TF32 and FP16 they run on Tensor Cores, 2 to 16 times as
        fast, and FP16 halves the bytes of everything else.
    Example:
        ResNet-50 asked for in FP32 on an A100: 19.5 TFLOP/s, of which TF32 makes 156 and FP16 312.
    Remedy:
        `--fp16` (or `--bf16`), with samples to keep what would overflow in FP32; `--tf32` changes
        no tensor and rounds the operands of products to 10 bits of mantissa. The gain is all layers
        predicted in the narrower type.
    """
    flop: dict[Precision, int] = defaultdict(int)
    for _, work in subject.costed():
        flop[work.dtype] += work.flop if work.gemm else 0
    asked = max(flop, key=lambda dtype: flop[dtype], default=None)
    narrower: dict[Precision, tuple[Precision, ...]] = {
        Precision.FP32: (Precision.TF32, Precision.FP16),
        Precision.TF32: (Precision.FP16,),
    }
    if asked is None:
        return
    for dtype in narrower.get(asked, ()):
        if dtype not in subject.gpu.tflops:
            continue
        subject.predict_all([retyped(work, dtype) for work in subject.distinct if work.dtype.is_wide])
        gains = {}
        for layer, work in subject.costed():
            changed = dtype != Precision.TF32 or (work.gemm is not None and work.kind in ("gemm", "conv", "attention"))
            if work.dtype.is_wide and changed:
                gains[layer.name] = subject.gain(layer, retyped(work, dtype))
        won = sum(gains.values())
        if won >= _WORTH * subject.total_us and won > 0:
            yield Proposal(
                severity="warning",
                message=f"in {asked.upper()} the network takes {subject.total_us:.0f} us; {dtype.upper()} would save"
                f" {100 * won / subject.total_us:.0f} %",
                remedy=f"{dtype.upper()} where accuracy allows",
                nodes=(),
                gains=gains,
                act=("build", f"--{dtype}", *(("--calib", "samples.npz") if dtype != Precision.TF32 else ())),
            )


def precision_cannot_help(subject: Subject) -> Iterator[Proposal]:
    """INT8 or FP8 would not make this network faster.

    What:
        A network in FP16 or BF16 where 8-bit products are predicted to save less than 5 % of the
        time, at most; or one in INT8 or FP8 that is less than 5 % faster than FP16.
    Why:
        An 8-bit product has twice the arithmetic rate and half the bytes of weights. Where a layer
        waits for its launch or for activations, which the layers around it read and write in 16
        bits, that wins nothing; quantizing costs kernels of its own.
    Example:
        MobileNetV2: depthwise layers stay in FP16, the 1x1 layers move bytes. On TensorRT for RTX
        its INT8 engine has 90 kernels instead of 56 and moves more.
    Remedy:
        Stay with FP16, and spend the effort on the batch or on fewer kernels. Information: the
        figure is the most that could be won, every eligible layer predicted with 8-bit operands at
        no cost for quantizing them.
    """
    eight = next((dtype for _, dtype in _dominant(subject) if dtype in (Precision.INT8, Precision.FP8)), None)
    total = subject.total_us
    if eight is not None:
        wide = sum(
            subject.predict(retyped(work, Precision.FP16) if work.dtype == eight else work)
            for _, work in subject.costed()
        )
        if wide - total < _WORTH * wide:
            yield Proposal(
                severity="hint",
                message=f"{eight.upper()} is predicted at {total:.0f} us, FP16 at {wide:.0f} us: it does not pay",
                remedy="stay with FP16",
                nodes=(),
            )
        return
    kind: Precision = Precision.INT8
    eligible = list(_eligible(subject))
    if not eligible or kind not in subject.gpu.tflops or subject.is_partial:
        return
    subject.predict_all([retyped(work, kind) for _, work in eligible])
    most = sum(subject.gain(layer, retyped(work, kind)) for layer, work in eligible)
    if most < _WORTH * total:
        bound = sum(row.predicted_us for row in subject.rows if row.limiter != "math") / total
        reason = f": {100 * bound:.0f} % of the time is bound by memory or launches" if bound > _MOSTLY else ""
        yield Proposal(
            severity="info",
            message=f"INT8 would save {100 * most / total:.1f} % at most{reason}",
            remedy="stay with 16 bits",
            nodes=(),
        )


def _dominant(subject: Subject) -> list[tuple[int, Precision]]:
    """Flop of products by type, most first."""
    flop: dict[Precision, int] = defaultdict(int)
    for _, work in subject.products():
        flop[work.dtype] += work.flop
    return sorted(((count, dtype) for dtype, count in flop.items()), reverse=True)[:1]


def _eligible(subject: Subject) -> Iterator[tuple[Layer, Work]]:
    """Layers in 16 bits that have an 8-bit kernel: products and convolutions with constant weights."""
    for layer, work in subject.products():
        if work.dtype in SIXTEEN_BIT_TYPES and _has_constant_weight(subject, layer):
            yield layer, work


def eight_bit(subject: Subject) -> Iterator[Proposal]:
    """Layers that INT8 would make faster.

    What:
        A network in FP16 or BF16 that is predicted to be faster by 5 % or more with the nodes in
        INT8 that the compiler's table names, as `--precision int8` predicts it.
    Why:
        Where arithmetic is the limit, INT8 doubles its rate, and halves the bytes of what is read.
        A quantizer costs next to nothing where it is fused into the layer before; a layer between
        others in 16 bits loses.
    Example:
        ResNet-50 at batch 8 on an RTX 4090: 708 us in FP16, 526 in INT8.
    Remedy:
        `trtopt build --int8` with calibration samples keeps INT8 where its compiler makes a faster
        engine of it, region by region; accuracy has to be checked. Information: the gain is that of
        the whole network with the fusions that TensorRT documents.
    """
    times = subject.int8_us
    gains = {row.name: row.predicted_us - times[row.name] for row in subject.rows if row.name in times}
    won = sum(gains.values())
    if won >= _WORTH * subject.total_us and won > 0:
        faster = [layer for layer in subject.layers if gains.get(layer.name, 0.0) > 0]
        yield Proposal(
            severity="info",
            message=f"INT8 is predicted at {time_text(subject.total_us - won)} in place of"
            f" {time_text(subject.total_us)}: {100 * won / subject.total_us:.0f} % less,"
            f" in {count(len(faster), 'layer')}, by the fusions that TensorRT documents",
            remedy="INT8 where it makes the engine faster, with ranges from samples; check the accuracy. TensorRT for"
            " RTX fuses fewer quantizers: a build for it says what it gains there",
            nodes=subject.names(faster),
            gains=gains,
        )


def precision_hole(subject: Subject) -> Iterator[Proposal]:
    """Layers that stay in FP32 in a network of a narrower type.

    What:
        Layers whose arithmetic is in FP32 although more than half of the network's arithmetic is in
        a narrower type. Quantizers and Casts, at the network's inputs for instance, are none.
    Why:
        FP32 moves twice the bytes, products in it run on CUDA cores, and a Cast on each border is a
        pass over the data or breaks a fusion. Such a hole is often left over from training: a Cast
        to float that was meant for one operator.
    Example:
        Attention scores cast to FP32 around the softmax: the fused attention kernel is lost, and in
        TensorRT for RTX the layer moves three times the bytes.
    Remedy:
        Remove the Casts where accuracy allows; keep FP32 where sums would overflow (`trtopt build`
        decides per node, from samples, and says why). The gain is those layers predicted in FP16.
    """
    flop: dict[Precision, int] = defaultdict(int)
    for _, work in subject.costed():
        flop[work.dtype] += work.flop
    narrow = sum(count for dtype, count in flop.items() if not dtype.is_wide)
    if not narrow or narrow <= _MOSTLY * sum(flop.values()):
        return
    target: Precision = Precision.BF16 if flop[Precision.BF16] > flop[Precision.FP16] else Precision.FP16
    holes = [
        (layer, work)
        for layer, work in subject.costed()
        if work.dtype.is_wide and work.flop > 0 and not _only_converts(subject, layer)
    ]
    if holes:
        yield Proposal(
            severity="warning",
            message=f"{len(holes)} layer{'s stay' if len(holes) > 1 else ' stays'} in FP32",
            remedy=f"{target.upper()} there, where accuracy allows",
            nodes=subject.names(layer for layer, _ in holes),
            gains={layer.name: subject.gain(layer, retyped(work, target)) for layer, work in holes},
        )


def _only_converts(subject: Subject, layer: Layer) -> bool:
    """Whether a layer does nothing but change types: the border of the network, or of a hole."""
    nodes = [subject.node[name] for name in layer.onnx_nodes if name in subject.node]
    return bool(nodes) and all(is_op(node, "QuantizeLinear", "DequantizeLinear", "Cast") for node in nodes)


def sparsity(subject: Subject) -> Iterator[Proposal]:
    """Layers that 2:4 structured sparsity would make faster.

    What:
        The GPU has sparse Tensor Cores; a convolution or product with constant weights in FP16 or
        INT8 has at least 256 input and 256 output channels, is limited by arithmetic and is
        predicted to be faster with the sparse rate; 5 % of the network's time in all.
    Why:
        With two of four neighbouring weights zero, Tensor Cores skip half of the multiply-adds and
        half of the weights need not be read. Everything else costs what it did: a layer bound by
        memory or launch wins nothing.
    Example:
        BERT in INT8 at batch 128: 1.12 to 1.31 times as fast end to end.
    Remedy:
        `trtopt analyze --sparse` says for each layer whether it pays. Prune the weights 2:4 and
        fine-tune: pruning by magnitude alone ruins most networks. Information: the gain is the layer
        predicted with twice the arithmetic rate and the compressed weight, everything else as it is.
        No sparse kernel was measured for it; end to end up to about 1.3 times has been. TensorRT
        for RTX gains nothing.
    """
    if not subject.gpu.sparse_2_4:
        return
    able = [(layer, work) for layer, work in subject.products() if _can_be_sparse(subject, layer, work)]
    if not able:
        return
    subject.predict_all([sparse_work(work) for _, work in able])
    gains = {layer.name: subject.gain(layer, sparse_work(work)) for layer, work in able}
    layers = [layer for layer, _ in able if gains[layer.name] > 0]
    gains = {layer.name: gains[layer.name] for layer in layers}
    won = sum(gains.values())
    if won >= _WORTH * subject.total_us:
        yield Proposal(
            severity="info",
            message=f"2:4 sparsity would save {100 * won / subject.total_us:.0f} % of the time at most, in"
            f" {count(len(layers), 'layer')}",
            remedy="prune them 2:4 and fine-tune, for TensorRT (TensorRT for RTX ignores it); whole networks were"
            " measured up to 1.3 times as fast",
            nodes=subject.names(layers),
            gains=gains,
        )


def _can_be_sparse(subject: Subject, layer: Layer, work: Work) -> bool:
    if work.dtype not in _SPARSE_TYPES or subject.row[layer.name].limiter != "math":
        return False
    group = work.window.group if work.window else 1
    return group == 1 and min(channels(work)) >= _SPARSE_CHANNELS and _has_constant_weight(subject, layer)


def _has_constant_weight(subject: Subject, layer: Layer) -> bool:
    """Whether a product's second operand is constant, through its quantizers. A layer without nodes is taken at its
    word: its weight bytes are constants."""
    node = subject.main(layer)
    if node is None:
        return True
    value = input_of(node, 1)
    maker = maker_of(value)
    while is_op(maker, "DequantizeLinear", "QuantizeLinear", "Transpose"):
        value = maker.inputs[0]
        maker = maker_of(value)
    return constant_tensor_of(value) is not None


def fp16_accumulate(subject: Subject) -> Iterator[Proposal]:
    """FP16 products that are summed in FP32 on a GPU that is twice as fast with FP16 sums.

    What:
        A GeForce GPU (its table has a higher rate for FP16 accumulators than for FP32 ones) and
        FP16 products limited by arithmetic that are predicted with FP32 accumulators. Convolutions
        are predicted with FP16 ones: TensorRT uses them by itself.
    Why:
        GeForce GPUs run FP16 products with FP32 accumulators at half rate; data-centre GPUs do not.
    Example:
        RTX 4090: 165 TFLOP/s with FP32 accumulators, 330 with FP16 ones.
    Remedy:
        Look at the tactics' names in the engine's layers. The compiler chooses the accumulator, and
        often the fast one: TensorRT 10 did for nearly all kernels of AlexNet, ResNet-18 and
        MobileNetV2 on an RTX 3060 (f16f16_f16, h1688 in the name). Then the network is faster than
        predicted. Where it did not, Casts to FP32 around the product are a reason: they ask for
        FP32 sums. Information: the gain is the layers predicted with FP16 accumulators, and
        accuracy has to allow it.
    """
    rates = subject.gpu.fma_per_clock_per_sm
    if rates.get("fp16_acc16", 0) <= rates.get("fp16_acc32", 0):
        return
    gains: dict[str, float] = {}
    layers = []
    for layer, work in subject.costed():
        if (
            work.dtype != Precision.FP16
            or work.gemm is None
            or work.accumulate_fp16
            or work.kind not in ("gemm", "conv")
        ):
            continue
        won = subject.gain(layer, dataclasses.replace(work, accumulate_fp16=True))
        if subject.row[layer.name].limiter == "math" and won > 0:
            gains[layer.name] = won
            layers.append(layer)
    if layers:
        yield Proposal(
            severity="info",
            message=f"{count(len(layers), 'FP16 layer')} predicted with FP32 sums, which this GPU runs at half rate",
            remedy="see in the tactics' names whether the compiler chose FP16 accumulators (f16f16_f16, h1688)",
            nodes=subject.names(layers),
            gains=gains,
        )
