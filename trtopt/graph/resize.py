"""Antialiased ``Resize``, which neither compiler has, as products with two constant matrices.

A resized row is a weighted sum of the rows of the image, with weights that the sizes fix: ``y = H x W'``. The weights
are those of ONNX Runtime (``upsample_antialias``), which are those of Pillow: the filter as wide as the window of
an output pixel, its sum 1.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit

_MOST_BYTES = 64 << 20
"""Of a matrix: a file may ask for any size."""

_AXES = 2
"""Height and width, the last axes, are resized."""


def is_antialiased(node: ir.Node) -> bool:
    """Whether a node is a ``Resize`` with ``antialias = 1``."""
    return edit.is_op(node, "Resize") and edit.int_attribute(node, "antialias", 0) == 1


def write_out_antialias(model: ir.Model) -> int:
    """Replace, in place, each antialiased ``Resize`` of known height and width; the number of nodes replaced.

    Those of other axes, of sizes that are not known, or in modes that ONNX does not define for antialiasing stay.
    """
    done = 0
    for node in [node for node in edit.all_nodes(model.graph) if is_antialiased(node)]:
        matrices = _matrices(node)
        if matrices is None:
            continue
        source, splice = node.inputs[0], edit.Splice(model, node, "antialiased-resize")
        if source is None or source.dtype is None:
            continue
        height, width = matrices
        kind = source.dtype.numpy()
        value = source
        if width is not None:
            value = splice.op("MatMul", value, splice.constant(width.T.astype(kind), node.outputs[0], "columns"))
        if height is not None:
            value = splice.op("MatMul", splice.constant(height.astype(kind), node.outputs[0], "rows"), value)
        if value is source:  # it keeps its sizes
            del node.attributes["antialias"]
        else:
            splice.finish(value)
        done += 1
    return done


def _matrices(node: ir.Node) -> tuple[np.ndarray | None, np.ndarray | None] | None:
    """FP64 matrices [out, in] for height and width, None for an axis that stays; None where they are not known."""
    source, output = node.inputs[0], node.outputs[0]
    if source is None or source.shape is None or output.shape is None or source.dtype not in edit.NARROW_FLOATS:
        return None
    rank = len(source.shape)
    before, after = list(source.shape), list(output.shape)
    scales = _scales(node, rank)
    if scales is None or rank < _AXES or not _is_plain(node):
        return None
    found: list[np.ndarray | None] = []
    for axis in range(rank):
        size, wanted, scale = before[axis], after[axis], scales[axis]
        if axis < rank - _AXES:
            if scale not in (None, 1.0) or (scale is None and size != wanted):
                return None
            continue
        if not isinstance(size, int) or not isinstance(wanted, int):
            return None
        if size == wanted and scale in (None, 1.0):
            found.append(None)
            continue
        if size * wanted * 8 > _MOST_BYTES or size < 1 or wanted < 1:
            return None
        if scale is not None and int(np.float32(size) * np.float32(scale)) != wanted:
            return None  # shape inference and ONNX Runtime round to different sizes
        found.append(_weights(node, size, wanted, wanted / size if scale is None else scale))
    return found[0], found[1]


def _is_plain(node: ir.Node) -> bool:
    mode = edit.string_attribute(node, "mode", "nearest")
    place = edit.string_attribute(node, "coordinate_transformation_mode", "half_pixel")
    policy = edit.string_attribute(node, "keep_aspect_ratio_policy", "stretch")
    return mode in ("linear", "cubic") and place in _PLACES and policy == "stretch"


def _scales(node: ir.Node, rank: int) -> list[float | None] | None:
    """The scale of each axis; None for an axis whose sizes say it. None where scales are given and not constant."""
    given = edit.ints_attribute(node, "axes")
    axes = list(range(rank)) if given is None else [axis % rank for axis in given]
    scales: list[float | None] = [1.0] * rank
    value = edit.input_of(node, 2)
    constant = edit.constant_of(value)
    if value is not None and (constant is None or constant.size not in (0, len(axes))):
        return None
    by_size = constant is None or constant.size == 0
    for index, axis in enumerate(axes):
        scales[axis] = None if by_size or constant is None else float(constant.reshape(-1)[index])
    return None if any(scale is not None and not scale > 0 for scale in scales) else scales


def _half_pixel(place: float, scale: float, size: int, wanted: int) -> float:
    return (place + 0.5) / scale - 0.5


def _align_corners(place: float, scale: float, size: int, wanted: int) -> float:
    return 0.0 if wanted == 1 else place * (size - 1) / (wanted - 1)


def _asymmetric(place: float, scale: float, size: int, wanted: int) -> float:
    return place / scale


def _pytorch_half_pixel(place: float, scale: float, size: int, wanted: int) -> float:
    return 0.0 if wanted <= 1 else _half_pixel(place, scale, size, wanted)


def _half_pixel_symmetric(place: float, scale: float, size: int, wanted: int) -> float:
    adjusted = wanted / (scale * size)
    return size / 2 * (1 - adjusted) + _half_pixel(place, scale, size, wanted)


_PLACES = {
    "half_pixel": _half_pixel,
    "align_corners": _align_corners,
    "asymmetric": _asymmetric,
    "pytorch_half_pixel": _pytorch_half_pixel,
    "half_pixel_symmetric": _half_pixel_symmetric,
}
"""Where the centre of an output pixel lies in the input, in its pixels, from the centre of the first one."""


def _weights(node: ir.Node, size: int, wanted: int, scale: float) -> np.ndarray:
    """How much each of ``size`` pixels counts for each of ``wanted``: FP64 [wanted, size], rows that sum to 1."""
    cubic = edit.string_attribute(node, "mode", "") == "cubic"
    coefficient = edit.float_attribute(node, "cubic_coeff_a", -0.75)
    outside = edit.int_attribute(node, "exclude_outside", 0) == 0
    place = _PLACES[edit.string_attribute(node, "coordinate_transformation_mode", "half_pixel")]
    stretch = max(1.0, 1.0 / scale)
    reach = (2.0 if cubic else 1.0) * stretch
    matrix = np.zeros((wanted, size))
    for row in range(wanted):
        centre = 0.5 + place(row, scale, size, wanted)
        first, last = math.floor(centre - reach + 0.5), math.floor(centre + reach + 0.5)
        pixels = np.arange(first, last)
        distances = np.abs((pixels - centre + 0.5) / stretch)
        weights = _cubic(distances, coefficient) if cubic else np.maximum(0.0, 1.0 - distances)
        if not outside:
            weights = np.where((pixels >= 0) & (pixels < size), weights, 0.0)
        total = weights.sum()
        np.add.at(matrix[row], np.clip(pixels, 0, size - 1), weights / (total if total else 1.0))
    return matrix


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Keys' cubic convolution (IEEE Transactions on Acoustics, Speech, and Signal Processing 29, 1981)."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance < 1, near, np.where(distance < 2, far, 0.0))
