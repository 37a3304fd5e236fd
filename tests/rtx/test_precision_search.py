"""The search over 8-bit types with the prices of the real compiler: under a wide budget the fastest type wins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

import trtopt
from trtopt.accuracy.metric import Run
from trtopt.report.schema.decisions import SearchRecord

pytest.importorskip("tensorrt_rtx")

Metric = Callable[[Run], float]

WIDTH, HIDDEN = 256, 1024
TOKENS = (8, 128, WIDTH)


def feed_forward() -> onnx.ModelProto:
    """The second half of a transformer block: normalization, two products with a GELU between them, the residual."""
    shape = ", ".join(map(str, TOKENS))
    text = f"""<ir_version: 10, opset_import: ["" : 21]> g (float[{shape}] x) => (float[{shape}] y) {{
        n = LayerNormalization (x, gain) a = MatMul (n, w0) h = Gelu (a) b = MatMul (h, w1) y = Add (x, b)
    }}"""
    found = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    arrays = {
        "gain": np.ones(WIDTH),
        "w0": rng.uniform(-1, 1, (WIDTH, HIDDEN)) * (3 / HIDDEN) ** 0.5,
        "w1": rng.uniform(-1, 1, (HIDDEN, WIDTH)) * (3 / WIDTH) ** 0.5,
    }
    for name, array in arrays.items():
        found.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    for node in found.graph.node:
        node.name = node.output[0]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all: what a region costs is found once."""
    return tmp_path_factory.mktemp("searches")


def searched(folder: Path, budget: float, metric: Metric | None = None) -> SearchRecord:
    samples = np.random.default_rng(1).standard_normal((2 * TOKENS[0], *TOKENS[1:])).astype(np.float32)
    options = {"precision": "auto", "max_accuracy_drop": budget, "recipes": "none", "cache_dir": str(folder / "cache")}
    found = trtopt.optimize(feed_forward(), output=folder / "o.onnx", calib=samples, metric=metric, gpu="L4", **options)
    assert found.search is not None
    return found.search


def test_the_fastest_type_within_the_budget_is_chosen(folder: Path) -> None:
    """INT8 is the fastest here; FP8 is slower and less accurate, so that it is no point of the front."""
    wide = searched(folder, 0.9)
    assert [point.name for point in wide.pareto] == ["int8", "fp16"]
    assert [point.chosen for point in wide.pareto] == [True, False]
    narrow = searched(folder, 0.5 * wide.pareto[0].drop)
    assert next(point.name for point in narrow.pareto if point.chosen) == "fp16"
    assert not narrow.resumed, "under a budget that they do not hold, products write nothing in 8 bits"
    assert searched(folder, 0.4 * wide.pareto[0].drop).resumed


def share_within(distance: float) -> Metric:
    """A metric: the share of a network's outputs within a distance of what the network gave that was asked first."""
    sample = np.random.default_rng(2).standard_normal(TOKENS).astype(np.float32)
    first: list[np.ndarray] = []

    def share(run: Run) -> float:
        output = run({"x": sample})[0]
        first.append(output)
        return float((np.abs(output - first[0]) <= distance).mean())

    return share


def test_a_python_metric_does_not_get_the_answers_of_another(folder: Path) -> None:
    """Both are of one name, in one file, and 1 in FP32; what they look at is not in their code."""
    anything = searched(folder, 0.1, share_within(np.inf))
    nothing = searched(folder, 0.1, share_within(0.0))
    chosen = [next(point.name for point in found.pareto if point.chosen) for found in (anything, nothing)]
    assert chosen == ["int8", "fp16"]
    assert not nothing.reached and not nothing.resumed
