"""Elements that are cut off behind a convolution."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.graph.conv import SlidingWindow, set_window, sole_user, window_of
from trtopt.graph.dimension import Dim
from trtopt.graph.dims import Dimensions
from trtopt.rewrite.protocol import Findings, Match, Refusal, Stage, Target

_UNARY = frozenset(
    "Abs Cast Celu Clip Elu Erf Exp Gelu HardSigmoid HardSwish Identity LeakyRelu Log Mish Neg Reciprocal Relu Selu "
    "Sigmoid Softplus Softsign Sqrt Swish Tanh ThresholdedRelu".split()
)
"""Operators that change each element by itself; what else they read is one number."""

_LONGEST = 8
"""Nodes looked at between a convolution and a Slice."""

_OPEN = 1 << 31
"""An end from here on is none."""


@dataclass(frozen=True)
class CroppedConv:
    """Lets a convolution leave out what is cut off behind it.

    Rewrite:
        f(Conv(x))[..., s : -e] = f(Conv(x)) with pads smaller by s and e times the stride; ConvTranspose likewise, with
        pads larger by s and e. f is one element-wise operator after the other.
    Requires:
        A Slice of steps 1 along spatial axes by constants, or to a computed end that is known to be so many elements
        before the last (the length that went in, as state space models cut it). For Conv, at least as much padding on
        that side.
    Why faster:
        Causal convolutions are written as ones that pad both sides and cut off the end, transposed ones of
        vocoders and codecs as ones without padding. TensorRT for RTX copies what is left, in a kernel that separates
        the convolution from its activation and residual: a temporal convolutional network of six blocks (128 channels,
        512 steps, batch 8, FP16), 27 kernels and 297 us -> 18 and 196 by a plain roofline of an L4.
    Numerics:
        Exact.
    Refuses when:
        More is cut off than was padded; the tensor, or one between, is used elsewhere or is a graph output; automatic
        padding; a transposed convolution has an explicit output shape, or its pads would reach the size of its kernel;
        nothing may be left of a short input.
    """

    name: str = "cropped-conv"
    stage: Stage = Stage.FOLD
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        """Slices of what convolutions make."""
        cuts = [node for node in edit.all_nodes(model.graph) if _way(node) is not None]
        known = Dimensions(model) if cuts else None
        found = [] if known is None else [(node, _place(node, known)) for node in cuts]
        places = [(node, place) for node, place in found if place is not None]
        return Findings.of([(Match((node, *place.between, place.conv)), place.reason) for node, place in places])

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        """Change the pads of one convolution, and remove the Slice."""
        cut = match.nodes[0]
        found = _place(cut, Dimensions(model))
        if found is None or found.reason or found.window is None:
            return Refusal(match.label, "it was changed by a rewrite before")
        set_window(found.conv, found.window)
        edit.tag(found.conv, self.name)
        for node in (found.conv, *found.between):
            node.outputs[0].shape = cut.outputs[0].shape
        edit.Splice(model, cut, self.name).bypass(cut)
        return None


@dataclass(frozen=True)
class _Place:
    """A convolution, the nodes between it and a Slice, its window without what is cut off, and what is against it."""

    conv: ir.Node
    between: tuple[ir.Node, ...]
    window: SlidingWindow | None = None
    reason: str = ""


def _way(cut: ir.Node) -> tuple[ir.Node, ...] | None:
    """The nodes from a Slice back to the convolution that it cuts, which is the last; None where there is none."""
    made: list[ir.Node] = []
    node = _maker(cut) if edit.is_op(cut, "Slice") else None
    while edit.is_op(node, *_UNARY) and len(made) < _LONGEST:
        made.append(node)
        node = _maker(node)
    return (*made, node) if edit.is_op(node, "Conv", "ConvTranspose") else None


def _place(cut: ir.Node, known: Dimensions) -> _Place | None:
    """What a Slice cuts; None where that is nothing a convolution made, or not along spatial axes."""
    made = _way(cut)
    window = window_of(made[-1]) if made is not None else None
    if made is None or window is None:
        return None
    *between, conv = made
    crops = _crops(cut, known, max(window.ends))
    if crops is None or len(crops) != len(window.kernel):
        return None
    shared = next((each for each in made if sole_user(each.outputs[0]) is None), None)
    if shared is not None:
        return _Place(conv, tuple(between), None, f"the output of {shared.name} is used elsewhere")
    if not edit.can_replace(cut.outputs[0], made[0].outputs[0]):
        return _Place(conv, tuple(between), None, f"{cut.name} is in a nested graph")
    found = _cropped(conv, window, crops)
    reason = found if isinstance(found, str) else _why_not_left(conv, found, known)
    return _Place(conv, tuple(between), None if isinstance(found, str) else found, reason)


def _maker(node: ir.Node) -> ir.Node | None:
    value = node.inputs[0]
    maker = edit.maker_of(value)
    return maker if maker is not None and maker.graph is node.graph else None


def _crops(cut: ir.Node, known: Dimensions, most: int) -> tuple[tuple[int, int], ...] | None:
    """How many elements are cut off before and behind each spatial axis; None where other axes are cut."""
    dims, axes_value = known.of(cut.inputs[0]), edit.input_of(cut, 3)
    starts, ends = edit.constant_of(edit.input_of(cut, 1)), known.held(edit.input_of(cut, 2))
    axes, steps = edit.constant_of(axes_value), edit.constant_of(edit.input_of(cut, 4))
    if dims is None or starts is None or ends is None or (axes_value is not None and axes is None):
        return None
    if edit.input_of(cut, 4) is not None and (steps is None or np.any(steps != 1)):
        return None
    result = [(0, 0)] * len(dims)
    used = range(len(starts)) if axes is None else (int(axis) % len(dims) for axis in axes)
    for axis, start, end in zip(used, starts, ends, strict=True):
        found = _crop(known, dims[axis], int(start), end, most)
        if found is None:
            return None
        result[axis] = found
    return tuple(result[2:]) if any(map(any, result)) and not any(map(any, result[:2])) else None


def _crop(known: Dimensions, size: Dim | None, start: int, end: Dim | None, most: int) -> tuple[int, int] | None:
    """Elements before ``start`` and from ``end`` on, ``most`` at most where that is computed; None if not known."""
    if isinstance(size, int) and isinstance(end, int):
        first, last = (min(max(each + size if each < 0 else each, 0), size) for each in (start, end))
        return (first, size - last) if first < last else None
    if start < 0 or size is None or end is None:
        return None
    if isinstance(end, int):
        return (start, 0) if end >= _OPEN else (start, -end) if end < 0 else None
    return next(((start, more) for more in range(most + 1) if known.floor(end, more, 1) == size), None)


def _cropped(conv: ir.Node, window: SlidingWindow, crops: tuple[tuple[int, int], ...]) -> SlidingWindow | str:
    """The window of a convolution that leaves out what is cut off, or why there is none."""
    is_transposed = edit.is_op(conv, "ConvTranspose")
    factors = [-1] * len(crops) if is_transposed else window.strides
    begins = [pad - by * crop[0] for pad, by, crop in zip(window.begins, factors, crops, strict=True)]
    ends = [pad - by * crop[1] for pad, by, crop in zip(window.ends, factors, crops, strict=True)]
    if "output_shape" in conv.attributes:
        return f"{conv.name} has an explicit output shape"
    if min(*begins, *ends) < 0:
        return "more is cut off than was padded"
    if is_transposed and any(max(pads) >= span for *pads, span in zip(begins, ends, _spans(window), strict=True)):
        return f"the pads of {conv.name} would reach the size of its kernel"
    return replace(window, pads=(*begins, *ends))


def _spans(window: SlidingWindow) -> list[int]:
    """How many elements the kernel covers along each axis."""
    return [dilation * (size - 1) + 1 for size, dilation in zip(window.kernel, window.dilations, strict=True)]


def _why_not_left(conv: ir.Node, window: SlidingWindow, known: Dimensions) -> str:
    """Why a convolution with this window may make nothing of an input; empty where its size is known, too."""
    dims = known.of(conv.outputs[0])
    sums = [begin + end for begin, end in zip(window.begins, window.ends, strict=True)]
    is_transposed = edit.is_op(conv, "ConvTranspose")
    left = [span > pads if is_transposed else pads + 1 >= span for pads, span in zip(sums, _spans(window), strict=True)]
    fits = dims is not None and all(isinstance(dim, int) or each for dim, each in zip(dims[2:], left, strict=True))
    return "" if fits else "nothing may be left of a short input"
