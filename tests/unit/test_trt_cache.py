"""Calibration caches of TensorRT: read as they are written, matched by name, refused where they are damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from drawn_cases import given
from hypothesis import strategies as st

from trtopt.errors import UsageError
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.precision.decide import plan_for, wanted_tensors
from trtopt.precision.observe.statistics import StatsBuilder, TensorStats
from trtopt.precision.observe.trt_cache import (
    check_belongs,
    imported_ranges,
    is_trt_cache,
    read_trt_cache,
    tensor_names,
)
from trtopt.precision.plan import FP16
from trtopt.precision.regions import Problem, find_candidates
from trtopt.precision.write import apply_plan
from trtopt.support.precision import Precision

NETWORK = """<ir_version: 10, opset_import: ["" : 21]>
g (float[8, 64] x) => (float[8, 64] y) <float[64, 64] w = {WEIGHTS}, int64[2] n = {8, 64}>
{
    [a] h = MatMul (x, w)
    [r] "/block 1/relu: out" = Relu (h)
    [t] v = Reshape ("/block 1/relu: out", n)
    [b] y = MatMul (v, w)
}
"""
HEADERS = ["TRT-8601-EntropyCalibration2", "TRT-7103-MinMaxCalibration", "TRT-100001-LegacyCalibration", "TRT-8XXX-A2"]


def digits(scale: float) -> str:
    return struct.pack(">f", scale).hex()


def cache_file(folder: Path, *lines: str, header: str = HEADERS[0], end: str = "\n") -> Path:
    path = folder / "model.cache"
    path.write_bytes((end.join([header, *lines]) + end).encode())
    return path


def network() -> ir.Model:
    numbers = ", ".join(f"{number:.4f}" for number in np.random.default_rng(0).uniform(-1, 1, 64 * 64))
    text = NETWORK.replace("WEIGHTS", numbers).replace('"/block 1/relu: out"', "relu_out")
    found = infer_shapes(ir.from_onnx_text(text))
    next(node for node in found.graph if node.name == "r").outputs[0].name = "/block 1/relu: out"
    return found


def observed(model: ir.Model) -> dict[str, TensorStats]:
    wanted = wanted_tensors(model, Precision.INT8, "tensorrt-rtx")
    builder = StatsBuilder(histogram=True)
    builder.update(np.random.default_rng(0).standard_normal(4096).astype(np.float32))
    return dict.fromkeys(wanted.histogram | wanted.ranges, builder.finish())


@pytest.mark.parametrize("header", HEADERS)
def test_header_names_and_scales_are_read(tmp_path: Path, header: str) -> None:
    path = cache_file(
        tmp_path,
        "x: 3c010a14",
        f"/block 1/relu: out: {digits(0.5)}",
        "(Unnamed Layer* 12) [Shuffle]_output: 3d000000",
        "(Unnamed Layer* 13) [Constant]_output: 0",
        header=header,
    )
    with pytest.raises(UsageError, match="8 hexadecimal digits"):
        read_trt_cache(path)
    lines = path.read_text().splitlines()[:-1]
    path.write_text("\r\n".join(lines) + "\r\n\r\n")
    found = read_trt_cache(path)
    assert is_trt_cache(path)
    assert (found.header, found.internal) == (header, 1)
    assert found.scales == {"x": struct.unpack(">f", bytes.fromhex("3c010a14"))[0], "/block 1/relu: out": 0.5}


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_a_scale_comes_back_from_its_range_unchanged(scale: float) -> None:
    assert np.float32(scale * 127 / 127) == np.float32(scale)


@pytest.mark.parametrize(
    ("lines", "line", "what"),
    [
        (["x: 7fc00000"], 2, "'x' is nan"),
        (["x: 00000000"], 2, "'x' is 0"),
        (["x: bc010a14"], 2, "-0.00"),
        (["x: 7f800000"], 2, "inf"),
        (["x: 3c010a14", "x: 3c010a15"], 3, "has a scale on line 2 already"),
        (["x: 3c010a14", "y: 3c01"], 3, "8 hexadecimal digits"),
        (["x: 3c010a14", "y"], 3, "8 hexadecimal digits"),
        (["x: 3c010a14", ": 3c010a14"], 3, "8 hexadecimal digits"),
        (["x: 3c010g14"], 2, "8 hexadecimal digits"),
    ],
)
def test_a_damaged_line_is_named_with_its_number(tmp_path: Path, lines: list[str], line: int, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_trt_cache(cache_file(tmp_path, *lines))
    assert what in caught.value.what
    assert caught.value.where.endswith(f"line {line}") and caught.value.remedy
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "content", [b"TRT-8601", b"TRT-\xff\xfe\x00", b"TRT-8601-EntropyCalibration2\nx: \xff\xfe", b"TRT-"]
)
def test_junk_behind_the_first_bytes_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "junk.cache"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="damaged"):
        read_trt_cache(path)


def test_an_empty_cache_and_one_without_end_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="names no tensor"):
        read_trt_cache(cache_file(tmp_path, "(Unnamed Layer* 1) [Shuffle]_output: 3d000000"))
    monkeypatch.setattr("trtopt.precision.observe.trt_cache._MAX_BYTES", 64)
    with pytest.raises(UsageError, match="too large"):
        read_trt_cache(cache_file(tmp_path, *(f"t{number}: 3c010a14" for number in range(9))))


def test_other_files_are_no_caches(tmp_path: Path) -> None:
    (tmp_path / "own.calib").write_bytes(b'{"format": "trtopt.calibration/1"}\n')
    assert not is_trt_cache(tmp_path / "own.calib") and not is_trt_cache(tmp_path / "missing")


def test_scales_of_the_cache_are_those_of_the_quantizers(tmp_path: Path) -> None:
    model = network()
    scales = {"x": 0.0123, "/block 1/relu: out": 0.5, "h": 0.25}
    cache = read_trt_cache(cache_file(tmp_path, *(f"{name}: {digits(scale)}" for name, scale in scales.items())))
    found = imported_ranges(
        cache, tensor_names(model), model, wanted_tensors(model, Precision.INT8, "tensorrt-rtx").histogram
    )
    assert found.missing == ()
    assert set(found.amax) == {"x", "v"}  # v is a copy of the ReLU's output
    problem = Problem(model, "tensorrt-rtx", observed(model), static_shapes(model, {}), "auto", FP16, found.amax)
    candidates = find_candidates(problem, ("int8",))
    plan = plan_for(problem, Precision.INT8, list(candidates.all.values()))
    assert {op.method for op in plan.quantized} == {"imported"} and len(plan.quantized) == 2
    written = apply_plan(model, plan)
    constants = {name: value.const_value.numpy() for name, value in written.graph.initializers.items()}
    for tensor, scale in (("x", 0.0123), ("v", 0.5)):
        stored = next(array for name, array in constants.items() if name.startswith(f"{tensor}_scale"))
        exact = np.float32(scale)
        # The scale as FP16 holds it, the next larger one where it does not.
        half = stored.astype(np.float16)
        assert np.float32(half) == stored.astype(np.float32)
        assert np.float32(np.nextafter(half, np.float16(0))) < exact <= np.float32(half)
    assert any("nothing quantizes them (h)" in line for line in found.details)


def test_scales_stay_exact_in_fp32(tmp_path: Path) -> None:
    model = network()
    cache = read_trt_cache(cache_file(tmp_path, f"x: {digits(0.0123)}", f"h: {digits(1.0)}"))
    found = imported_ranges(cache, tensor_names(model), model, {"x"})
    assert np.float32(found.amax["x"] / 127) == np.float32(0.0123)


def test_a_cache_of_another_model_is_refused_with_examples(tmp_path: Path) -> None:
    lines = [f"x: {digits(1)}", *(f"other/{number}: {digits(1)}" for number in range(7))]
    cache = read_trt_cache(cache_file(tmp_path, *lines))
    with pytest.raises(UsageError) as caught:
        check_belongs(cache, tensor_names(network()))
    assert "of another model: 7 of its 8 tensors" in caught.value.what
    assert "other/0, other/1" in caught.value.what and "samples" in caught.value.remedy


def test_tensors_without_a_range_are_refused_where_there_are_no_samples(tmp_path: Path) -> None:
    model = network()
    cache = read_trt_cache(cache_file(tmp_path, f"x: {digits(0.5)}", f"h: {digits(1)}"))
    found = imported_ranges(cache, tensor_names(model), model, {"x", "v"})
    assert found.missing == ("v",)
    unknown = found.unknown(cache.path)
    problem = Problem(
        model, "tensorrt-rtx", observed(model), static_shapes(model, {}), "auto", FP16, found.amax, unknown
    )
    candidates = find_candidates(problem, ("int8",))
    assert list(candidates.all) == ["a"]
    assert {item.node: item.reason for item in candidates.refused}["b"].startswith("v has no range in the calibration")
    # With samples, the tensor is calibrated as ever.
    calibrated = find_candidates(
        Problem(model, "tensorrt-rtx", observed(model), static_shapes(model, {}), "max", FP16, found.amax), ("int8",)
    )
    assert {op.node: op.method for op in calibrated.all.values()} == {"a": "imported", "b": "max"}


def test_what_the_rewrites_removed_is_said(tmp_path: Path) -> None:
    loaded, base = network(), network()
    for node in base.graph:
        if node.name == "a":
            node.outputs[0].name = "renamed"
    cache = read_trt_cache(cache_file(tmp_path, f"x: {digits(1)}", f"h: {digits(1)}"))
    details = imported_ranges(cache, tensor_names(loaded), base, {"x"}).details
    assert any("the rewrites removed them (h)" in line for line in details)
    assert "the INT8 ranges of 1 tensors imported" in details[0]
