"""Networks with a logarithm in front: an 8-bit scale rounds quiet bands to zero, which carry as much as loud ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
from onnx import numpy_helper

FRAMES, BINS, BANDS, CLASSES = 16, 64, 24, 10

_TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
keywords (float[N, 16, 64] x) => (float[N, 10] y) {
    power = Mul (x, x)
    mel = MatMul (power, bands)
    raised = Add (mel, least)
    logarithm = Log (raised)
    cepstrum = MatMul (logarithm, dct)
    flat = Flatten (cepstrum)
    hidden = Gemm (flat, w1, b1)
    active = Relu (hidden)
    y = Gemm (active, w2, b2)
}
"""


def save_keywords(path: Path) -> None:
    """Power, mel bands, a logarithm, a cosine transform, two layers; scores of ten classes."""
    rng = np.random.default_rng(0)
    bands = np.maximum(0, 1 - np.abs(np.arange(BINS)[:, None] / BINS * (BANDS + 1) - 1 - np.arange(BANDS)[None]))
    turns = np.pi / BANDS * (np.arange(BANDS)[:, None] + 0.5) * np.arange(BANDS)[None]
    dct = np.cos(turns) * (2 / BANDS) ** 0.5
    wide = FRAMES * BANDS
    w1, w2 = rng.standard_normal((wide, 64)) / wide**0.5, rng.standard_normal((64, CLASSES)) / 8
    # Biases that centre the layers, so that every class wins somewhere.
    hidden = (np.log(spectra(256, seed=1) ** 2 @ bands + 1e-10) @ dct).reshape(256, wide) @ w1
    b1 = -hidden.mean(0)
    b2 = -(np.maximum(hidden + b1, 0) @ w2).mean(0)
    weights = {"bands": bands, "least": np.asarray(1e-10), "dct": dct, "w1": w1, "b1": b1, "w2": w2, "b2": b2}
    model = onnx.parser.parse_model(_TEXT)
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    for node in model.graph.node:
        node.name = node.output[0]
    onnx.save(model, path)


def spectra(count: int, seed: int = 0) -> np.ndarray:
    """Spectra of sounds, 60 dB quieter at the top than at the bottom, of different loudness in each band."""
    rng = np.random.default_rng(seed)
    slope = 10 ** (-3 * np.arange(BINS) / BINS)
    colour = np.exp(rng.standard_normal((count, 1, BINS)))
    return (rng.standard_normal((count, FRAMES, BINS)) * slope * colour).astype(np.float32)
