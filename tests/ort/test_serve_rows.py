"""Calls of fewer rows than an engine takes, by the model in its place: the same as with as many rows as it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from engine_files import manifest, rtx_engine, save

import trtopt
from trtopt.errors import IntegrityError, UsageError
from trtopt.hardware.probe import probe
from trtopt.report.schema.manifest import EngineTensor, ShapeRange

pytestmark = pytest.mark.skipif(probe().gpu is not None, reason="this machine has a GPU, and the engine is made up")

FIXED = """<ir_version: 10, opset_import: ["" : 21]>
net (float[8, 3] x, float[8] scale, float[3] bias) => (float[8, 3] y, int64[8] best) {
    b = Add(x, bias)
    one = Constant <value = int64[1] {1}> ()
    s = Unsqueeze(scale, one)
    y = Log(b)
    z = Mul(y, s)
    best = ArgMax <axis = 1, keepdims = 0> (z)
}"""


def loaded(folder: Path, **changes: Any) -> trtopt.Engine:
    """A made-up engine for eight rows, and the model that runs in its place."""
    onnx.save(onnx.parser.parse_model(FIXED), folder / "net.onnx")
    fields: dict[str, Any] = {
        "inputs": (
            EngineTensor("x", "float32", (8, 3)), EngineTensor("scale", "float32", (8,)),
            EngineTensor("bias", "float32", (3,)),
        ),
        "outputs": (EngineTensor("y", "float32", (8, 3)), EngineTensor("best", "int64", (8,))),
        "host": None,
        "filled_rows": 8,
    }  # fmt: skip
    data = rtx_engine()
    path = save(folder, data, manifest(data, **{**fields, **changes}))
    return trtopt.Engine.load(path, fallback=folder / "net.onnx", nan="refuse")


def feeds(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rows)
    shapes = {"x": (rows, 3), "scale": (rows,), "bias": (3,)}
    return {name: rng.uniform(0.5, 2, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_call_of_fewer_rows_gets_its_own(tmp_path: Path, rows: int) -> None:
    """Zeros in their place would make NaN of the logarithm, which is refused here."""
    whole = feeds(8)
    few = {name: array[:rows] if name != "bias" else array for name, array in whole.items()}
    with loaded(tmp_path) as engine:
        expected, found = engine.run(whole), engine.run(few)
        assert [spec.shape for spec in engine.inputs] == [("batch", 3), ("batch",), (3,)]
        assert [spec.shape for spec in engine.outputs] == [("batch", 3), ("batch",)]
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array[:rows])


def test_torch_tensors_are_filled_up_too(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with loaded(tmp_path) as engine:
        found = engine.run({name: torch.from_numpy(array) for name, array in feeds(3).items()})
    assert found["y"].shape == (3, 3) and isinstance(found["best"], torch.Tensor)


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with loaded(tmp_path) as engine:
        for rows in (0, 9):
            with pytest.raises(UsageError, match="outside of what the engine was built for"):
                engine.run(feeds(rows))
        with pytest.raises(UsageError, match="'batch' is 3 in 'x' and 4 in 'scale'"):
            engine.run({**feeds(3), "scale": np.ones(4, np.float32)})


def test_without_the_proof_the_batch_is_what_it_was(tmp_path: Path) -> None:
    with loaded(tmp_path, filled_rows=0) as engine, pytest.raises(UsageError, match="the model takes"):
        engine.run(feeds(5))


@pytest.mark.parametrize("changes", [{"filled_rows": 7}, {"outputs": (EngineTensor("y", "float32", ()),)}])
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match="rows that calls are filled up to"):
        loaded(tmp_path, **changes)


def test_profiles_begin_at_one_row(tmp_path: Path) -> None:
    """Of an engine from four to eight rows, whose model takes any number."""
    dynamic = FIXED.replace("[8", "[N")
    ranges = {"x": ((4, 3), (8, 3)), "scale": ((4,), (8,))}
    inputs = tuple(
        EngineTensor(name, "float32", ("N", *low[1:]), ranges=(ShapeRange(low, high, high),))
        for name, (low, high) in ranges.items()
    )
    (tmp_path / "text").write_text(dynamic)
    onnx.save(onnx.parser.parse_model(dynamic), tmp_path / "net.onnx")
    outputs = (EngineTensor("y", "float32", ("N", 3)), EngineTensor("best", "int64", ("N",)))
    data = rtx_engine()
    fields = {"inputs": (*inputs, EngineTensor("bias", "float32", (3,))), "outputs": outputs, "host": None}
    path = save(tmp_path, data, manifest(data, **fields, filled_rows=4))
    with trtopt.Engine.load(path, fallback=tmp_path / "net.onnx") as engine:
        for rows in (1, 4, 7):
            assert engine.run(feeds(rows))["y"].shape == (rows, 3)
        with pytest.raises(UsageError, match="outside"):
            engine.run(feeds(9))
