"""Columns put back into an image, written as a permutation or a transposed convolution.

TensorRT for RTX has no Col2Im; exporters write it for ``torch.nn.functional.fold``. Its meaning is that of ONNX:
https://onnx.ai/onnx/operators/onnx__Col2Im.html.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from trtopt.graph import edit
from trtopt.source.written import Writer, WritingError, float_type_of

_PLANE = 2
_LARGEST = 1 << 22
"""Entries of a kernel that puts columns into place."""


def col2im(w: Writer) -> None:
    """``Col2Im``: columns [N, C * kh * kw, L], the image's height and width, kh and kw; output [N, C, H, W]."""
    columns, image, block = w.needed(0), _sizes(w, 1), _sizes(w, 2)
    if columns.shape is None or len(columns.shape) != 3 or not isinstance(columns.shape[1], int):
        raise WritingError("the number of its channels is not known")
    strides, dilations = _attribute(w, "strides", (1, 1)), _attribute(w, "dilations", (1, 1))
    pads = _attribute(w, "pads", (0, 0, 0, 0))
    channels, apart = divmod(columns.shape[1], int(np.prod(block)))
    spans = [d * (k - 1) + 1 for d, k in zip(dilations, block, strict=True)]
    moves = [h + pads[at] + pads[at + _PLANE] - span for at, (h, span) in enumerate(zip(image, spans, strict=True))]
    if apart or channels < 1 or min(*moves, *pads) < 0 or min(*strides, *dilations) < 1:
        raise WritingError("its sizes do not fit each other")
    counts = [move // stride + 1 for move, stride in zip(moves, strides, strict=True)]
    rest = [move % stride for move, stride in zip(moves, strides, strict=True)]
    if strides == block == tuple(spans) and not any((*pads, *rest)):  # blocks side by side
        parts = w.reshape(columns, 0, channels, *block, *counts)
        w.replace(w.reshape(w.transpose(parts, 0, 1, 4, 2, 5, 3), 0, channels, *image))
        return
    cells = int(np.prod(block))
    if channels * cells * cells > _LARGEST:
        raise WritingError(f"its kernel would have {channels * cells} x {cells} entries")
    kernel = np.tile(np.eye(cells).reshape(cells, 1, *block), (channels, 1, 1, 1))
    weight = w.op("Constant", value=ir.tensor(kernel.astype(float_type_of(columns).numpy())))
    found = w.op(
        "ConvTranspose",
        w.reshape(columns, 0, channels * cells, *counts),
        weight,
        group=channels,
        kernel_shape=list(block),
        strides=list(strides),
        dilations=list(dilations),
        pads=list(pads),
        output_padding=rest,
    )
    w.replace(found)


def _sizes(w: Writer, index: int) -> tuple[int, ...]:
    found = edit.constant_of(w.needed(index))
    if found is None or found.size != _PLANE or min(found.ravel()) < 1:
        raise WritingError("the size of its image or of its blocks is not known, or is not one of height and width")
    return tuple(int(size) for size in found.ravel())


def _attribute(w: Writer, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(edit.ints_attribute(w.node, name) or default)
