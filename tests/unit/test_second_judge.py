"""The plain second judge of the benchmarks: bytes and flop of kernels, and their time by hand."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import onnx_ir as ir
import pytest

from trtopt.report.schema.layers import LayerInfo, TensorInfo

SHAPES = {"x": (2, 8, 16), "w": (16, 32), "y": (2, 8, 32), "table": (1000, 16), "ids": (2, 8)}


@cache
def judge() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "second_judge.py"
    spec = importlib.util.spec_from_file_location("second_judge", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def a_model() -> ir.Model:
    """Rows of a table, times a matrix."""
    model = ir.from_onnx_text(
        '<ir_version: 9, opset_import: ["" : 20]> g (int64[2,8] ids) => (float16[2,8,32] y)'
        " <float16[1000,16] table, float16[16,32] w> { x = Gather(table, ids) y = MatMul(x, w) }"
    )
    for node, name in zip(model.graph, ("gather", "product"), strict=True):
        node.name = name
    return model


def layers() -> tuple[LayerInfo, ...]:
    x, y = TensorInfo("x", (2, 8, 16), "Half"), TensorInfo("y", (2, 8, 32), "Half")
    ids = TensorInfo("ids", (2, 8), "Int64")
    table, w = TensorInfo("table", (1000, 16), "Half"), TensorInfo("w", (16, 32), "Half")
    return (
        LayerInfo("gather", "kgen", ("gather",), (ids,), (x,), (table,), kind="pointwise"),
        LayerInfo("product", "gemm", ("product",), (x,), (y,), (w,), kind="gemm"),
        LayerInfo("wait", "wait", (), (), (), is_kernel=False, kind="none"),
    )


def test_a_table_counts_what_is_read_and_a_product_its_flop() -> None:
    gather, product = judge().kernels_of(layers(), a_model(), SHAPES)
    read = 2 * 8 * 16 * 2
    assert (gather.bytes, gather.flop, gather.dtype) == (2 * 8 * 8 + read + read, 0, "fp16")
    assert (product.bytes, product.flop) == (read + 16 * 32 * 2 + 2 * 8 * 32 * 2, 2 * 2 * 8 * 16 * 32)


def test_the_time_is_that_of_bytes_or_flop_and_the_launch() -> None:
    gpu = judge().PLAIN["L4"]
    assert judge().kernel_us(2.4e6, 0, "fp16", gpu) == pytest.approx(2.4e6 / (0.8 * 300e3) + 2)
    assert judge().kernel_us(1, 1e9, "int8", gpu) == pytest.approx(1e9 / (0.7 * 242e6) + 2)


def test_kernels_that_only_the_engine_has_cost_their_launch() -> None:
    more = LayerInfo("sizes", "kgen", (), (), (), kind="pointwise")
    one = judge().judged(layers(), layers(), a_model(), SHAPES)
    two = judge().judged((*layers(), more), layers(), a_model(), SHAPES)
    assert (one["kernels"], one["syncs"], two["kernels"]) == (2, 1, 3)
    assert two["us"]["L4"] == pytest.approx(one["us"]["L4"] + 2)


def test_a_cache_that_is_filled_up_in_place_counts_its_new_entries() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 12, opset_import: ["" : 24]> g (float16[1,2,4096,8] cache, float16[1,2,1,8] new, int64[1] at)'
        " => (float16[1,2,4096,8] grown) { grown = TensorScatter <axis = -2> (cache, new, at) }"
    )
    model.graph[0].name = "scatter"
    new, at = TensorInfo("new", (1, 2, 1, 8), "Half"), TensorInfo("at", (1,), "Int64")
    cache = TensorInfo("cache", (1, 2, 4096, 8), "Half")
    layers = (LayerInfo("scatter", "kgen", ("scatter",), (cache, new, at), (cache,), kind="pointwise"),)
    shapes = {item.name: item.shape for item in (cache, new, at)} | {"grown": cache.shape}
    (kernel,) = judge().kernels_of(layers, model, shapes)
    assert kernel.moved == kernel.bytes == 2 * (2 * 8 * 2) + 8
    assert judge().judged(layers, layers, model, shapes)["us"]["L4"] == pytest.approx(2, abs=0.05)
