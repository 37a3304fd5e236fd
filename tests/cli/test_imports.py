"""What is taken over from earlier quantization: calibration caches of TensorRT, models with Q/DQ; bad input."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from small_models import samples, save_small

Run = Callable[..., "subprocess.CompletedProcess[str]"]
INT8 = ("--int8", "--keep-all-int8", "--recipes", "none", "--backend", "tensorrt-rtx")


def write_cache(folder: Path, *lines: str) -> Path:
    path = folder / "model.cache"
    path.write_text("\n".join(["TRT-8601-EntropyCalibration2", *lines]) + "\n")
    return path


def line(name: str, scale: float) -> str:
    return f"{name}: {struct.pack('>f', scale).hex()}"


def step(folder: Path, name: str) -> dict[str, object]:
    found = json.loads((folder / "r.json").read_text())["steps"]
    return next(item for item in found if item["name"] == name)


def scales_of(path: Path) -> dict[str, np.float32]:
    """The scale of each QuantizeLinear by the tensor it reads, through casts."""
    model = onnx.load(path)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    source = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Cast"}
    return {
        source.get(node.input[0], node.input[0]): np.float32(constants[node.input[1]])
        for node in model.graph.node
        if node.op_type == "QuantizeLinear"
    }


def test_the_scales_of_a_tensorrt_cache_end_in_the_model(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    np.savez(tmp_path / "calib.npz", x=samples())
    scales = {"x": 0.0151, "r1": 0.0333, "c1": 0.5, "p": 0.0077}
    cache = write_cache(tmp_path, *(line(name, scale) for name, scale in scales.items()))
    content = cache.read_bytes()
    options = ("model.onnx", "-o", "o.onnx", "--calib", "calib.npz", "--calib-cache", cache.name, "--report", "r.json")
    done = trtopt("optimize", *options, *INT8)
    assert done.returncode == 0, done.stderr
    found = scales_of(tmp_path / "o.onnx")
    for tensor in ("x", "r1"):
        half = np.float16(scales[tensor])
        above = half if half >= np.float32(scales[tensor]) else np.nextafter(half, np.float16(1))
        assert found[tensor] == np.float32(above), "the scale as FP16 holds it, or the next one above"
    assert cache.read_bytes() == content, "TensorRT's file is only read"
    details = " ".join(step(tmp_path, "calibration-cache")["details"])  # type: ignore[arg-type]
    assert "INT8 ranges of" in details and "nothing quantizes them (c1" in details


def test_without_samples_tensors_that_the_cache_lacks_stay_16_bit(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    write_cache(tmp_path, line("x", 0.02), line("c1", 0.03))
    options = ("model.onnx", "-o", "o.onnx", "--calib-cache", "model.cache", "--report", "r.json")
    done = trtopt("optimize", *options, *INT8, "--opt-shapes", "x:4x3x8x8")
    assert done.returncode == 0, done.stderr
    assert list(scales_of(tmp_path / "o.onnx")) == ["x"]
    refused = {item["node"]: item["reason"] for item in step(tmp_path, "precision-int8")["refusals"]}  # type: ignore[attr-defined]
    assert (
        refused["conv2"] == "r1 has no range in the calibration cache model.cache, and there are no samples (--calib)"
    )


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            [f"other/{number}: 3c010a14" for number in range(9)],
            "calibration cache of another model: 9 of its 9 tensors",
        ),
        (["x: 3c010a14", "r1: 7fc00000"], "the scale of 'r1' is nan"),
        (["x: 3c010a14", "r1: 3c01"], "8 hexadecimal digits"),
    ],
)
def test_a_wrong_cache_ends_the_run_before_the_work(trtopt: Run, tmp_path: Path, lines: list[str], said: str) -> None:
    save_small(tmp_path)
    write_cache(tmp_path, *lines)
    done = trtopt("optimize", "model.onnx", "-o", "o.onnx", "--calib-cache", "model.cache", *INT8)
    assert done.returncode == 2 and said in done.stderr and "remedy:" in done.stderr
    assert not (tmp_path / "o.onnx").exists() and "Traceback" not in done.stderr


def quantized_in_bad_places() -> onnx.ModelProto:
    """x [2, 16, 8, 8] -> Q/DQ -> conv -> Q/DQ, + x, ReLU -> Q/DQ -> y; UINT8, an INT32 bias."""
    rng = np.random.default_rng(0)
    arrays = {
        "s": np.float32(0.03),
        "z": np.uint8(128),
        "w": rng.integers(-127, 128, (16, 16, 3, 3)).astype(np.int8),
        "ws": np.float32(0.0005),
        "wz": np.int8(0),
        "b": rng.integers(-999, 999, 16).astype(np.int32),
        "bs": np.float32(0.03 * 0.0005),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "q"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"], "d"),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["v"], "v"),
        helper.make_node("DequantizeLinear", ["b", "bs"], ["c"], "c"),
        helper.make_node("Conv", ["d", "v", "c"], ["conv_out"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("QuantizeLinear", ["conv_out", "s", "z"], ["cq"], "cq"),
        helper.make_node("DequantizeLinear", ["cq", "s", "z"], ["cd"], "cd"),
        helper.make_node("Add", ["cd", "x"], ["sum"], "add"),
        helper.make_node("Relu", ["sum"], ["r"], "relu"),
        helper.make_node("QuantizeLinear", ["r", "s", "z"], ["rq"], "rq"),
        helper.make_node("DequantizeLinear", ["rq", "s", "z"], ["y"], "rd"),
    ]
    shape = [2, 16, 8, 8]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_qdq_in_a_bad_place_is_mended_and_the_report_says_what_moved(trtopt: Run, tmp_path: Path) -> None:
    onnx.save(quantized_in_bad_places(), tmp_path / "model.onnx")
    done = trtopt("optimize", "model.onnx", "-o", "o.onnx", "--fp16", "--report", "r.json", "--recipes", "none")
    assert done.returncode == 0, done.stderr
    model = onnx.load(tmp_path / "o.onnx")
    types = [node.op_type for node in model.graph.node]
    assert types.count("QuantizeLinear") == 1, "the convolution stays INT8"
    details = "\n".join(step(tmp_path, "existing-qdq")["details"])  # type: ignore[arg-type]
    assert "Add does not compute in 8 bits): conv_out -> add" in details
    assert "INT32 biases" in details and "zero point in the middle" in details and "only rounded by it): y" in details
    accuracy = json.loads((tmp_path / "r.json").read_text())["accuracy"]["outputs"]["y"]["sqnr_db"]
    assert accuracy > 30


def test_dynamic_quantization_is_refused_as_the_models_content(trtopt: Run, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], "dynamic"),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], "d"),
    ]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "model.onnx")
    done = trtopt("optimize", "model.onnx", "-o", "o.onnx", "--fp16")
    assert done.returncode == 3 and "node dynamic" in done.stderr and "--int8 --calib" in done.stderr


def test_constant_calibration_data_is_warned_of_by_name(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    np.savez(tmp_path / "calib.npz", x=np.full((8, 3, 8, 8), 0.5, np.float32))
    done = trtopt("optimize", "model.onnx", "-o", "o.onnx", "--calib", "calib.npz", *INT8)
    assert done.returncode == 0
    assert "input x (0.5): the same number in every element of every sample" in " ".join(done.stderr.split())


@pytest.mark.parametrize("content", [b"\x08\x07\x12\x07pytorch", b"label,7\n", b'{"labels": [1, 2]}'], ids=repr)
def test_a_file_that_is_no_cache_is_never_written_over(trtopt: Run, tmp_path: Path, content: bytes) -> None:
    save_small(tmp_path)
    np.savez(tmp_path / "calib.npz", x=samples())
    (tmp_path / "precious").write_bytes(content)
    done = trtopt("optimize", "model.onnx", "-o", "o.onnx", "--calib", "calib.npz", "--calib-cache", "precious", *INT8)
    assert done.returncode == 2 and "this one was left as it is" in done.stderr, done.stderr
    assert (tmp_path / "precious").read_bytes() == content and not (tmp_path / "o.onnx").exists()


def test_a_cache_with_a_byte_order_mark_is_read(trtopt: Run, tmp_path: Path) -> None:
    save_small(tmp_path)
    np.savez(tmp_path / "calib.npz", x=samples())
    cache = write_cache(tmp_path, line("x", 0.0151), line("r1", 0.0333))
    content = b"\xef\xbb\xbf" + cache.read_bytes()
    cache.write_bytes(content)
    options = ("model.onnx", "-o", "o.onnx", "--calib", "calib.npz", "--calib-cache", cache.name, "--report", "r.json")
    done = trtopt("optimize", *options, *INT8)
    assert done.returncode == 0 and "imported" in (tmp_path / "r.json").read_text(), done.stderr
    assert cache.read_bytes() == content
