"""Files that somebody made to do harm: reading is bounded, no pipe blocks, no link is followed where others write."""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from analysis_samples import full_analysis
from engine_files import manifest, rtx_engine, save
from profile_samples import small_profile

from trtopt.accuracy.sensitivity import Errors
from trtopt.analysis.sensitivity import KeptErrors
from trtopt.cache.checksummed import MOST_LINE_BYTES, lines_of
from trtopt.cache.folder import PRICES, SENSITIVITY, Blobs, damage, files
from trtopt.config.toml_file import load
from trtopt.engine.build import _warnings
from trtopt.engine.manifest import manifest_path, verify
from trtopt.errors import IntegrityError, InvalidModelError, UsageError
from trtopt.events import Event, ignore
from trtopt.graph.artifact import input_spec
from trtopt.hardware.spec import find_gpu, gpu_of
from trtopt.judge.protocol import Priced, PriceFile
from trtopt.precision.observe.calibrate import check_own
from trtopt.precision.observe.feeds import in_memory, open_arrays
from trtopt.precision.observe.trt_cache import is_trt_cache, read_trt_cache
from trtopt.report.files import write_forms
from trtopt.report.schema.analysis import Analysis
from trtopt.report.schema.manifest import has_digest, with_digest
from trtopt.report.schema.read import read_report
from trtopt.report.schema.sensitivity import OutputError, RegionError
from trtopt.report.schema.steps import Cost
from trtopt.support import json_text
from trtopt.support.files import check_outputs, open_file, open_shared, read_file, read_shared
from trtopt.support.json_text import MOST_VALUES, converted, decoded, plain

PRICE = Priced(Cost(1, 0, 10, 1.0), ())


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe.json"
    os.mkfifo(path)
    return path


def hole(path: Path, size: int = 1 << 40) -> Path:
    """A file of a terabyte that takes no place."""
    path.touch()
    os.truncate(path, size)
    return path


def test_a_file_larger_than_memory_is_not_read(tmp_path: Path) -> None:
    big = hole(tmp_path / "big.json")
    for read in (read_report, read_trt_cache, lambda path: load(path, "build")):
        with pytest.raises(UsageError, match="too large"):
            read(big)
    with pytest.raises(UsageError, match="too large"), open_file(big, "The file", 100):
        pass
    with pytest.raises(ValueError, match="too large"):
        read_shared(big, 100)
    assert read_file(hole(tmp_path / "small", 3), "The file", 3) == b"\0\0\0"


def test_a_pipe_does_not_block(pipe: Path) -> None:
    for read in (read_report, read_trt_cache, lambda path: load(path, "build"), open_arrays):
        with pytest.raises(UsageError, match="not a file"):
            read(pipe)
    assert not is_trt_cache(pipe)
    check_own(pipe)  # an output: check_writable refuses it


def test_prices_are_not_appended_to_what_a_link_leads_to(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    place = PriceFile(("judge",), tmp_path, ignore).path
    place.parent.mkdir()
    place.symlink_to(victim)
    events: list[Event] = []
    PriceFile(("judge",), tmp_path, events.append).add("key", PRICE)
    place.unlink()
    prices = PriceFile(("judge",), tmp_path, events.append)
    prices.add("key", PRICE)
    place.unlink()
    place.symlink_to(victim)
    prices.add("key", PRICE)
    assert ["cannot be written" in event.text for event in events] == [True, True]
    assert victim.read_text() == "mine\n" and prices.load() == {}


def test_a_pipe_in_the_place_of_prices_is_refused(tmp_path: Path) -> None:
    place = PriceFile(("judge",), tmp_path, ignore).path
    place.parent.mkdir()
    os.mkfifo(place)
    events: list[Event] = []
    PriceFile(("judge",), tmp_path, events.append).add("key", PRICE)
    assert ["cannot be written (it is not a regular file" in event.text for event in events] == [True]
    with pytest.raises(OSError, match="not a regular file"):
        open_shared(place, os.O_RDONLY)


def test_a_file_of_line_feeds_is_no_file_of_prices(tmp_path: Path) -> None:
    prices = PriceFile(("judge",), tmp_path, ignore)
    prices.add("key", PRICE)
    assert prices.load() == {"key": PRICE}
    with open(prices.path, "ab") as file:
        file.write(b"\n" * (MOST_LINE_BYTES // 2))
    assert prices.load() == {}
    (found,) = (file for file in files(tmp_path) if file.kind == PRICES)
    assert "lines" in damage(found)
    with pytest.raises(ValueError, match="lines"):
        lines_of(b"\n" * 1_000_000)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[" + b"[]," * MOST_VALUES + b"[]]", "values"),
        (b"[" * 100_000, "deep"),
        (b'["\\ud800"]', "surrogate"),
        (b"[1e999]", "too large"),
        (b"[NaN]", "no number"),
        (b"[1" + b"0" * 5000 + b"]", "too large"),
        (b"\xff", "utf-8"),
        ("[1]".encode("utf-16"), "utf-8"),
    ],
)
def test_json_that_does_harm_is_refused(content: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decoded(content)


def test_json_keeps_its_values() -> None:
    value = {"a": [1, -2.5, None, True, "é", "\U0001f600", (1 << 63) - 1], "b": {}}
    assert decoded(json.dumps(value).encode()) == decoded(json.dumps(value, ensure_ascii=False).encode()) == value


def test_a_manifest_is_not_parsed_before_its_hash_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = rtx_engine()
    path = save(tmp_path, data, manifest(data))
    content = manifest_path(path).read_bytes()
    assert has_digest(content) and verify(path).engine_bytes == len(data)
    for other in (content[:-2], content.replace(b"L4", b"T4"), content[1:], b"", content * 2, b"[" + content):
        assert not has_digest(other)
    monkeypatch.setattr(json_text, "MOST_VALUES", 1000)
    manifest_path(path).write_bytes(with_digest({"bomb": [[]] * 1001}))
    with pytest.raises(IntegrityError, match="values"):
        verify(path)


def test_what_no_encoding_takes_is_escaped_in_reports() -> None:
    assert plain({"a": ["odd \ud800 text", "é"]}) == {"a": ["odd \\ud800 text", "é"]}


def test_a_report_with_a_gpu_that_is_none_is_refused() -> None:
    gpu = find_gpu("L4")
    assert gpu_of(vars(gpu), "r.json") == gpu
    for changes in ({"sm": "x"}, {"tflops": {"fp16": 0.0}}, {"clock_cuda_mhz": -1}, {"fma_per_clock_per_sm": None}):
        with pytest.raises(UsageError, match="wrong GPU"):
            gpu_of({**vars(gpu), **changes}, "r.json")
    with pytest.raises(UsageError, match="wrong GPU: no rate of FP32"):
        gpu_of({**vars(gpu), "tflops": {}}, "r.json")
    with pytest.raises(UsageError, match="wrong GPU"):
        gpu_of({"name": "L4"}, "r.json")


def test_samples_without_a_value_are_read_and_their_number_is_bounded(tmp_path: Path) -> None:
    assert [block.shape for block in in_memory(np.zeros((0, 4))).blocks(3)] == [(0, 4)] * 3
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((1 << 40, 0), np.float32))
    with pytest.raises(UsageError, match="holds nothing"):
        open_arrays(path)


@pytest.mark.parametrize(
    "text",
    [f"{'a.' * 200_000}a = 1", f"[{'a . ' * 100_000}a]", "'a'." * 100_000 + "a = 1", '"a".' * 100_000 + "a = 1"],
    ids=["bare", "table", "literal", "quoted"],
)
def test_keys_of_many_parts_cost_no_time(tmp_path: Path, text: str) -> None:
    """tomllib's time grows with the square of the parts: without a bound this test does not end."""
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(UsageError, match="nested too deep"):
        load(tmp_path / "c.toml", "build")


def test_values_with_many_dots_are_no_deep_keys(tmp_path: Path) -> None:
    numbers = ", ".join(["1.5"] * 1000)
    (tmp_path / "c.toml").write_text(f'x = [{numbers}]\n# {"." * 1000}\n[build]\nprecision = "fp16"\n')
    with pytest.raises(UsageError, match="'x'"):
        load(tmp_path / "c.toml", "build")


def test_an_archive_with_two_arrays_of_one_name_is_refused(tmp_path: Path) -> None:
    array = io.BytesIO()
    np.save(array, np.zeros((2, 3), np.float32))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            file.writestr("x.npy", array.getvalue())
    with pytest.raises(UsageError, match="'x' twice"):
        open_arrays(tmp_path / "x.npz")


def test_a_link_that_leads_to_itself_is_an_input_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "loop.onnx").symlink_to("loop.onnx")
    check_outputs({"-o": tmp_path / "out.onnx"}, {"the model": tmp_path / "loop.onnx"})
    with pytest.raises(UsageError, match="symbolic links"):
        read_file(tmp_path / "loop.onnx", "The model", 10)


def test_toml_nested_too_deep_is_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "trtopt.toml"
    path.write_text("[build]\ngpu = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(UsageError, match=r"deep|TOML"):
        load(path, "build")


def test_events_of_an_unreadable_price_file_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    events: list[Event] = []
    place = PriceFile(("judge",), None, events.append).path
    place.mkdir(parents=True)
    PriceFile(("judge",), None, events.append).add("key", PRICE)
    assert ["cannot be written (Is a directory)" in event.text for event in events] == [True]


@pytest.mark.parametrize("header", ["{'descr': '<f4', 'shape': (2,", "(((", "{'descr': '<f4'}", "\\", "0x", "'" * 3])
def test_array_headers_that_are_no_literals_are_damage(tmp_path: Path, header: str) -> None:
    path = tmp_path / "x.npy"
    text = header.encode() + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text + bytes(64))
    with pytest.raises(UsageError, match=r"damaged|cannot be read"):
        open_arrays(path)


def edited(path: Path, report: Any, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A report's file, with one thing changed."""
    fields = json.loads(json.dumps(report.to_json_dict()))
    edit(fields)
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize(
    "gpu", [{}, {"tflops": []}, {"tflops": {}}, {"tflops": {"fp16": "x"}}, {"tflops": {"fp16": 0}}, {"name": 3}]
)
def test_a_profile_of_a_device_that_is_none_is_refused(tmp_path: Path, gpu: dict[str, Any]) -> None:
    def edit(fields: dict[str, Any]) -> None:
        fields["gpu"] = {**fields["gpu"], **gpu} if gpu else {}

    read_report(edited(tmp_path / "whole.json", small_profile(), lambda fields: None))
    with pytest.raises(UsageError, match="wrong field"):
        read_report(edited(tmp_path / "r.json", small_profile(), edit))


@pytest.mark.parametrize("field", ["gemm", "tile"])
@pytest.mark.parametrize("sizes", [{}, {"m": 3}])
def test_a_layer_whose_product_has_no_sizes_is_refused(tmp_path: Path, field: str, sizes: dict[str, int]) -> None:
    def edit(fields: dict[str, Any]) -> None:
        layer = next(layer for layer in fields["layers"] if layer[field])
        layer[field] = sizes

    with pytest.raises(UsageError, match=r"m, n and k.*layers"):
        read_report(edited(tmp_path / "r.json", full_analysis(), edit))


@pytest.mark.parametrize(("field", "value"), [("predicted_us", -1.0), ("math_us", 1e300), ("flop", -(1 << 62))])
def test_layers_with_figures_that_cannot_be_are_refused(tmp_path: Path, field: str, value: float) -> None:
    def edit(fields: dict[str, Any]) -> None:
        fields["layers"][1][field] = value

    for report in (full_analysis(), small_profile()):
        with pytest.raises(UsageError, match="negative or too large"):
            read_report(edited(tmp_path / "r.json", report, edit))


def test_the_smallest_figures_can_be_drawn(tmp_path: Path) -> None:
    def edit(fields: dict[str, Any]) -> None:
        for layer in fields["layers"]:
            layer["arithmetic_intensity"], layer["flop"] = 5e-324, 1

    found = read_report(edited(tmp_path / "r.json", full_analysis(), edit))
    assert isinstance(found, Analysis)
    write_forms(found, html=tmp_path / "r.html", markdown=tmp_path / "r.md")
    assert (tmp_path / "r.html").stat().st_size > 0


@pytest.mark.parametrize(
    "where", [("errors", "samples"), ("errors", "together", "region"), ("errors", "regions", "r", "nodes"), ("growth",)]
)
def test_a_forged_cache_of_sensitivities_is_measured_anew(tmp_path: Path, where: tuple[Any, ...]) -> None:
    one = RegionError("r", ("n",), {"y": OutputError(0.5, 3.0, None, None, 0.5)}, 4)
    events: list[Event] = []
    cache = Blobs(SENSITIVITY, tmp_path, events.append, ("sensitivity", "sensitivity cache", "measuring anew"), 1 << 20)
    value = json.loads(json.dumps(asdict(KeptErrors(Errors({"r": one}, one, 4), ()))))

    def kept() -> KeptErrors | None:
        cache.store("key", [json.dumps(value).encode()])
        return cache.load("key", lambda content: converted(bytes(content), KeptErrors))

    assert kept() == KeptErrors(Errors({"r": one}, one, 4), ()) and not events
    holder = value
    for key in where[:-1]:
        holder = holder[key]
    holder[where[-1]] = {"x": [None]}
    assert kept() is None and "measuring anew" in events[0].text


def test_warnings_of_a_forged_entry_may_be_empty() -> None:
    messages = (("WARNING", ""), ("WARNING", "\n"), ("WARNING", " a\nb"), ("ERROR", "c"), ("WARNING", "a"))
    assert _warnings(messages) == ["a"]


def test_the_compilers_advice_of_another_opset_is_not_passed_on() -> None:
    messages = (
        ("WARNING", "Detected layernorm nodes in FP16."),
        (
            "WARNING",
            "Running layernorm after self-attention with FP16 Reduce or Pow may cause overflow. Forcing Reduce or Pow"
            " Layers in FP32 precision, or exporting the model to use INormalizationLayer (available with ONNX opset >="
            " 17) can help preserving accuracy.",
        ),
    )
    (warning,) = _warnings(messages)
    assert "opset" not in warning and "FP32" in warning


def test_an_input_without_a_rank_is_an_error() -> None:
    with pytest.raises(InvalidModelError, match="no type or no rank"):
        input_spec(ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT)))
