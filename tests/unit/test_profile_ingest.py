"""trtexec's exports of TensorRT 7 to 11: no layer and no time lost, and nothing in a file trusted."""

from __future__ import annotations

import gzip
import json
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from drawn_cases import given
from hypothesis import strategies as st
from trtexec_files import (
    ATTENTION_10,
    CONVOLUTION_8,
    CONVOLUTION_10,
    FOREIGN,
    GEMM_10,
    GEMM_11,
    IO_11,
    ODD,
    layer_info,
    places,
    profile_text,
    row,
    tensor,
    time_record,
    with_value,
    written,
)

from trtopt.errors import UsageError
from trtopt.profiling import ingest as module
from trtopt.profiling.ingest import ingest
from trtopt.profiling.measured import Measurement
from trtopt.roofline.work import Gemm

NOOP = {**CONVOLUTION_8, "Name": "reshape_after_Gemm_48", "LayerType": "NoOp"}


def read(folder: Path, info: Any, profile: Any, times: Any = None) -> Measurement:
    return ingest(
        written(folder, "layers.json", info),
        written(folder, "profile.json", profile),
        None if times is None else written(folder, "times.json", times),
    )


def refused(folder: Path, info: Any, profile: Any, times: Any = None) -> UsageError:
    with pytest.raises(UsageError) as caught:
        read(folder, info, profile, times)
    assert caught.value.where and caught.value.remedy
    return caught.value


def total(found: Measurement) -> Decimal:
    return sum((Decimal(repr(layer.measured_us)) for layer in found.layers), Decimal(0))


def test_the_profile_of_tensorrt_7_has_means_only(tmp_path: Path) -> None:
    """name, timeMs, averageMs and percentage (samples/common/sampleReporting.cpp of releases 7.0 to 8.2)."""
    found = read(
        tmp_path,
        {"Layers": ["conv1 + relu1", "pool1"]},
        profile_text([row("conv1 + relu1", "0.123456"), row("pool1", "1e-05")]),
        [time_record(1.0, 0.25, None, "In"), time_record(2.0, 0.75, None, "In")],
    )
    assert [layer.measured_us for layer in found.layers] == [123.456, 0.01]
    assert [layer.median_us for layer in found.layers] == [None, None]
    assert found.layers[0].info.onnx_nodes == ("conv1", "relu1")
    assert (found.source.version, found.source.runs) == ("", 100)
    assert (found.end_to_end_us, found.end_to_end_spread_us, found.host_us) == (500.0, 250.0, None)
    assert any("names only" in warning and "detailed" in warning for warning in found.warnings)


def test_tensorrt_8_is_read_from_its_names(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        layer_info(CONVOLUTION_8, NOOP),
        profile_text([row(CONVOLUTION_8["Name"], "0.0512"), row("reshape_after_Gemm_48", "0")], 1),
    )
    convolution, nothing = found.layers
    assert convolution.info.onnx_nodes == ("node_of_a_1", "node_of_a_bn_1", "node_of_a_bn_2")
    assert convolution.op == "Conv" and convolution.sparse_weights is None
    assert convolution.work is not None and convolution.work.gemm == Gemm(16 * 28 * 28, 256, 512)
    assert (nothing.measured_us, nothing.work, nothing.info.is_kernel) == (0.0, None, False)
    assert (found.source.version, found.source.launching) == ("8.2 to 8.5", "single run")
    assert found.warnings == ()


def test_tensorrt_10_is_read_from_its_metadata(tmp_path: Path) -> None:
    layers = (CONVOLUTION_10, GEMM_10, ATTENTION_10, FOREIGN)
    found = read(tmp_path, layer_info(*layers), profile_text([row(str(each["Name"]), "0.5", "0.4") for each in layers]))
    convolution, product, attention, foreign = found.layers
    assert convolution.info.onnx_nodes == ("/conv1/Conv", "/relu/Relu")
    assert convolution.sparse_weights is True
    assert product.info.onnx_nodes == ("/key/MatMul", "/query/MatMul", "/value/MatMul")
    assert product.work is not None and product.work.gemm == Gemm(40, 256, 256, 3)
    assert attention.work is not None and attention.work.kind == "attention"
    assert foreign.work is None and foreign.info.onnx_nodes == ("/softmax/Softmax",)
    assert {layer.median_us for layer in found.layers} == {400.0}
    assert (found.source.version, found.source.launching, found.source.runs) == ("8.6 to 10", "profile", 100)
    assert found.warnings == ("the layer info does not tell the work of 1 of 4 kernels: 1 Myelin",)


def test_tensorrt_11_is_read_with_its_tensors_as_objects(tmp_path: Path) -> None:
    found = read(tmp_path, {"Layers": [GEMM_11], **IO_11}, profile_text([row("gemm_myl0_1", "0.002", "0.002")]))
    (product,) = found.layers
    assert (found.source.version, product.info.onnx_nodes) == ("11", ("MatMul_0", "Add_1"))
    assert product.work is not None
    assert (product.work.gemm, product.work.dtype) == (Gemm(8, 32, 64), "bf16")
    assert product.work.weight_bytes == 64 * 32 * 2 + 4


def test_times_are_medians_of_the_run(tmp_path: Path) -> None:
    records = [time_record(0.0, 5.0, 1.0), time_record(1.0, 0.3, 0.02), time_record(2.0, 0.1, 0.04)]
    found = read(tmp_path, layer_info(CONVOLUTION_8), profile_text([row(CONVOLUTION_8["Name"], "0.3")]), records)
    assert (found.end_to_end_us, found.end_to_end_spread_us) == (300.0, 200.0)
    assert found.host_us == pytest.approx(40.0, rel=1e-9)


def test_points_in_time_that_are_too_coarse_do_not_count(tmp_path: Path) -> None:
    """trtexec writes six digits, so that after a second an enqueue of 5 us takes 0 or 10."""
    records = [time_record(999.0, 0.3, 0.005), time_record(1000.0, 0.3, 0.01), time_record(1001.0, 0.3, 0.01)]
    args = layer_info(CONVOLUTION_8), profile_text([row(CONVOLUTION_8["Name"], "0.3")])
    assert read(tmp_path, *args, records).host_us == pytest.approx(5.0, rel=1e-9)
    assert read(tmp_path, *args, records[1:]).host_us == pytest.approx(10.0, rel=1e-9)


def test_each_file_may_be_packed(tmp_path: Path) -> None:
    info, profile = json.dumps(layer_info(CONVOLUTION_8)), profile_text([row(CONVOLUTION_8["Name"], "0.3")])
    times = json.dumps([time_record(0.0, 0.25)])
    plain = read(tmp_path, info, profile, times)
    packed = read(tmp_path, *(gzip.compress(text.encode()) for text in (info, profile, times)))
    assert plain == packed


@pytest.mark.parametrize("place", [0, 1, 2, None])
def test_the_number_of_runs_may_stand_anywhere_or_nowhere(tmp_path: Path, place: int | None) -> None:
    rows = [row("a", "0.1"), row("b", "0.2")]
    if place is not None:
        rows.insert(place, '{ "count" : 7 }')
    found = read(tmp_path, {"Layers": ["a", "b"]}, profile_text(rows, runs=None))
    assert found.source.runs == (None if place is None else 7)
    assert found.source.launching == "profile"
    assert [layer.measured_us for layer in found.layers] == [100.0, 200.0]


def test_layers_are_matched_by_name_where_the_profile_leaves_some_out(tmp_path: Path) -> None:
    found = read(tmp_path, {"Layers": ["a", "b", "c"]}, profile_text([row("c", "0.3"), row("a", "0.1")]))
    assert [(layer.info.name, layer.measured_us) for layer in found.layers] == [("a", 100.0), ("b", 0.0), ("c", 300.0)]
    assert any("1 layer" in warning and "0 us" in warning for warning in found.warnings)


def test_layers_of_one_name_stay_apart(tmp_path: Path) -> None:
    found = read(
        tmp_path, {"Layers": ["a", "a", "a #2", "a"]}, profile_text([row("a", "1"), row("a", "2"), row("a #2", "4")])
    )
    assert [(layer.info.name, layer.measured_us) for layer in found.layers] == [
        ("a", 1000.0),
        ("a #3", 2000.0),
        ("a #2", 4000.0),
        ("a #4", 0.0),
    ]


def test_a_layer_that_runs_in_a_loop_takes_the_sum(tmp_path: Path) -> None:
    rows = [row("a", "0.1", "0.1"), row("b", "0.2", "0.2"), row("b", "0.3", "0.3")]
    found = read(tmp_path, {"Layers": ["a", "b"]}, profile_text(rows))
    assert [(layer.measured_us, layer.median_us) for layer in found.layers] == [(100.0, 100.0), (500.0, None)]
    assert any("loop" in warning for warning in found.warnings)


@pytest.mark.parametrize("ran", [0, 1])
def test_of_several_optimization_profiles_the_one_that_ran_is_taken(tmp_path: Path, ran: int) -> None:
    def layers_of(number: int) -> list[dict[str, Any]]:
        suffix = f" [profile {number}]" if number else ""
        convolution = {**CONVOLUTION_10, "Name": f"/conv1/Conv + /relu/Relu{suffix}"}
        product = {
            **GEMM_10,
            "Name": f"/fc/MatMul_myl{number}_1",
            "Outputs": [tensor(f"out{suffix}", 3, 40, 256, form="Half")],
        }
        return [convolution, product]

    both = [layers_of(0), layers_of(1)]
    names = [each["Name"] for each in both[ran]]
    found = read(tmp_path, layer_info(*both[0], *both[1]), profile_text([row(name, "0.1") for name in names]))
    assert [layer.info.name for layer in found.layers] == names
    assert found.layers[0].info.onnx_nodes == ("/conv1/Conv", "/relu/Relu")
    assert any(f"2 optimization profiles; the times are of profile {ran}" in each for each in found.warnings)


def test_names_that_trtexec_does_not_escape_are_read(tmp_path: Path) -> None:
    r"""sampleReporting.cpp writes the name between quotes as it is: "a\d" and a quote make invalid JSON."""
    name = 'say "x"\\d + b'
    found = read(tmp_path, {"Layers": [name, "a\x1eb"]}, profile_text([row(name, "0.1"), row("a\x1eb", "0.2")]))
    assert [layer.measured_us for layer in found.layers] == [100.0, 200.0]


def test_a_sparse_kernel_has_the_work_of_one(tmp_path: Path) -> None:
    sparse = {**CONVOLUTION_8, "Name": "c", "TacticName": "sm80_xmma_fprop_sparse_conv_interleaved_i8i8_i8i32_f32"}
    found = read(tmp_path, layer_info(CONVOLUTION_8, sparse), profile_text([row("c", "1")]))
    dense, other = (layer.work for layer in found.layers)
    assert dense is not None and other is not None
    assert (dense.sparse, other.sparse) == (False, True) and other.weight_bytes < dense.weight_bytes


def test_files_of_different_engines_are_named(tmp_path: Path) -> None:
    names = [f"conv{number}" for number in range(9)]
    error = refused(tmp_path, {"Layers": ["a", "b", *names[:2]]}, profile_text([row(name, "1") for name in names]))
    assert "7 of 9 names" in error.what
    assert "'conv2'" in error.where and "'conv8'" not in error.where
    assert "only in the layer info (2): 'a', 'b'" in error.where
    assert "--exportLayerInfo" in error.remedy


def test_swapped_files_are_recognised(tmp_path: Path) -> None:
    info, profile = {"Layers": ["a"]}, profile_text([row("a", "1")])
    times = [time_record(0.0, 1.0)]
    for args, what, remedy in (
        ((profile, info), "given as layer info holds the layer profile", "--layer-profile"),
        ((info, info), "given as layer profile holds the layer info", "--layer-info"),
        ((info, times), "given as layer profile holds the times", "--times"),
        ((info, profile, profile), "given as times holds the layer profile", "--layer-profile"),
    ):
        error = refused(tmp_path, *args)
        assert what in error.what and remedy in error.remedy


@pytest.mark.parametrize("which", [0, 1, 2])
def test_truncated_files_are_an_error_with_the_path(tmp_path: Path, which: int) -> None:
    texts = [
        json.dumps(layer_info(CONVOLUTION_8)),
        profile_text([row(CONVOLUTION_8["Name"], "0.3")]),
        json.dumps([time_record(0.0, 0.25)]),
    ]
    whole = texts[which]
    for end in {0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 3}:
        texts[which] = whole[:end]
        error = refused(tmp_path, *texts)
        assert str(tmp_path) in error.where
    texts[which] = whole[: len(whole) // 2]
    assert "ends too early" in refused(tmp_path, *texts).what
    packed: list[Any] = [text.encode() for text in texts]
    packed[which] = gzip.compress(whole.encode())[:-20]
    assert "cannot be unpacked" in refused(tmp_path, *packed).what


@pytest.mark.parametrize(
    "number", ["-1", "1e400", "NaN", "Infinity", '"1"', "null", "true", "[1]", "1e99999999999999999999", "9" * 5000]
)
def test_a_time_that_is_no_time_is_an_error(tmp_path: Path, number: str) -> None:
    info = {"Layers": ["a"]}
    for profile in (profile_text([row("a", number)]), profile_text([row("a", "1", number)])):
        refused(tmp_path, info, profile)
    times = f'[{{"computeMs": {number}}}]'
    refused(tmp_path, info, profile_text([row("a", "1")]), times)


@pytest.mark.parametrize(
    ("info", "profile", "times"),
    [
        ({"Layers": []}, None, None),
        ({"Layers": {}}, None, None),
        ({"Layers": [1]}, None, None),
        ({"Layers": [{"Name": "a"}]}, None, None),
        ("[" * 200_000, None, None),
        ("\x00\x01", None, None),
        (b"\xff\xfe\x00", None, None),
        (None, "[]", None),
        (None, '[{"count": 3}]', None),
        (None, '[{"count": 0}, {"name": "a", "averageMs": 1}]', None),
        (None, '[{"count": 1.5}, {"name": "a", "averageMs": 1}]', None),
        (None, '[{"averageMs": 1}]', None),
        (None, '[1, {"name": "a", "averageMs": 1}]', None),
        (None, '[{"name": 3, "averageMs": 1}]', None),
        (None, None, "[]"),
        (None, None, '[{"computeMs": 1}, 3]'),
        (None, None, '[{"computeMs": 1, "startEnqMs": 1}]'),
        (None, None, '[{"computeMs": 1, "startEnqMs": 2, "endEnqMs": 1}]'),
    ],
)
def test_json_of_another_form_is_an_error(tmp_path: Path, info: Any, profile: Any, times: Any) -> None:
    refused(tmp_path, info or {"Layers": ["a"]}, profile or profile_text([row("a", "1")]), times)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    profile = written(tmp_path, "profile.json", profile_text([row("a", "1")]))
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError, match="The layer info cannot be read"):
            ingest(path, profile)


def test_no_file_is_unpacked_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 20)
    error = refused(tmp_path, gzip.compress(b" " * (2 << 20)), profile_text([row("a", "1")]))
    assert "larger than 1 MiB" in error.what


ENGINE = layer_info(CONVOLUTION_8, CONVOLUTION_10, GEMM_10, ATTENTION_10, FOREIGN, GEMM_11, NOOP, **IO_11)
ROWS = profile_text([row(str(layer["Name"]), "0.25", "0.2") for layer in ENGINE["Layers"]])
TIMES = json.dumps([time_record(1.0, 0.25), time_record(2.0, 0.5)])


def outcome(info: Any, profile: Any, times: Any) -> Measurement | UsageError:
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = read(Path(folder), info, profile, times)
        except UsageError as error:
            return error
    assert all(layer.measured_us >= 0 for layer in found.layers)
    assert len({layer.info.name for layer in found.layers}) == len(found.layers)
    assert all(layer.work.bytes >= 0 for layer in found.layers if layer.work is not None)
    return found


PLACES = places(ENGINE)


@given(st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from([..., *ODD])), min_size=1, max_size=3), many=150)
def test_layer_info_with_other_values_is_read_or_refused(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    info = ENGINE
    for path, new in changes:
        if path in places(info):
            info = with_value(info, path, new)
    outcome(info, ROWS, TIMES)


@given(
    st.integers(0, 2),
    st.floats(0, 1),
    st.integers(0, 40),
    st.text(st.sampled_from('{}[]",:0-e.\\ \x00\n'), max_size=4),
    many=200,
)
def test_damaged_text_is_read_or_refused(which: int, place: float, cut: int, put: str) -> None:
    texts = [json.dumps(ENGINE), ROWS, TIMES]
    at = int(place * len(texts[which]))
    texts[which] = texts[which][:at] + put + texts[which][at + cut :]
    outcome(*texts)


@given(st.lists(st.decimals(0, 10**6, places=5), min_size=1, max_size=30))
def test_the_sum_is_that_of_the_file_to_the_last_digit(times: list[Decimal]) -> None:
    names = [f"layer {index % 7}" for index in range(len(times))]
    found = outcome(
        {"Layers": names}, profile_text([row(*each) for each in zip(names, map(str, times), strict=True)]), TIMES
    )
    assert isinstance(found, Measurement)
    assert total(found) == sum(times) * 1000
