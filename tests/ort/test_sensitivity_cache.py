"""Sensitivity from Python: the cache, what cannot be measured, and what the report holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from sensitivity_nets import REGIONS, base_model

import trtopt
from trtopt.errors import InvalidModelError, UsageError
from trtopt.events import Event
from trtopt.report.schema.sensitivity import Sensitivity

DATA = {"x": np.random.default_rng(2).standard_normal((6, 3, 8, 8)).astype(np.float32)}
NOTHING = """
<ir_version: 8, opset_import: ["" : 17]>
net (float[N, 4] x) => (float[N, 4] y) { [twice] y = Add (x, x) }
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("model") / "net.onnx"
    ir.save(base_model(), path)
    yield path


def measure(model: Path, folder: Path, **options: Any) -> tuple[Sensitivity, list[Event]]:
    events: list[Event] = []
    options = {"calib": DATA, "backend": "tensorrt-rtx", "cache_dir": folder, **options}
    return trtopt.sensitivity(model, on_event=events.append, **options), events


def warnings(events: list[Event]) -> list[str]:
    return [event.text for event in events if event.kind == "warning"]


def runs(events: list[Event]) -> int:
    return sum(event.kind == "advance" and event.task == "sensitivity" for event in events)


def test_the_second_time_the_figures_come_from_the_cache(model: Path, tmp_path: Path) -> None:
    first, events = measure(model, tmp_path)
    again, later = measure(model, tmp_path)
    assert runs(events) > 0 == runs(later)
    assert not first.cached and again.cached
    assert (again.regions, again.together, again.growth) == (first.regions, first.together, first.growth)
    assert not warnings(later)


def test_other_samples_options_or_weights_are_measured_anew(model: Path, tmp_path: Path) -> None:
    measure(model, tmp_path)
    other = base_model()
    weight = other.graph.initializers["w1"].const_value
    assert weight is not None
    other.graph.initializers["w1"].const_value = ir.tensor(weight.numpy() * np.float32(1.5), name="w1")
    changed = tmp_path / "other.onnx"
    ir.save(other, changed)
    assert not measure(changed, tmp_path)[0].cached
    for options in ({"eval": {"x": DATA["x"][:3]}}, {"precision": "fp8"}, {"calib_method": "max"}):
        assert not measure(model, tmp_path, **options)[0].cached, options


@pytest.mark.parametrize("damage", ["cut", "empty", "letters", "figure"])
def test_a_damaged_cache_file_is_said_and_measured_anew(model: Path, tmp_path: Path, damage: str) -> None:
    first, _ = measure(model, tmp_path)
    (file,) = (tmp_path / "sensitivity").iterdir()
    content = file.read_bytes()
    broken = {
        "cut": content[: len(content) // 2],
        "empty": b"",
        "letters": b"\xff\x00 no json",
        "figure": content.replace(b'"samples": 6', b'"samples": 7'),
    }
    assert broken[damage] != content
    file.write_bytes(broken[damage])
    again, events = measure(model, tmp_path)
    assert any("measuring anew" in text for text in warnings(events))
    assert not again.cached
    assert again.regions == first.regions
    assert file.read_bytes() == content


def test_a_cache_folder_that_cannot_be_written_is_an_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cache"):
        measure(model, tmp_path / "file")


def test_the_report_holds_regions_the_worst_first_and_is_json(model: Path, tmp_path: Path) -> None:
    found, _ = measure(model, tmp_path, report=tmp_path / "r.json")
    assert {region.region for region in found.regions} == set(REGIONS) - {"x"}  # a first layer stays 16-bit
    errors = [region.error for region in found.regions]
    assert errors == sorted(errors, reverse=True)
    assert sum(region.flop_share or 0 for region in found.regions) == pytest.approx(1, abs=0.1)
    written = json.loads((tmp_path / "r.json").read_text())
    assert written == found.to_json_dict()
    assert written["schema"] == "trtopt.sensitivity/1"
    assert [item["worst"] for item in written["regions"]] == [region.worst for region in found.regions]


def test_without_samples_the_guess_is_said(model: Path, tmp_path: Path) -> None:
    found, events = measure(model, tmp_path, calib=None)
    assert any("SYNTHETIC" in text for text in warnings(events))
    assert any("SYNTHETIC" in text for text in found.warnings)


def test_a_model_with_nothing_to_quantize_is_one_clear_error(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(NOTHING)
    with pytest.raises(InvalidModelError, match="can become INT8"):
        trtopt.sensitivity(proto, calib={"x": np.ones((2, 4), np.float32)}, cache_dir=tmp_path)


def test_a_wrong_config_is_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="SensitivityConfig"):
        trtopt.sensitivity(model, trtopt.BuildConfig())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="int4"):
        trtopt.sensitivity(model, precision="int4")
