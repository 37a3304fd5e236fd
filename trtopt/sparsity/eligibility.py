"""Where 2:4 pays: one table, by backend, of what has a sparse kernel; and the gain the performance model predicts.

What NVIDIA says of TensorRT, none of it run here:

- Weights of convolutions and fully connected layers, each four input channels with two zeros, in FP16 or INT8; the
  builder times sparse and dense kernels and takes the faster. Developer guide, "Sparsity":
  https://docs.nvidia.com/deeplearning/tensorrt/archives/tensorrt-853/developer-guide/index.html#structured-sparsity
- Sparse kernels are faster from about 256 input and output channels on; a 3x3 convolution has nine times the input
  channels in this sense: https://github.com/NVIDIA/TensorRT/issues/3849, https://github.com/NVIDIA/TensorRT/issues/4065
- MatMul with a constant weight: not eligible in older releases (https://github.com/NVIDIA/TensorRT/issues/2271),
  listed in later builds' logs (https://github.com/NVIDIA/TensorRT/issues/2169, 4054).
- INT8 with Q/DQ: a user saw no sparse kernel chosen (https://github.com/NVIDIA/TensorRT/issues/4694, TensorRT 8.6 on
  Jetson); NVIDIA's own guide prunes and quantizes together:
  https://developer.nvidia.com/blog/sparsity-in-int8-training-workflow-and-best-practices-for-tensorrt-acceleration/
- ResNeXt-101, whose 3x3 convolutions have 32 groups: the same kernels and times with sparse weights as without:
  https://github.com/NVIDIA/TensorRT/issues/1403

Multiples of 16 (16-bit) and 32 (8-bit) in both channel counts are what cuSPARSELt, NVIDIA's library of such products,
asks for (as PyTorch checks them in ``torch/sparse/semi_structured.py``); TensorRT documents multiples of 4 alone.
TensorRT for RTX 1.7.1 was tried: with 2:4 weights its engines are byte for byte the same with the flag as without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from trtopt.hardware.spec import GpuSpec
from trtopt.judge.protocol import LEAST_GAIN
from trtopt.precision.qdq.existing import canonicalize_qdq, without_qdq
from trtopt.report.schema.analysis import SparseLayer, Sparsity
from trtopt.report.text.format import percent
from trtopt.roofline.constants import constants_for
from trtopt.roofline.layer import PredictedTime, layer_times
from trtopt.roofline.work import Layer, Work, sparse_work
from trtopt.sparsity.layers import SparseCandidate, SparseCandidates, candidates
from trtopt.support.precision import ELEMENT_BYTES, Precision

LEAST_CHANNELS = 256
"""Input channels (times taps) and output channels from which on NVIDIA found sparse kernels faster."""

ATTESTED_SPEED_UP = 1.31
"""The most that NVIDIA attests for a whole network: BERT in INT8 at batch 128, 1.12 to 1.31 times as fast."""

_NOTE = (
    "No sparse kernel was measured for this prediction. End to end, at most about 1.3 times as fast is attested (BERT "
    "in INT8 at batch 128: 1.12 to 1.31)."
)

_STEP_BYTES = 32
"""Both channel counts of a sparse product are multiples of this many bytes: 16 of FP16, 32 of INT8."""


@dataclass(frozen=True)
class _Place:
    """A node that reads a constant weight, and the kernel that computes it."""

    node: str
    layer: Layer
    work: Work
    time: PredictedTime
    gpu: GpuSpec


@dataclass(frozen=True)
class SparseRule:
    """One row of the table: a condition (a key of ``_CONDITIONS``), and whether there is a sparse kernel that may
    pay."""

    applies: str
    eligible: bool
    reason: str


RULES: dict[str, tuple[SparseRule, ...]] = {
    "tensorrt-rtx": (
        SparseRule("always", False, "TensorRT for RTX ignores sparse weights: its engine stays the same"),
    ),
    "tensorrt": (
        SparseRule("old-gpu", False, "the GPU has no Sparse Tensor Cores: they came with compute capability 8.0"),
        SparseRule("fused", False, "it is computed inside of another kernel"),
        SparseRule("grouped", False, "no sparse kernel for grouped convolutions: none was seen to be chosen"),
        SparseRule("3-d", False, "sparse convolutions are documented for up to two spatial axes"),
        SparseRule("fp32", False, "FP32 products run on CUDA cores, which skip no zeros"),
        SparseRule("tf32", False, "in TF32, Sparse Tensor Cores want one of two weights to be zero, not two of four"),
        SparseRule(
            "other-type", False, "TensorRT's documentation names FP16 and INT8 for sparse weights, not this type"
        ),
        SparseRule("uneven", False, "its channels are no multiples of 16 (INT8: 32): they do not fill sparse kernels"),
        SparseRule("small", False, f"below {LEAST_CHANNELS} channels in (times taps) or out dense kernels are as fast"),
        SparseRule("memory", False, "it is bound by the bytes it moves: sparse kernels skip arithmetic"),
        SparseRule("int8", True, "sparse INT8 kernels exist; with Q/DQ a user saw none chosen (see the tactic)"),
        SparseRule("product", True, "TensorRT lists such products as eligible, in older releases not (see the tactic)"),
        SparseRule(
            "always", True, "sparse FP16 convolutions exist; TensorRT takes one where it is faster (see the tactic)"
        ),
    ),
}
"""By backend, in order: the first row that applies to a node decides, and then the predicted gain."""


def weights_of(model: ir.Model, backend: str) -> SparseCandidates:
    """The weights of a model that can be 2:4, those that are quantized by their integers.

    Args:
        model: A model as loaded; not changed.
        backend: ``tensorrt`` or ``tensorrt-rtx``: how Q/DQ of the model is read.

    Raises:
        InvalidModelError: It is quantized in a way that cannot be read (:func:`.existing.canonicalize_qdq`).
    """
    mended = canonicalize_qdq(model, backend)
    return candidates(model if mended is None else without_qdq(mended.model))


def eligibility(found: SparseCandidates, layers: Sequence[Layer], gpu: GpuSpec, backend: str) -> Sparsity:
    """Say of every Conv, Gemm and MatMul whether 2:4 pays, and what all that do gain.

    A layer pays where the table has a sparse kernel and the performance model predicts at least 2 % less time
    (``LEAST_GAIN``) for its kernels.

    Args:
        found: The weights.
        layers: The kernels of the same network (:func:`trtopt.roofline.onnx_layers.layers_of_graph`), dense.
        gpu: The GPU.
        backend: ``tensorrt`` or ``tensorrt-rtx``.

    Raises:
        UsageError: The GPU has no units for the type of a layer.
    """
    works = list(dict.fromkeys(layer.work for layer in layers if layer.work is not None))
    constants = constants_for(gpu)
    times = dict(zip(works, layer_times(works, gpu, constants), strict=True))
    places = {
        name: _Place(name, layer, layer.work, times[layer.work], gpu)
        for layer in layers
        if layer.work is not None
        for name in layer.onnx_nodes
    }
    able = [places[name] for item in found.layers for name in item.nodes if name in places]
    wanted = list(dict.fromkeys(place.work for place in able if _rule(place, backend).eligible))
    sparse = dict(zip(wanted, layer_times([sparse_work(work) for work in wanted], gpu, constants), strict=True))
    rows = [
        _row(item, [places[name] for name in item.nodes if name in places], backend, sparse) for item in found.layers
    ]
    for name, reason in found.refused.items():
        time = places[name].time.predicted_us if name in places else 0.0
        rows.append(SparseLayer((name,), "", False, False, reason, time, time))
    total = sum(times[layer.work].predicted_us for layer in layers if layer.work is not None)
    saved = sum(row.dense_us - row.sparse_us for row in rows)
    beyond = total > ATTESTED_SPEED_UP * (total - saved)
    note = f"{_NOTE} What is predicted is beyond that: the most there can be." if beyond else _NOTE
    return Sparsity(backend, tuple(rows), total, total - saved, note)


def _row(
    item: SparseCandidate, places: Sequence[_Place], backend: str, sparse: Mapping[Work, PredictedTime]
) -> SparseLayer:
    """The verdict on a weight: it pays where it does for all the nodes that read it together."""

    def row(eligible: bool, reason: str, dense: float, after: float) -> SparseLayer:
        return SparseLayer(item.nodes, item.weight, item.sparse, eligible, reason, dense, after)

    if len(places) < len(item.nodes):
        return row(False, "its cost is not known", 0.0, 0.0)
    rules = [_rule(place, backend) for place in places]
    dense = sum(place.time.predicted_us for place in places)
    after = sum(
        sparse[place.work].predicted_us if rule.eligible else place.time.predicted_us
        for place, rule in zip(places, rules, strict=True)
    )
    rule = next((rule for rule in rules if rule.eligible), rules[0])
    gain = 1 - after / dense
    if rule.eligible and gain < LEAST_GAIN:
        return row(False, f"its predicted gain is {percent(gain)}: less than {percent(LEAST_GAIN)}", dense, dense)
    return row(rule.eligible, rule.reason, dense, after)


def _rule(place: _Place, backend: str) -> SparseRule:
    return next(rule for rule in RULES[backend] if _CONDITIONS[rule.applies](place))


def _group(place: _Place) -> int:
    return place.work.window.group if place.work.window is not None else 1


def _channels(place: _Place) -> tuple[int, int, int]:
    """Input channels, taps and output channels of a product or an ungrouped convolution."""
    gemm, window = place.work.gemm, place.work.window
    if gemm is None:
        raise ValueError(f"{place.node} is no product")
    taps = math.prod(window.kernel) if window is not None else 1
    return gemm.k // taps, taps, gemm.n


def _is_uneven(place: _Place) -> bool:
    inputs, _, outputs = _channels(place)
    return any(channels * ELEMENT_BYTES[place.work.dtype] % _STEP_BYTES for channels in (inputs, outputs))


def _is_small(place: _Place) -> bool:
    inputs, taps, outputs = _channels(place)
    return min(inputs * taps, outputs) < LEAST_CHANNELS


_CONDITIONS: dict[str, Callable[[_Place], bool]] = {
    "always": lambda place: True,
    "old-gpu": lambda place: not place.gpu.sparse_2_4,
    "fused": lambda place: place.layer.name != place.node or place.work.kind not in ("gemm", "conv", "depthwise"),
    "grouped": lambda place: _group(place) > 1,
    "3-d": lambda place: place.work.window is not None and len(place.work.window.kernel) > 2,
    "fp32": lambda place: place.work.dtype == Precision.FP32,
    "tf32": lambda place: place.work.dtype == Precision.TF32,
    "other-type": lambda place: place.work.dtype not in (Precision.FP16, Precision.INT8),
    "uneven": _is_uneven,
    "small": _is_small,
    "memory": lambda place: place.time.limiter == "memory",
    "int8": lambda place: place.work.dtype == Precision.INT8,
    "product": lambda place: place.work.kind == "gemm",
}
