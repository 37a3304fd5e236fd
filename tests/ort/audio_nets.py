"""Networks whose front end computes features of sound: logarithms of energies over eight decades."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from trtopt.graph.shapes import infer_shapes
from trtopt.support.ort_session import Feeds

_FFT, _HOP, _FRAMES, _MELS, _WIDTH = 128, 64, 48, 20, 32
_SAMPLES = _HOP * (_FRAMES - 1) + _FFT

FRONT = {
    "add": "w = Add(m, floor) l = Log(w)",
    "clip": "w = Clip(m, floor) l = Log(w)",
    "decibel": "w = Clip(m, floor) n = Log(w) d = Mul(n, ten) r = ReduceMax(d) b = Sub(r, eighty) l = Max(d, b)",
}
"""Ways to write the logarithm."""

_BLOCK = """
    n{i} = LayerNormalization(h{i}, g, z) q{i} = MatMul(n{i}, wq{i}) k{i} = MatMul(n{i}, wk{i})
    v{i} = MatMul(n{i}, wv{i}) kt{i} = Transpose <perm = [0, 2, 1]> (k{i}) s{i} = MatMul(q{i}, kt{i})
    sc{i} = Mul(s{i}, scale) p{i} = Softmax(sc{i}) a{i} = MatMul(p{i}, v{i}) o{i} = MatMul(a{i}, wo{i})
    r{i} = Add(h{i}, o{i}) y{i} = LayerNormalization(r{i}, g, z) u{i} = MatMul(y{i}, wu{i}) f{i} = Relu(u{i})
    t{i} = MatMul(f{i}, wd{i}) h{j} = Add(r{i}, t{i})"""


def keyword_transformer(front: str, blocks: int = 4) -> ir.Model:
    """x [1, 1, 3136] to 12 scores: STFT as a convolution, power, mel filters, logarithm, DCT, transformer blocks."""
    rng = np.random.default_rng(0)
    weights = {**_front_weights(), **_block_weights(blocks, rng)}
    body = f"""c = Conv <strides = [{_HOP}]> (x, basis) re, im = Split <axis = 1, num_outputs = 2> (c)
        re2 = Mul(re, re) im2 = Mul(im, im) e = Add(re2, im2) m = MatMul(mel, e) {FRONT[front]} fc = MatMul(dct, l)
        ft = Transpose <perm = [0, 2, 1]> (fc) fe = MatMul(ft, embed) h0 = Add(fe, places)"""
    body += "".join(_BLOCK.format(i=i, j=i + 1) for i in range(blocks))
    body += f" cls = ReduceMean <keepdims = 0> (h{blocks}, one) y = MatMul(cls, head)"
    text = f"g (float[1,1,{_SAMPLES}] x) => (float[1,12] y) {{ {body} }}"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    for node in proto.graph.node:
        node.name = node.output[0]
    return infer_shapes(ir.from_proto(proto))


def _front_weights() -> dict[str, np.ndarray]:
    place, bins = np.arange(_FFT), np.arange(_FFT // 2 + 1)[:, None]
    window = np.hanning(_FFT)
    angle = 2 * np.pi * bins * place / _FFT
    centres = np.linspace(0, _FFT // 2, _MELS + 2)
    rise = (bins[:, 0] - centres[:-2, None]) / (centres[1] - centres[0])
    fall = (centres[2:, None] - bins[:, 0]) / (centres[1] - centres[0])
    order = np.arange(_MELS)
    found = {
        "basis": np.concatenate([window * np.cos(angle), -window * np.sin(angle)])[:, None],
        "mel": np.maximum(0, np.minimum(rise, fall)),
        "dct": np.cos(np.pi / _MELS * (order[None] + 0.5) * order[:, None]) * np.sqrt(2 / _MELS),
        "floor": np.array(1e-10),
        "ten": np.array(10 / np.log(10)),
        "eighty": np.array(80.0),
    }
    return {name: array.astype(np.float32) for name, array in found.items()}


def _block_weights(blocks: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    def normal(*shape: int, scale: float) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    found = {
        "embed": normal(_MELS, _WIDTH, scale=0.03),
        "places": normal(1, _FRAMES, _WIDTH, scale=0.1),
        "g": np.ones(_WIDTH, np.float32),
        "z": np.zeros(_WIDTH, np.float32),
        "scale": np.array(_WIDTH**-0.5, np.float32),
        "one": np.array([1]),
        "head": normal(_WIDTH, 12, scale=0.2),
    }
    for i in range(blocks):
        for name in ("wq", "wk", "wv", "wo"):
            found[f"{name}{i}"] = normal(_WIDTH, _WIDTH, scale=_WIDTH**-0.5)
        found[f"wu{i}"] = normal(_WIDTH, 2 * _WIDTH, scale=_WIDTH**-0.5)
        found[f"wd{i}"] = normal(2 * _WIDTH, _WIDTH, scale=_WIDTH**-0.5)
    return found


def sounds(count: int, level: float) -> list[Feeds]:
    """Tones that fade by five decades over faint noise; ``level`` is the largest magnitude."""
    found: list[Feeds] = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        time = np.arange(_SAMPLES)
        tone = np.sin(2 * np.pi * rng.uniform(0.02, 0.4) * time) * np.logspace(0, -5, _SAMPLES)
        noise = rng.standard_normal(_SAMPLES) * 1e-5
        found.append({"x": (level * (tone + noise)).astype(np.float32)[None, None]})
    return found
