"""Pillow's resizing of a frame as layers of an engine, equal to the bit: what it would cost.

    python benchmarks/pictures/resize.py resize.onnx 1080x1920 360x640
    trtopt build resize.onnx --recipes none

writes a network of uint8 ``[1, H, W, 3]`` that gives the resized pixels as FP32 ``[1, 3, h, w]``, and compares it with
Pillow. Pillow multiplies bytes by weights of 22 bits and rounds behind each axis (``Resample.c``); here each weight is
two numbers of 11 bits, so that products of FP16, TF32 or FP32 and their sums in FP32 are exact.
"""

from __future__ import annotations

import sys

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import numpy_helper
from PIL import Image


def weights(has: int, wants: int) -> np.ndarray:
    """Of Pillow's bilinear filter for one axis, whole numbers ``[has, wants]``; 2^22 stands for 1."""
    scale = has / wants
    reach = max(scale, 1.0)
    found = np.zeros((has, wants))
    for place in range(wants):
        centre = (place + 0.5) * scale
        low, high = max(0, int(centre - reach + 0.5)), min(has, int(centre + reach + 0.5))
        shares = np.maximum(0, 1 - np.abs((np.arange(low, high) - centre + 0.5) / reach))
        found[low:high, place] = np.floor(0.5 + shares / shares.sum() * 2**22)
    return found


def network(before: tuple[int, int], after: tuple[int, int]) -> onnx.ModelProto:
    """The columns, then the rows: two products each, and the rounding."""
    across, down = weights(before[1], after[1]), weights(before[0], after[0]).T
    arrays = {"half": np.float32(2**21), "share": np.float32(1 / 2048)}
    for name, matrix in (("across", across), ("down", down)):
        arrays |= {f"{name}_high": np.floor(matrix / 2048), f"{name}_low": matrix % 2048}
    text = "values = Cast <to = 1> (frame) columns = Transpose <perm = [0, 3, 1, 2]> (values)"
    for name, left, right, result in (("across", "columns, ", "", "rows"), ("down", "", ", rows", "pixels")):
        text += f"""
            {name}_a = MatMul ({left}{name}_high{right}) {name}_b = MatMul ({left}{name}_low{right})
            {name}_c = Add ({name}_b, half) {name}_d = Mul ({name}_c, share) {name}_e = Floor ({name}_d)
            {name}_f = Add ({name}_a, {name}_e) {name}_g = Mul ({name}_f, share) {result} = Floor ({name}_g)
        """
    sizes = f"(uint8[1, {before[0]}, {before[1]}, 3] frame) => (float[1, 3, {after[0]}, {after[1]}] pixels)"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 17]> resize {sizes} {{ {text} }}')
    kept = (numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in arrays.items())
    model.graph.initializer.extend(kept)
    return model


def main() -> None:
    path, *sizes = sys.argv[1:]
    (high, wide), (less, narrow) = (tuple(map(int, size.split("x"))) for size in sizes)
    onnx.save(network((high, wide), (less, narrow)), path)
    frame = np.random.default_rng(0).integers(0, 256, (high, wide, 3), dtype=np.uint8)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {"frame": frame[None]})[0][0].transpose(1, 2, 0)
    wanted = np.asarray(Image.fromarray(frame).resize((narrow, less), Image.Resampling.BILINEAR))
    print(f"{np.count_nonzero(found != wanted)} of {wanted.size} values differ from Pillow's")


if __name__ == "__main__":
    main()
