"""Saving: whole or not at all, with the weights in a file of their own where they are large."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.errors import UsageError
from trtopt.source import save
from trtopt.source.onnx_file import load
from trtopt.source.save import save_model, write_once


def model_with(weight: np.ndarray) -> ir.Model:
    """y = x + w + w2, w and w2 the same tensor."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["N", weight.size]))
    tensor = ir.tensor(weight, name="w")
    weights = [ir.Value(name=name, const_value=tensor, type=x.type, shape=tensor.shape) for name in ("w", "w2")]
    first = ir.node("Add", [x, weights[0]], name="first")
    second = ir.node("Add", [first.outputs[0], weights[1]], name="second")
    first.outputs[0].name, second.outputs[0].name = "a", "y"
    second.outputs[0].type, second.outputs[0].shape = x.type, x.shape
    second.metadata_props["trtopt.recipe"] = "test"
    graph = ir.Graph(
        [x], [second.outputs[0]], nodes=[first, second], initializers=weights, opset_imports={"": 21}, name="g"
    )
    return ir.Model(graph, ir_version=10, metadata_props={"key": "value"})


def data_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".data"))


@pytest.fixture
def always_external(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "EXTERNAL_OVER_BYTES", 1000)


def test_a_small_model_is_one_file_and_keeps_its_metadata(tmp_path: Path) -> None:
    save_model(model_with(np.arange(8, dtype=np.float32)), tmp_path / "m.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    proto = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(proto, full_check=True)
    assert {item.key: item.value for item in proto.metadata_props} == {"key": "value"}
    assert proto.graph.node[1].metadata_props[0].value == "test"
    assert [tensor.name for tensor in proto.graph.initializer] == ["w", "w2"]


def test_large_weights_go_to_one_file_beside_it_and_shared_ones_once(tmp_path: Path, always_external: None) -> None:
    weight = np.arange(5000, dtype=np.float32)
    save_model(model_with(weight), tmp_path / "m.onnx")
    (name,) = data_files(tmp_path)
    assert re.fullmatch(r"m\.onnx\.[0-9a-f]{16}\.data", name)
    assert (tmp_path / name).stat().st_size == 20480
    graph = load(tmp_path / "m.onnx").model.graph
    for key in ("w", "w2"):
        tensor = graph.initializers[key].const_value
        assert tensor is not None
        np.testing.assert_array_equal(tensor.numpy(), weight)


def test_what_is_read_once_has_weights_of_any_size_beside_it(tmp_path: Path) -> None:
    weight = np.arange(5000, dtype=np.float32)
    model = model_with(weight)
    before = model.graph.initializers["w"].const_value
    files = write_once(model, tmp_path / "m.onnx", notes=False)
    assert [path.name for path in files] == ["m.onnx", "m.onnx.data"]
    assert files[1].stat().st_size == 20480 and model.graph.initializers["w"].const_value is before
    proto = onnx.load(files[0], load_external_data=False)
    assert not proto.metadata_props and not proto.graph.node[1].metadata_props
    found = load(files[0]).model.graph.initializers["w2"].const_value
    assert found is not None
    np.testing.assert_array_equal(found.numpy(), weight)


def test_without_large_weights_it_is_one_file(tmp_path: Path) -> None:
    assert write_once(model_with(np.arange(8, dtype=np.float32)), tmp_path / "m.onnx") == (tmp_path / "m.onnx",)


@pytest.mark.parametrize("size", [8, 4096])
def test_a_file_for_a_compiler_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path, size: int) -> None:
    model = model_with(np.arange(size, dtype=np.float32))
    with pytest.raises(UsageError, match="Cannot write: No such file") as caught:
        write_once(model, tmp_path / "missing" / "m.onnx")
    assert "TMPDIR" in caught.value.remedy


def test_the_model_that_is_saved_is_not_changed(tmp_path: Path, always_external: None) -> None:
    model = model_with(np.arange(5000, dtype=np.float32))
    before = model.graph.initializers["w"].const_value
    save_model(model, tmp_path / "m.onnx")
    assert model.graph.initializers["w"].const_value is before


def test_a_replaced_model_takes_its_own_data_file_with_it_and_no_other(tmp_path: Path, always_external: None) -> None:
    (tmp_path / "users.data").write_bytes(b"mine")
    save_model(model_with(np.arange(5000, dtype=np.float32)), tmp_path / "m.onnx")
    first = data_files(tmp_path)
    save_model(model_with(np.ones(5000, dtype=np.float32)), tmp_path / "m.onnx")
    second = data_files(tmp_path)
    assert len(second) == 2 and "users.data" in second and first != second
    save_model(model_with(np.ones(5000, dtype=np.float32)), tmp_path / "m.onnx")
    assert data_files(tmp_path) == second


def test_a_data_file_of_the_user_that_the_replaced_model_names_stays(tmp_path: Path, always_external: None) -> None:
    proto = ir.to_proto(model_with(np.arange(5000, dtype=np.float32)))
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, location="users.data", size_threshold=0)
    save_model(load(tmp_path / "m.onnx").model, tmp_path / "m.onnx")
    assert "users.data" in data_files(tmp_path)


def test_external_weights_of_a_small_model_move_into_the_file(tmp_path: Path) -> None:
    weight = np.arange(5000, dtype=np.float32)
    onnx.save(ir.to_proto(model_with(weight)), tmp_path / "a.onnx", save_as_external_data=True, location="a.data")
    save_model(load(tmp_path / "a.onnx").model, tmp_path / "b.onnx")
    (tmp_path / "a.data").unlink()
    tensor = load(tmp_path / "b.onnx").model.graph.initializers["w"].const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), weight)


def test_saving_twice_gives_the_same_bytes(tmp_path: Path, always_external: None) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_model(model_with(np.arange(5000, dtype=np.float32)), tmp_path / name / "m.onnx")
    assert (tmp_path / "one" / "m.onnx").read_bytes() == (tmp_path / "two" / "m.onnx").read_bytes()


def test_four_bit_and_bfloat16_weights_survive(tmp_path: Path, always_external: None) -> None:
    import ml_dtypes

    model = model_with(np.zeros(8, dtype=np.float32))
    for name, dtype in (("i4", ml_dtypes.int4), ("bf16", ml_dtypes.bfloat16)):
        array = np.arange(-7, 4096 - 7).astype(np.int8).clip(-8, 7).astype(dtype)
        tensor = ir.tensor(array, name=name)
        model.graph.register_initializer(
            ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
        )
    save_model(model, tmp_path / "m.onnx")
    graph = load(tmp_path / "m.onnx").model.graph
    for name in ("i4", "bf16"):
        before, after = model.graph.initializers[name].const_value, graph.initializers[name].const_value
        assert before is not None and after is not None
        np.testing.assert_array_equal(after.numpy(), before.numpy())


def test_a_model_with_nested_graphs_survives(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 17]>g (bool c, float[4] x) => (float[4] y) { y = If (c) <'
        "then_branch = a () => (float[4] r) <float[4] w = {1, 2, 3, 4}> { r = Add(x, w) },"
        "else_branch = b () => (float[4] s) { s = Exp(x) }> }"
    )
    onnx.save(onnx.parser.parse_model(text), tmp_path / "a.onnx")
    save_model(load(tmp_path / "a.onnx").model, tmp_path / "b.onnx")
    proto = onnx.load(tmp_path / "b.onnx")
    onnx.checker.check_model(proto, full_check=True)
    assert proto.graph.node[0].attribute[0].g.initializer[0].name == "w"


def test_an_output_folder_that_does_not_exist_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="folder does not exist"):
        save_model(model_with(np.zeros(4, dtype=np.float32)), tmp_path / "none" / "m.onnx")


SAVER = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[2])
from test_source_save import model_with
from trtopt.source import save
save.EXTERNAL_OVER_BYTES = 1000
value = 0.0
print("ready", flush=True)
while True:
    value += 1
    save.save_model(model_with(np.full(1 << 20, value, dtype=np.float32)), sys.argv[1])
"""


@pytest.mark.long
def test_a_killed_run_leaves_a_model_with_its_own_data(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    for attempt in range(6):
        command = [sys.executable, "-c", SAVER, str(path), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.05 + 0.037 * attempt)
            os.kill(process.pid, signal.SIGKILL)
        if path.exists():
            tensor = load(path).model.graph.initializers["w"].const_value
            assert tensor is not None
            array = tensor.numpy()
            assert array.min() == array.max() > 0
    assert path.exists()
