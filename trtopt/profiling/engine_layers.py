"""The layers of an engine with their work and times, from the inspector's entries and what a profiler reported.

Nothing is guessed: a layer that does not tell its sizes, or whose inside is hidden (Myelin's ForeignNode, plugins,
fusions made at run time), has no work.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from trtopt.engine.achieved import is_sparse
from trtopt.engine.layers import BITS, constant_bytes, profiles_of, read_layer
from trtopt.engine.work import accumulates_fp16, packed_channels
from trtopt.errors import UsageError
from trtopt.profiling.measured import MeasuredLayer
from trtopt.report.schema.layers import LayerInfo, TensorInfo
from trtopt.report.text.format import count
from trtopt.roofline.rows import RowSizes
from trtopt.roofline.work import AttentionSizes, Gemm, Layer, Window, Work, alignment_of, in_network, sparse_work
from trtopt.support.precision import ELEMENT_BYTES, TENSORRT_TYPES, Precision

_TF32 = re.compile(r"tf32|_s1688")
"""In tactics on FP32 operands: TF32 Tensor Cores (CUTLASS names a kernel's instruction: s1688 is m16n8k8 with FP32
sums, which takes FP32 operands as TF32)."""

_MOVERS = re.compile(
    "activation|cast|concat|copy|cumulative|elementwise|expand|fill|gather|identity|kgen|lrn|norm|pad|point_?wise|pool"
    "|quantize|reduc|reformat|relu|resize|reverse|scale|scatter|select|shuffle|slice|softmax|squeeze|topk|transpose"
    "|unary",
    re.IGNORECASE,
)
"""Layer types whose time is that of the bytes they move."""

_READS_AS_WRITTEN = ("gather", "slice")

_MOST_ELEMENTS = 2**50
"""More than a GPU holds: a damaged file must not become a number that nothing can hold."""


_MOST_WORK = 2**62
"""Flop or bytes of one layer, likewise."""


class _UntoldError(Exception):
    """The entry does not say what the work depends on."""


def layer_work(info: LayerInfo, entry: Any) -> Work | None:
    """The work of one layer; None for layers that run no kernel, and for those that do not tell enough.

    Bytes are those of all tensors and weights listed, as they lie in memory (vectorized formats pad the channels). The
    type of the arithmetic and of the sums comes from the operands and the tactic's name. What moves bytes counts one
    flop per element written, times its window: for generated kernels (``kgen``) a lower bound.

    Args:
        info: The layer, as :func:`~trtopt.engine.layers.read_layer` reads the entry.
        entry: The entry of the inspector's list ``Layers``.
    """
    if not isinstance(entry, Mapping) or not info.is_kernel or not info.inputs or not info.outputs:
        return None
    try:
        work = _work(info, entry)
    except _UntoldError:
        return None
    if max(work.flop, work.bytes) > _MOST_WORK:
        return None
    return sparse_work(work) if work.gemm is not None and is_sparse(info.tactic) else work


def _work(info: LayerInfo, entry: Mapping[str, Any]) -> Work:
    if not all(item.dtype for item in info.constants):
        raise _UntoldError
    read = sum(_stored_bytes(item) for item in info.inputs)
    write = sum(_stored_bytes(item) for item in info.outputs)
    moved = read, constant_bytes(info), write
    if info.kind == "conv":
        return _convolution_layer(info, entry, moved)
    if info.kind == "gemm":
        return _product_layer(info, moved)
    if info.kind == "mha":
        return _attention_layer(info, moved)
    if not _MOVERS.search(info.type):
        raise _UntoldError
    return _moving_layer(info, entry, moved)


def convolution(
    data: Sequence[int], out: Sequence[int], window: Window, dtype: Precision, out_dtype: Precision
) -> Work:
    """A convolution that reads its operands and writes its result once.

    Args:
        data: Shape of the input, [N, C, *spatial].
        out: Channels and spatial sizes of the result, [K, *spatial].
        window: What slides over it. A transposed one multiplies every pixel of the input with the kernel.
        dtype: Type of input and weight.
        out_dtype: Type of the result.
    """
    n, c, *pixels = data
    k, *out_pixels = out
    group, taps = window.group, math.prod(window.kernel)
    gemm = Gemm(n * math.prod(out_pixels), k // group, c // group * taps, group)
    if window.transposed:
        gemm = Gemm(n * math.prod(pixels), k // group * taps, c // group, group)
    size = ELEMENT_BYTES[dtype]
    return Work(
        "depthwise" if c == group and group > 1 else "conv",
        gemm.flop,
        int(math.prod(data) * size),
        int(taps * k * c // group * size),
        int(n * math.prod(out) * ELEMENT_BYTES[out_dtype]),
        dtype,
        gemm=gemm,
        window=window,
        alignment_bytes=alignment_of(c, k, dtype=dtype),
    )


def _convolution_layer(info: LayerInfo, entry: Mapping[str, Any], moved: tuple[int, int, int]) -> Work:
    data = info.inputs[0].shape
    if len(data) < 3 or not all((*data, *info.outputs[0].shape)):
        raise _UntoldError
    told = "Kernel" in entry or "ConvKernel" in entry
    window, channels, pixels = _told_window(info, entry) if told else _seen_window(info)
    if data[1] % window.group or channels % window.group:
        raise _UntoldError
    dtype = _math_type(info)
    work = convolution(data, (channels, *pixels), window, dtype, dtype)
    read, weights, write = moved
    return replace(
        work,
        read_bytes=read,
        weight_bytes=weights,
        write_bytes=write,
        accumulate_fp16=accumulates_fp16(info.tactic, work.kind, dtype),
    )


def _told_window(info: LayerInfo, entry: Mapping[str, Any]) -> tuple[Window, int, Sequence[int]]:
    """The window of a convolution, its output channels and pixels, from the fields of TensorRT's own convolutions.

    The pixels come from the padding: what a convolution fused with a pooling writes are the pooled ones.
    """
    prefix = "Conv" if "ConvKernel" in entry else ""
    pixels = info.inputs[0].shape[2:]
    transposed = _is_transposed(info, entry)
    kernel, stride, dilation = (_sizes(entry, prefix + key, len(pixels), 1) for key in ("Kernel", "Stride", "Dilation"))
    before, after = (_sizes(entry, prefix + key, len(pixels), 0) for key in ("PrePadding", "PostPadding"))
    (groups,), (channels,) = (_sizes(entry, prefix + key, 1, 1) for key in ("Groups", "OutMaps"))
    window = Window(kernel, stride, dilation, groups, transposed)
    reach = [d * (r - 1) + 1 for d, r in zip(dilation, kernel, strict=True)]
    pad = [first + last for first, last in zip(before, after, strict=True)]
    axes = range(len(pixels))
    if transposed:
        return window, channels, [(pixels[i] - 1) * stride[i] + reach[i] - pad[i] for i in axes]
    if any(pixels[i] + pad[i] < reach[i] for i in axes):
        raise _UntoldError
    return window, channels, [(pixels[i] + pad[i] - reach[i]) // stride[i] + 1 for i in axes]


def _seen_window(info: LayerInfo) -> tuple[Window, int, Sequence[int]]:
    """The same of Myelin's convolutions, from the shapes: the weight is [K, C / groups, *kernel], or transposed
    [C, K / groups, *kernel]. The stride is the smallest that fits; a dilation is not seen."""
    data, out = info.inputs[0].shape, info.outputs[0].shape
    transposed = _is_transposed(info, {})
    (first, *small), (second, *large) = (data[1:], out[1:]) if transposed else (out[1:], data[1:])
    if len(out) != len(data):
        raise _UntoldError
    for item in (*info.constants, *info.inputs[1:]):
        shape = item.shape
        if len(shape) == len(data) and shape[0] == first and min(shape) > 0 and second % shape[1] == 0:
            sizes = zip(small, large, shape[2:], strict=True)
            stride = tuple(max(0, more - reach) // less + 1 for less, more, reach in sizes)
            return Window(shape[2:], stride, (1,) * len(stride), second // shape[1], transposed), out[1], out[2:]
    raise _UntoldError


def _is_transposed(info: LayerInfo, entry: Mapping[str, Any]) -> bool:
    return "deconv" in info.type.lower() or entry.get("ParameterType") == "Deconvolution"


def _product_layer(info: LayerInfo, moved: tuple[int, int, int]) -> Work:
    """[..., m, k] x [..., k, n] = [..., m, n], either operand transposed. A right operand that is one matrix serves all
    rows; one that is not listed is a weight, read once."""
    left, out = info.inputs[0], info.outputs[0].shape
    others = [item.shape for item in (*info.inputs[1:], *info.constants) if len(item.shape) >= 2]
    if len(left.shape) < 2 or len(out) < 2 or not math.prod(out):
        raise _UntoldError
    (m, n), lead = out[-2:], math.prod(out[:-2])
    shared, rest = divmod(math.prod(left.shape), lead * m)
    merged = not rest and shared in left.shape[-2:]
    k = shared if merged else math.prod(left.shape) // m
    if not k or (not merged and k != left.shape[-1]):
        raise _UntoldError
    right = next((shape for shape in others if sorted(shape[-2:]) == sorted((k, n))), None)
    batched = not merged or (right is not None and math.prod(right[:-2]) > 1)
    if right is not None and batched and math.prod(right[:-2]) != lead:
        raise _UntoldError
    gemm = Gemm(m, n, k, lead) if batched else Gemm(lead * m, n, k)
    dtype = _math_type(info)
    read, weights, write = moved
    if right is None and not any(math.prod(shape) >= k * n for shape in others):
        weights += math.ceil(gemm.n * k * gemm.batch * BITS[left.dtype] / 8)
    accumulate, alignment = accumulates_fp16(info.tactic, "gemm", dtype), alignment_of(n, k, dtype=dtype)
    return Work("gemm", gemm.flop, read, weights, write, dtype, accumulate, gemm, alignment_bytes=alignment)


def _attention_layer(info: LayerInfo, moved: tuple[int, int, int]) -> Work:
    """Q [..., queries, size] K [..., size, keys], or transposed, then the probabilities times V [..., keys, values]."""
    query, out = info.inputs[0].shape, info.outputs[0].shape
    batch = math.prod(query[:-2])
    operands = [item.shape for item in info.inputs[1:] if len(item.shape) >= 3 and math.prod(item.shape[:-2]) == batch]
    if len(query) < 3 or len(out) < 2 or len(operands) < 2:
        raise _UntoldError
    (queries, size), (keys, values) = query[-2:], operands[-1][-2:]
    if sorted(operands[0][-2:]) != sorted((size, keys)) or math.prod(out) != batch * queries * values:
        raise _UntoldError
    products = Gemm(queries, keys, size, batch), Gemm(queries, values, keys, batch)
    dtype = _math_type(info)
    return Work(
        "attention",
        sum(product.flop for product in products),
        *moved,
        dtype,
        accumulates_fp16(info.tactic, "attention", dtype),
        products[0],
        attention=AttentionSizes(queries, keys, size, values, batch, batch),
        alignment_bytes=alignment_of(size, values, dtype=dtype),
    )


def _moving_layer(info: LayerInfo, entry: Mapping[str, Any], moved: tuple[int, int, int]) -> Work:
    data, out = info.inputs[0], info.outputs[0]
    read, weights, write = moved
    kind = info.type.lower()
    if kind in _READS_AS_WRITTEN:
        read = min(read, write)
    if kind in ("reformat", "shuffle"):
        axis = 1 if kind == "reformat" else -1
        shapes = [item.shape if len(item.shape) >= 2 else (1, *item.shape, 1) for item in (data, out)]
        rows = [shape[axis] * BITS[item.dtype] // 8 for shape, item in zip(shapes, (data, out), strict=True)]
        alignment = alignment_of(*rows, dtype=Precision.INT8)
        return Work("layout", math.prod(out.shape), read, weights, write, Precision.FP32, alignment_bytes=alignment)
    pooled = "WindowSize" in entry
    window = math.prod(_sizes(entry, "WindowSize", None, 1)) if pooled else 1
    dtype = _math_type(info)
    return Work("memory", math.prod(out.shape) * window, read, weights, write, dtype, rows=_rows(info), pooled=pooled)


def _rows(info: LayerInfo) -> RowSizes | None:
    """The rows of a reduction, whose shapes tell them. Those of softmax and norms are not told: the axis is hidden."""
    data, out = info.inputs[0].shape, info.outputs[0].shape
    count = math.prod(out)
    if "reduc" not in info.type.lower() or not count or math.prod(data) % count:
        return None
    return RowSizes(count, math.prod(data) // count, passes=1)


def _stored_bytes(tensor: TensorInfo) -> int:
    """Bytes of a tensor as it lies in memory."""
    if tensor.dtype not in BITS or any(dim < 0 for dim in tensor.shape) or math.prod(tensor.shape) > _MOST_ELEMENTS:
        raise _UntoldError
    dims = list(tensor.shape)
    if len(dims) >= 3:
        packed = packed_channels(tensor.format)
        dims[1] = math.ceil(dims[1] / packed) * packed
    return math.ceil(math.prod(dims) * BITS[tensor.dtype] / 8)


def _math_type(info: LayerInfo) -> Precision:
    operand = info.inputs[0].dtype
    if operand == "Float" and _TF32.search(info.tactic):
        return Precision.TF32
    return TENSORRT_TYPES.get(operand, Precision.FP32)


def _sizes(entry: Mapping[str, Any], key: str, number: int | None, least: int) -> tuple[int, ...]:
    """A field that holds a size, or ``number`` of them (as many as there are, if None)."""
    value = entry.get(key)
    found = tuple(value) if isinstance(value, list) else (value,)
    if number is not None and len(found) != number:
        raise _UntoldError
    if any(isinstance(item, bool) or not isinstance(item, int) or not least <= item < 2**31 for item in found):
        raise _UntoldError
    return found


_SHOWN_NAMES, _NAME_WIDTH = 3, 80
"""How many names a message shows, and how much of each."""


@dataclass(frozen=True)
class LayerTime:
    """What a profiler says of a layer, in microseconds of one inference; exact, so that sums are.

    The median is None where only the mean is known, the spread (median absolute deviation) where the runs are not.
    """

    name: str
    average_us: Decimal
    median_us: Decimal | None = None
    spread_us: Decimal | None = None


def join_times(entries: Sequence[Any], times: Sequence[LayerTime]) -> tuple[tuple[MeasuredLayer, ...], tuple[str, ...]]:
    """Put layers and times together: no layer that ran is left out, and no time is lost.

    The n-th time of a name is of the n-th layer of that name; times beyond the last one are of that one, which a loop
    runs several times. Layers without a time took none. Where the entries are those of several optimization profiles,
    the layers are those of the one that ran.

    Args:
        entries: The list ``Layers`` of the engine inspector's JSON.
        times: In the order the profiler reported them.

    Returns:
        The layers in the order of the entries, each with a name of its own, and what the reader should know of them.

    Raises:
        EngineBuildError: An entry is not understood.
        UsageError: The times are of another engine.
    """
    infos = [read_layer(entry) for entry in entries]
    kept, notes = _that_ran(infos, {time.name for time in times})
    joined, more = _join([infos[index].name for index in kept], times)
    named = _with_own_names([infos[index] for index in kept])
    layers = [_measured(info, entries[index], time) for info, index, time in zip(named, kept, joined, strict=True)]
    return _in_network(layers), (*notes, *more, *_untold(layers))


def _in_network(layers: Sequence[MeasuredLayer]) -> tuple[MeasuredLayer, ...]:
    """The layers with what one inference touches in their work. What no layer writes is an input of the network, what
    none reads an output."""
    infos = [layer.info for layer in layers]
    inner = {item.name for info in infos for item in info.outputs} & {
        item.name for info in infos for item in info.inputs
    }
    works = []
    for layer in layers:
        crossing = [item for item in (*layer.info.inputs, *layer.info.outputs) if item.name not in inner]
        work = layer.work
        if work is not None:
            share = sum(map(_stored_bytes, crossing)) / max(work.read_bytes + work.write_bytes, 1)
            work = replace(work, network_share=share)
        works.append(Layer(layer.info.name, layer.op, (), work))
    found = in_network(works, constant_bytes(*(layer.info for layer in layers if layer.work is not None)))
    return tuple(replace(layer, work=each.work) for layer, each in zip(layers, found, strict=True))


def _that_ran(infos: Sequence[LayerInfo], names: set[str]) -> tuple[list[int], list[str]]:
    """The layers of the optimization profile that most of the names are of."""
    numbers = profiles_of(infos)
    found = Counter(number for info, number in zip(infos, numbers, strict=True) if info.name in names)
    profiles = sorted(set(numbers))
    if len(profiles) == 1 or not found:
        return list(range(len(infos))), []
    ran = max(profiles, key=lambda number: (found[number], -number))
    kept = [i for i, info in enumerate(infos) if numbers[i] == ran or info.name in names]
    return kept, [f"the engine has {len(profiles)} optimization profiles; the times are of profile {ran}"]


def _join(names: Sequence[str], times: Sequence[LayerTime]) -> tuple[list[LayerTime], list[str]]:
    """The time of each layer, and what the reader should know of the join."""
    places: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        places.setdefault(name, []).append(index)
    _check_names(places, times)
    found: dict[int, LayerTime] = {}
    seen: Counter[str] = Counter()
    repeated: set[str] = set()
    for time in times:
        own = places[time.name]
        index = own[min(seen[time.name], len(own) - 1)]
        seen[time.name] += 1
        if index in found:
            repeated.add(time.name)
            time = LayerTime(time.name, found[index].average_us + time.average_us)
        found[index] = time
    notes = []
    if repeated:
        notes.append(f"{count(len(repeated), 'layer')} ran several times in one inference (a loop): the times are sums")
    if len(found) < len(names):
        missing = len(names) - len(found)
        notes.append(f"the profile does not name {count(missing, 'layer')} of the engine: counted as 0 us")
    return [found.get(index, LayerTime(name, Decimal(0))) for index, name in enumerate(names)], notes


def _check_names(places: Mapping[str, Sequence[int]], times: Sequence[LayerTime]) -> None:
    measured = dict.fromkeys(time.name for time in times)
    unknown = [name for name in measured if name not in places]
    if not unknown:
        return
    absent = [name for name in places if name not in measured]
    raise UsageError(
        "The layer profile and the layer info are of different engines:"
        f" {len(unknown)} of {count(len(measured), 'name')} of the profile are not in the layer info",
        where=f"only in the profile: {_some(unknown)}; only in the layer info ({len(absent)}): {_some(absent)}",
        remedy="export both in one run: trtexec --profilingVerbosity=detailed --separateProfileRun"
        " --exportLayerInfo=layers.json --exportProfile=profile.json",
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(_short(repr(name)) for name in names[:_SHOWN_NAMES])
    return f"{shown} ..." if len(names) > _SHOWN_NAMES else shown or "none"


def _short(text: str) -> str:
    return text if len(text) <= _NAME_WIDTH else f"{text[: _NAME_WIDTH - 3]}..."


def _with_own_names(infos: Sequence[LayerInfo]) -> list[LayerInfo]:
    """The layers with names of their own: ``NAME #2`` for the second one of a name."""
    taken = {info.name for info in infos}
    seen: Counter[str] = Counter()
    found = []
    for info in infos:
        seen[info.name] += 1
        if seen[info.name] > 1:
            while (name := f"{info.name} #{seen[info.name]}") in taken:
                seen[info.name] += 1
            taken.add(name)
            info = replace(info, name=name)
        found.append(info)
    return found


def _measured(info: LayerInfo, entry: Any, time: LayerTime) -> MeasuredLayer:
    work = layer_work(info, entry)
    operator = "ConvTranspose" if work and work.window and work.window.transposed else "Conv"
    sparse = [entry[key] for key in ("HasSparseWeights", "ConvHasSparseWeights") if key in entry] if info.type else []
    return MeasuredLayer(
        info=info,
        op=operator if info.kind == "conv" else info.type or "unknown",
        work=work,
        measured_us=float(time.average_us),
        median_us=None if time.median_us is None else float(time.median_us),
        spread_us=None if time.spread_us is None else float(time.spread_us),
        sparse_weights=bool(sparse[0]) if sparse else None,
    )


def _untold(layers: Sequence[MeasuredLayer]) -> list[str]:
    """Which layers have no work, and why."""
    if not any(layer.info.type for layer in layers):
        return [
            "the layer info holds names only, so that nothing can be predicted:"
            " build the engine with --profilingVerbosity=detailed"
        ]
    kernels = [layer for layer in layers if layer.info.is_kernel and layer.measured_us > 0]
    hidden = [layer for layer in kernels if layer.work is None]
    if not hidden:
        return []
    types = ", ".join(f"{number} {kind}" for kind, number in Counter(item.info.type for item in hidden).items())
    found = [f"the layer info does not tell the work of {len(hidden)} of {count(len(kernels), 'kernel')}: {types}"]
    if any(-1 in item.shape for layer in hidden for item in (*layer.info.inputs, *layer.info.outputs)):
        found.append("shapes are dynamic: export with --shapes, so that they are those of the run")
    return found
