"""What is kept lives as long as the code that made it, and the code that the user's metric is made of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import trtopt
from trtopt.cache import code
from trtopt.judge.judges import ModelJudge
from trtopt.pipeline import lower, session
from trtopt.report.schema.build import BuildReport

WIDTH = 32
DATA = np.random.default_rng(1).standard_normal((32, WIDTH, 8, 8)).astype(np.float32)


def network() -> onnx.ModelProto:
    """x [N, 32, 8, 8] -> 3 times conv 3x3 and ReLU -> global average -> scores [N, 10]."""
    rng = np.random.default_rng(0)
    weights = {"head": rng.standard_normal((WIDTH, 10))}
    nodes, last = [], "x"
    for number in range(3):
        weights[f"w{number}"] = rng.standard_normal((WIDTH, WIDTH, 3, 3)) / (4.5 * WIDTH) ** 0.5
        nodes.append(helper.make_node("Conv", [last, f"w{number}"], [f"c{number}"], f"conv{number}", pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"c{number}"], [last := f"r{number}"], f"relu{number}"))
    nodes += [
        helper.make_node("GlobalAveragePool", [last], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "head"], ["scores"], "gemm"),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", WIDTH, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])],
        [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class Runs:
    """Runs with one cache, and what each did anew."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch, self.priced = folder, patch, 0
        self.model, self.cache = folder / "net.onnx", str(folder / "cache")
        (folder / "cache").mkdir(exist_ok=True)
        onnx.save(network(), self.model)
        price = ModelJudge.price

        def counted(judge: ModelJudge, *model: Any, **options: Any) -> Any:
            self.priced += 1
            return price(judge, *model, **options)

        patch.setattr(ModelJudge, "price", counted)

    def optimize(self, **options: Any) -> BuildReport:
        self.priced = 0
        options = {"precision": "int8", "backend": "tensorrt", "gpu": "L4", "max_accuracy_drop": 0.9, **options}
        return trtopt.optimize(
            self.model, output=self.folder / "o.onnx", calib={"x": DATA}, cache_dir=self.cache, **options
        )

    def anew(self) -> set[str]:
        """Which kinds of answers a run makes anew."""
        report = self.optimize()
        assert report.calibration is not None and report.search is not None
        found = trtopt.sensitivity(self.model, calib={"x": DATA}, backend="tensorrt", cache_dir=self.cache)
        facts = {
            "statistics": not report.calibration.cached,
            "prices": self.priced > 0,
            "search": not report.search.resumed,
            "sensitivity": not found.cached,
        }
        return {name for name, is_new in facts.items() if is_new}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        yield Runs(tmp_path, patch)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package, which passes for the code that runs."""
    folder = tmp_path / "code" / "trtopt"
    shutil.copytree(Path(code.__file__).parents[1], folder, ignore=shutil.ignore_patterns("__pycache__", "vendor"))
    monkeypatch.setattr(code, "_sources", lambda packages: code.SourceFiles(folder))
    code.code_hash.cache_clear()
    yield folder
    code.code_hash.cache_clear()


def test_what_is_kept_ends_with_the_code_that_made_it_and_with_no_other(runs: Runs, package: Path) -> None:
    def after(file: str) -> set[str]:
        path = package / file
        path.write_bytes(path.read_bytes() + b"# changed\n")
        code.code_hash.cache_clear()
        return runs.anew()

    assert runs.anew() == {"statistics", "prices", "search", "sensitivity"}
    assert runs.anew() == set()
    assert after("report/html/page.py") == after("cli/build.py") == after("sparsity/prune.py") == set()
    assert after("accuracy/segments.py") == {"search", "sensitivity"}
    assert after("roofline/gemm.py") == {"search", "prices"}
    assert after("precision/observe/statistics.py") == {"statistics", "prices", "search", "sensitivity"}


METRIC = """\
import numpy as np
from closeness import distance
X = np.random.default_rng(3).standard_normal((8, 32, 8, 8)).astype("f4")
first = []

def score(run):
    first.append(run({"x": X})[0])
    return distance(first[0], first[-1])
"""
CLOSENESS = "def distance(one, other):\n    return 1 - float(abs(one - other).max()) / 100\n"


def test_a_search_ends_with_the_modules_of_its_metric(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    script, beside = runs.folder / "metric.py", runs.folder / "closeness.py"
    monkeypatch.delitem(__import__("sys").modules, "closeness", raising=False)
    script.write_text(METRIC)
    beside.write_text(CLOSENESS)

    def resumed() -> int:
        found = runs.optimize(metric=f"{script}:score").search
        assert found is not None
        return found.resumed

    assert resumed() == 0 and resumed() > 0
    (runs.folder / "other.py").write_text("")
    assert resumed() > 0
    beside.write_text(CLOSENESS + "# changed\n")
    assert resumed() == 0


def test_what_may_be_bfloat_is_asked_anew_for_a_saved_model(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products that FP16 does not hold are FP32: they take longer, and lose less."""

    def resumed() -> int:
        found = runs.optimize().search
        assert found is not None
        return found.resumed

    with monkeypatch.context() as patch:
        patch.setattr(session, "Lowering", lambda *given, **how: lower.Lowering(*given, **{**how, "saved": False}))
        assert resumed() == 0
    assert resumed() == 0 and resumed() > 0


def test_another_weight_or_option_asks_anew(runs: Runs) -> None:
    runs.optimize()
    proto = network()
    weight = numpy_helper.to_array(proto.graph.initializer[1])
    proto.graph.initializer[1].CopyFrom(
        numpy_helper.from_array(weight * np.float32(1.25), proto.graph.initializer[1].name)
    )
    onnx.save(proto, runs.model)
    report = runs.optimize()
    assert report.calibration is not None and not report.calibration.cached
    assert report.search is not None and not report.search.resumed
    text = "what a kernel costs does not depend on its weights; better numbers and what ships have other scales"
    assert runs.priced <= 3, text
