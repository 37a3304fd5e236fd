"""Networks and files of sweeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def save_net(path: Path, seed: int) -> None:
    """x [N, 16] -> Gemm, ReLU, Gemm -> y [N, 8], with weights of its own."""
    rng = np.random.default_rng(seed)
    weights = {"w1": rng.standard_normal((16, 32)) / 4, "w2": rng.standard_normal((32, 8)) / 6}
    nodes = [
        helper.make_node("Gemm", ["x", "w1"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("Gemm", ["r", "w2"], ["y"], "second"),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 8])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def write_sweep(path: Path, *, store: str, settings: str = "") -> Path:
    """24 builds: two networks, two GPUs, three precisions, two shapes; a cache of its own."""
    for seed in (1, 2):
        net = path.parent / f"net{seed}.onnx"
        if not net.exists():
            save_net(net, seed)
    calib = path.parent / "calib.npz"
    if not calib.exists():
        np.savez(calib, x=np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32))
    path.write_text(
        f"""\
[build]
calib = "calib.npz"
recipes = "none"
cache_dir = "{store}-cache"
[matrix]
model = ["net1.onnx", "net2.onnx"]
gpu = ["L4", "A10"]
precision = ["fp32", "fp16", "int8"]
opt_shapes = ["x:1x16", "x:8x16"]
[sweep]
store = "{store}"
{settings}
[prices]
L4 = 0.71
A10 = 0.75
""",
        encoding="utf-8",
    )
    return path
