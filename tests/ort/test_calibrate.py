"""Streaming calibration on real ONNX Runtime sessions, and its cache."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from trtopt.errors import InvalidModelError, UsageError
from trtopt.events import Event
from trtopt.graph.artifact import input_spec
from trtopt.precision.observe.calibrate import CacheFile, Calibration, cached_collect, collect
from trtopt.precision.observe.samples import open_samples
from trtopt.precision.observe.statistics import StatsBuilder
from trtopt.precision.observe.stream import Samples
from trtopt.support.ort_session import OrtSession

RNG = np.random.default_rng(0)
DATA = RNG.standard_normal((12, 3, 8, 8)).astype(np.float32)
WEIGHT = RNG.standard_normal((16, 3, 3, 3)).astype(np.float32)
CODE = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[N, 3, 8, 8] x) => (float[N, 16, 8, 8] y, int64[N] best)
{
    c = Conv <pads = [1, 1, 1, 1]> (x, w)
    r = Relu (c)
    e = Exp (r)
    y = Log (e)
    m = ReduceMax <axes = [1, 2, 3], keepdims = 0> (r)
    best = Cast <to = 7> (m)
}
"""


def net(code: str = CODE, scale: float = 1.0) -> ir.Model:
    proto = onnx.parser.parse_model(code)
    if "(x, w)" in code:
        proto.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT * np.float32(scale), "w"))
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def samples_of(model: ir.Model, data: object) -> Samples:
    return open_samples(data, [input_spec(value) for value in model.graph.inputs])


def run(
    data: object, code: str = CODE, histogram: tuple[str, ...] = ("x", "r"), ranges: tuple[str, ...] = ("y",)
) -> Calibration:
    model = net(code)
    return collect(model, samples_of(model, data), histogram=histogram, ranges=ranges)


def test_every_element_of_every_sample_is_counted_as_onnx_runtime_computes_it() -> None:
    found = run({"x": DATA})
    assert found.samples == 12
    assert found.seconds > 0
    assert found.peak_rss_bytes > 1 << 20
    with OrtSession(net(), ["r", "y"]) as session:
        outputs = [dict(zip(("r", "y"), session.run({"x": image[None]}), strict=True)) for image in DATA]
    for name, full in (("x", True), ("r", True), ("y", False)):
        expected = StatsBuilder(full)
        for index, output in enumerate(outputs):
            expected.update(DATA[index : index + 1] if name == "x" else output[name])
        assert found.table.stats[name] == expected.finish()
        assert found.table.stats[name].count == 12 * (3 if name == "x" else 16) * 64


def test_the_table_does_not_depend_on_order_batches_or_files(tmp_path: Path) -> None:
    whole = dict(run({"x": DATA}).table.stats)
    order = RNG.permutation(12)
    assert dict(run({"x": DATA[order]}).table.stats) == whole
    assert dict(run([{"x": part} for part in np.array_split(DATA, 5)]).table.stats) == whole
    for index, part in enumerate(np.array_split(DATA[order], 3)):
        np.savez(tmp_path / f"{index}.npz", x=part)
    assert dict(run(tmp_path).table.stats) == whole


def test_a_tensor_asked_for_twice_gets_its_histogram() -> None:
    assert run({"x": DATA}, histogram=("r",), ranges=("r", "x")).table.stats["r"].has_histogram


def test_inputs_alone_need_no_run() -> None:
    found = run({"x": DATA}, histogram=("x",), ranges=())
    assert found.table.stats["x"].count == DATA.size


@pytest.mark.parametrize("name", ["w", "best", "nothing"])
def test_only_floating_tensors_that_are_computed_can_be_asked_for(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        run({"x": DATA}, histogram=(name,))


def test_a_broken_reference_is_recorded_and_warned_of() -> None:
    events: list[Event] = []
    code = CODE.replace("y = Log (e)", "n = Neg (e)\n    y = Log (n)")
    model = net(code)
    found = collect(model, samples_of(model, {"x": DATA}), histogram=("r",), ranges=("y",), on_event=events.append)
    assert found.table.stats["y"].nonfinite == found.table.stats["y"].count
    warnings = [event.text for event in events if event.kind == "warning"]
    assert len(warnings) == 1
    assert "y (Log): 12288 of 12288 elements" in warnings[0]


def test_progress_is_told_sample_by_sample() -> None:
    events: list[Event] = []
    model = net()
    collect(model, samples_of(model, {"x": DATA}), histogram=("r",), on_event=events.append)
    assert [event.kind for event in events] == ["start", *["advance"] * 12, "end"]
    assert events[0].total == 12


def test_a_bad_sample_stops_the_run() -> None:
    images = DATA.copy()
    images[7, 0, 0, 0] = np.nan
    with pytest.raises(UsageError, match="NaN"):
        run({"x": images})


def test_a_model_that_fails_on_a_sample_is_an_invalid_model() -> None:
    code = CODE.replace("float[N, 3, 8, 8] x", "float[N, 3, H, W] x").replace(
        "float[N, 16, 8, 8]", "float[N, 16, H, W]"
    )
    code = code.replace("(x, w)", "(x, w)\n    f = Constant <value_ints = [1, 1024]> ()\n    q = Reshape (c, f)")
    with pytest.raises(InvalidModelError, match="Reshape"):
        run([{"x": DATA[:1]}, {"x": DATA[:1, :, :4]}], code, ranges=("q",))


def cached(
    tmp_path: Path,
    data: np.ndarray = DATA,
    key: str = "model",
    histogram: tuple[str, ...] = ("r",),
    ranges: tuple[str, ...] = ("y",),
    file: str | None = None,
) -> tuple[Calibration, list[str]]:
    events: list[Event] = []
    model = net()
    samples = samples_of(model, {"x": data})
    place = tmp_path / file if file else None
    cache = CacheFile(key, samples.sha256, folder=tmp_path, file=place, on_event=events.append)
    found = cached_collect(model, samples, cache, histogram=histogram, ranges=ranges, on_event=events.append)
    return found, [event.text for event in events if event.kind == "warning"]


@pytest.mark.parametrize("file", [None, "stats.calib"])
def test_a_second_calibration_comes_from_the_cache(tmp_path: Path, file: str | None) -> None:
    first, _ = cached(tmp_path, file=file)
    again, warnings = cached(tmp_path, file=file)
    assert (first.cached, again.cached) == (False, True)
    assert not warnings
    assert dict(again.table.stats) == dict(first.table.stats)
    assert again.samples == 12
    assert again.seconds == 0


def test_a_subset_of_the_tensors_is_served_and_a_superset_is_collected_once(tmp_path: Path) -> None:
    cached(tmp_path, histogram=("r",), ranges=("y",))
    assert cached(tmp_path, histogram=(), ranges=("r",))[0].cached
    assert not cached(tmp_path, histogram=("x",), ranges=())[0].cached
    for histogram, ranges in ((("r",), ("y",)), (("x", "r"), ())):
        assert cached(tmp_path, histogram=histogram, ranges=ranges)[0].cached
    assert len(list((tmp_path / "calibration").iterdir())) == 1


def test_other_data_or_another_model_calibrates_anew(tmp_path: Path) -> None:
    cached(tmp_path)
    assert not cached(tmp_path, data=DATA[:6])[0].cached
    assert not cached(tmp_path, key="other")[0].cached
    assert cached(tmp_path)[0].cached


def test_an_explicit_file_of_another_model_is_replaced_with_a_warning(tmp_path: Path) -> None:
    cached(tmp_path, file="stats.calib")
    found, warnings = cached(tmp_path, key="other", file="stats.calib")
    assert not found.cached
    assert "another model" in warnings[0]
    assert cached(tmp_path, key="other", file="stats.calib")[0].cached


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "text", "version", "folder"])
def test_a_damaged_cache_is_replaced_with_a_warning(tmp_path: Path, damage: str) -> None:
    first, _ = cached(tmp_path)
    path = next((tmp_path / "calibration").iterdir())
    data = bytearray(path.read_bytes())
    if damage == "truncate":
        data = data[: len(data) // 2]
    elif damage == "flip":
        data[len(data) // 2] ^= 0xFF
    elif damage == "empty":
        data = bytearray()
    elif damage == "text":
        data = bytearray(b"[1, 2, 3]\n")
    elif damage == "version":
        head, _, body = bytes(data).partition(b"\n")
        data = bytearray(json.dumps({**json.loads(head), "format": "other/9"}).encode() + b"\n" + body)
    path.write_bytes(data)
    if damage == "folder":
        path.unlink()
        path.mkdir()
        found, warnings = cached(tmp_path)
        assert dict(found.table.stats) == dict(first.table.stats)
        assert len(warnings) == 2 and "cannot be used" in warnings[0] and "not kept" in warnings[1]
        return
    found, warnings = cached(tmp_path)
    assert not found.cached
    assert "cannot be used" in warnings[0]
    assert dict(found.table.stats) == dict(first.table.stats)
    assert cached(tmp_path)[0].cached


def test_a_cache_that_cannot_be_written_fails_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="folder does not exist"):
        cached(tmp_path, file="missing/stats.calib")


def test_no_partial_file_is_left_when_calibration_fails(tmp_path: Path) -> None:
    images = DATA.copy()
    images[3] = np.inf
    with pytest.raises(UsageError):
        cached(tmp_path, data=images, file="stats.calib")
    assert not list(tmp_path.iterdir())


def test_weights_handed_over_by_reference_give_the_same_results_and_unused_ones_do_no_harm(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(CODE)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(WEIGHT, "w"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4096, np.float32), "unused"))
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    mapped, memory = OrtSession(ir.load(tmp_path / "m.onnx")), OrtSession(net())
    for left, right in zip(mapped.run({"x": DATA}), memory.run({"x": DATA}), strict=True):
        assert np.array_equal(left, right)
