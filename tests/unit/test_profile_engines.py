"""The eight published engines: no layer lost, the sum exact, every convolution and product with its nodes and work."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from trtopt.graph.module_path import module_of
from trtopt.profiling.ingest import ingest
from trtopt.profiling.measured import MeasuredLayer, Measurement

FOLDER = Path(__file__).parents[3] / "shared" / "profiles" / "tensorrt-layers"

pytestmark = [
    pytest.mark.shared,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="the folder profiles is not beside the checkout"),
]


@dataclass(frozen=True)
class Engine:
    """What is known of a published engine.

    Attributes:
        path: The files' common beginning.
        layers: As many as the layer info lists.
        products: Its convolutions and matrix products.
        gflop: Of those, per image: 2 flop per multiply-add.
        batch: Images.
        dtypes: How many products compute in which type.
        runs: Inferences behind each time.
    """

    path: str
    layers: int
    products: int
    gflop: float
    batch: int
    dtypes: dict[str, int]
    runs: int


A100, LAPTOP = "A100-80GB-PCIe", "RTX-3060-Laptop"
RESNET18 = 3.628
"""GFLOP of an image: 1.814 G multiply-adds in 20 convolutions and the classifier."""
ENGINES = [
    Engine(f"{A100}/fp16/resnet.onnx.engine", 36, 21, RESNET18, 32, {"fp16": 21}, 1),
    Engine(f"{A100}/fp32/resnet.onnx.engine", 32, 21, RESNET18, 32, {"fp32": 1, "tf32": 20}, 1),
    Engine(f"{A100}/qat/resnet-qat.onnx.engine", 37, 21, RESNET18, 32, {"int8": 21}, 1),
    Engine(f"{A100}/qat-residual/resnet-qat-residual.onnx.engine", 26, 21, RESNET18, 32, {"int8": 21}, 1),
    Engine(f"{A100}/qat-residual-qgap/resnet-qat-residual-qgap.onnx.engine", 24, 21, RESNET18, 32, {"int8": 21}, 1),
    Engine(f"{LAPTOP}/alexnet_fp16", 14, 8, 1.428, 1, {"fp16": 8}, 14590),
    Engine(f"{LAPTOP}/mobilenet_v2_fp16", 57, 53, 0.6015, 1, {"fp16": 53}, 18488),
    Engine(f"{LAPTOP}/resnet18_fp16", 26, 20, RESNET18, 1, {"fp16": 20}, 21071),
]
every_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.path.split("/")[1])


def files(engine: Engine) -> tuple[Path, Path]:
    start = FOLDER / engine.path
    return start.with_name(f"{start.name}.graph.json"), start.with_name(f"{start.name}.profile.json")


@cache
def measured(path: str) -> Measurement:
    engine = next(engine for engine in ENGINES if engine.path == path)
    times = FOLDER / f"{path}.timing.json.gz"
    return ingest(*files(engine), times if times.exists() else None)


def products(found: Measurement) -> list[MeasuredLayer]:
    return [layer for layer in found.layers if layer.info.kind in ("conv", "gemm")]


@every_engine
def test_no_layer_and_no_time_is_lost(engine: Engine) -> None:
    found = measured(engine.path)
    listed: list[dict[str, Any]] = json.loads(files(engine)[0].read_text())["Layers"]
    count, *rows = json.loads(files(engine)[1].read_text(), parse_float=Decimal)
    assert len(found.layers) == engine.layers == len(rows)
    assert [layer.info.name for layer in found.layers] == [entry["Name"] for entry in listed]
    assert found.source.runs == count["count"] == engine.runs
    for layer, row in zip(found.layers, rows, strict=True):
        assert Decimal(repr(layer.measured_us)) == row["averageMs"] * 1000, layer.info.name
        assert Decimal(repr(layer.median_us)) == row["medianMs"] * 1000, layer.info.name
    total = sum(Decimal(repr(layer.measured_us)) for layer in found.layers)
    assert total == sum(row["averageMs"] for row in rows) * 1000
    assert found.warnings == ()


@every_engine
def test_every_product_has_its_nodes_and_its_work(engine: Engine) -> None:
    found = products(measured(engine.path))
    assert len(found) == engine.products
    claimed = Counter(node for layer in found for node in layer.info.onnx_nodes)
    assert all(times == 1 for times in claimed.values())
    for layer in found:
        nodes = [node for node in layer.info.onnx_nodes if "Conv" in node or "Gemm" in node]
        assert len(nodes) == 1, layer.info.name
        assert not any(node.endswith(".weight") for node in layer.info.onnx_nodes)
        assert layer.work is not None and layer.work.gemm is not None
        assert layer.work.flop == layer.work.gemm.flop
    works = [layer.work for layer in found if layer.work is not None]
    assert sum(work.flop for work in works) / engine.batch / 1e9 == pytest.approx(engine.gflop, rel=1e-3)
    assert Counter(work.dtype for work in works) == engine.dtypes


@every_engine
def test_every_kernel_has_work_and_copies_have_no_nodes(engine: Engine) -> None:
    for layer in measured(engine.path).layers:
        assert (layer.work is not None) == layer.info.is_kernel, layer.info.name
        assert layer.info.is_kernel or layer.info.type in ("NoOp", "shape_call")
        if layer.info.name.startswith("Reformatting CopyNode"):
            assert not layer.info.onnx_nodes


@pytest.mark.parametrize("engine", ENGINES[:5], ids=lambda engine: engine.path.split("/")[1])
def test_the_median_of_a_run_is_trtexecs(engine: Engine) -> None:
    """trtexec prints "GPU Compute Time: min, max, mean, median"; the published metadata holds what it printed."""
    start = FOLDER / engine.path
    summary = json.loads(start.with_name(f"{start.name}.profile.metadata.json").read_text())["performance_summary"]
    found = measured(engine.path)
    assert found.end_to_end_us == pytest.approx(1e3 * summary["GPU Compute Time"][3], rel=1e-3)
    assert found.host_us == pytest.approx(1e3 * summary["Enqueue Time"][3], abs=1), "points in time are whole us"
    assert found.end_to_end_spread_us is not None and found.end_to_end_spread_us < 5
    assert found.source.version == "8.2 to 8.5"


@pytest.mark.parametrize("engine", ENGINES[5:], ids=lambda engine: engine.path.split("/")[1])
def test_products_come_from_modules(engine: Engine) -> None:
    found = measured(engine.path)
    assert found.source.version == "8.6 to 10"
    for layer in products(found):
        assert any(module_of(node) for node in layer.info.onnx_nodes), layer.info.name
