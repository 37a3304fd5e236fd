"""Weights above a GiB are held once: sessions compute with them where they lie."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, save

from trtopt.accuracy import emulation
from trtopt.accuracy.emulation import fp32_emulation
from trtopt.precision.fp16.cast_to_half import cast_to_half
from trtopt.precision.plan import FP16
from trtopt.source.onnx_file import load
from trtopt.support import ort_session
from trtopt.support.ort_session import OrtSession, ServingSession

WIDTH = 1024
FEEDS = {"x": np.random.default_rng(1).standard_normal((2, WIDTH), dtype=np.float32)}


@pytest.fixture(autouse=True)
def every_weight_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_session, "LARGE_BYTES", 0)
    monkeypatch.setattr(emulation, "LARGE_BYTES", 0)


def written(folder: Path, layers: int = 2) -> Path:
    """Products with weights in a file beside it, of which ONNX Runtime would transpose each second one beforehand."""
    rng, nodes, weights, last = np.random.default_rng(0), [], [], "x"
    for layer in range(layers):
        array = rng.standard_normal((WIDTH, WIDTH), dtype=np.float32) / np.float32(WIDTH**0.5)
        weights.append(helper.make_tensor(f"w{layer}", TensorProto.FLOAT, array.shape, array.tobytes(), raw=True))
        weight = f"w{layer}"
        if layer % 2:
            nodes.append(helper.make_node("Transpose", [weight], [f"t{layer}"], name=f"t{layer}"))
            weight = f"t{layer}"
        nodes.append(helper.make_node("MatMul", [last, weight], [f"y{layer}"], name=f"y{layer}"))
        last = f"y{layer}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", WIDTH]) for name in ("x", last)]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    path, opsets = folder / "m.onnx", [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    save(model, path, save_as_external_data=True, location="w.data")
    return path


def outputs(model: ir.Model, kind: type[OrtSession] = OrtSession) -> np.ndarray:
    with kind(model) as session:
        return np.asarray(session.run(FEEDS)[0])


def expected(path: Path) -> np.ndarray:
    weights = [np.asarray(value.const_value) for value in load(path).model.graph.initializers.values()]
    found = FEEDS["x"]
    for layer, weight in enumerate(weights):
        found = found @ (weight.T if layer % 2 else weight)
    return np.asarray(found)


def test_weights_in_a_file_give_the_outputs_that_numpy_gives(tmp_path: Path) -> None:
    path = written(tmp_path)
    np.testing.assert_allclose(outputs(load(path).model), expected(path), atol=1e-4)


def test_a_brief_session_on_large_weights_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    with OrtSession(load(path).model, brief=True) as session:
        np.testing.assert_allclose(session.run(FEEDS)[0], expected(path), atol=1e-4)
    assert capfd.readouterr().err == ""


def test_a_file_and_a_folder_may_be_links(tmp_path: Path) -> None:
    folder = tmp_path / "real"
    folder.mkdir()
    written(folder)
    (folder / "w.data").rename(folder / "other.data")
    (folder / "w.data").symlink_to("other.data")
    (tmp_path / "link").symlink_to(folder)
    path = tmp_path / "link" / "m.onnx"
    np.testing.assert_allclose(outputs(load(path).model), expected(path), atol=1e-4)


def test_weights_made_beside_those_of_a_file_are_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    model = load(path).model
    weight = model.graph.initializers["w0"]
    weight.const_value = ir.tensor(2 * np.asarray(weight.const_value), name="w0")
    np.testing.assert_allclose(outputs(model), 2 * expected(path), atol=1e-4)


def test_a_service_packs_them_and_gives_the_same(tmp_path: Path) -> None:
    path = written(tmp_path)
    np.testing.assert_allclose(outputs(load(path).model, ServingSession), expected(path), atol=1e-4)


def test_the_emulation_casts_weights_where_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = cast_to_half(load(written(tmp_path)).model, FP16, ())
    found = fp32_emulation(half)
    assert {value.dtype for value in found.graph.initializers.values()} == {ir.DataType.FLOAT16}
    monkeypatch.setattr(emulation, "LARGE_BYTES", 1 << 30)
    before = fp32_emulation(half)
    assert {value.dtype for value in before.graph.initializers.values()} == {ir.DataType.FLOAT}
    np.testing.assert_array_equal(outputs(found), outputs(before))


def test_a_session_takes_no_memory_for_weights_in_a_file(tmp_path: Path) -> None:
    model = load(written(tmp_path, layers=24)).model  # 96 MiB
    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    before = _own_bytes()
    with OrtSession(model):
        assert _own_bytes() - before < weights / 2


def _own_bytes() -> int:
    """Memory of this process that is no mapped file."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
