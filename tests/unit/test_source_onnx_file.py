"""Loading: what is brought to a common form, and what is refused with which exit code and name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper

from trtopt.errors import InvalidModelError, TrtoptError, UsageError
from trtopt.graph import invariants
from trtopt.graph.edit import all_nodes
from trtopt.source.onnx_file import load

HEADER = '<ir_version: 8, opset_import: ["" : 17]>'


def saved(folder: Path, text: str, name: str = "m.onnx") -> Path:
    path = folder / name
    onnx.save(onnx.parser.parse_model(text), path)
    return path


def refused(path: Path, error: type[TrtoptError]) -> TrtoptError:
    with pytest.raises(error) as caught:
        load(path)
    assert caught.value.what and caught.value.where and caught.value.remedy
    return caught.value


RELU = HEADER + "g (float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }"


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "none.onnx", UsageError).what


def test_a_folder_is_a_usage_error(tmp_path: Path) -> None:
    assert "not a file" in refused(tmp_path, UsageError).what


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_a_usage_error(tmp_path: Path) -> None:
    path = saved(tmp_path, RELU)
    path.chmod(0)
    refused(path, UsageError)


@pytest.mark.parametrize(
    "content",
    [b"", b"this is a text file\n", b"\x00" * 64, b"PK\x03\x04", b"import torch\n" * 100],
    ids=["empty", "text", "zeros", "zip", "python"],
)
def test_a_file_that_is_no_model_is_invalid(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    refused(path, InvalidModelError)


def test_a_model_cut_off_anywhere_is_invalid(tmp_path: Path) -> None:
    whole = saved(tmp_path, RELU).read_bytes()
    path = tmp_path / "cut.onnx"
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        refused(path, InvalidModelError)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEADER + "g (float[4] x) => (float[4] y) { y = Frobnicate(x) }", "no operator Frobnicate"),
        (HEADER + "g (float[4] x) => (float[4] y) { y = Add(x, nowhere) }", "nowhere"),
        (HEADER + "g (float[4] x) => (float[4] y) { a = Add(x, b) b = Relu(a) y = Relu(b) }", "cycle"),
        (HEADER + "g (float[4] x) => (float[4] y) { y = Relu <alpha = 1> (x) }", "alpha"),
        (HEADER + "g (float[4] x) => (float[4] y) { y = Relu(x) y = Relu(x) }", "same name: y"),
        (HEADER + "g (float[4] x) => (float[4] y) { z = Relu(x) }", "not produced"),
        (HEADER + "g (float[4] x) => () { z = Relu(x) }", "no outputs"),
        (HEADER + "g (float x) => (float[4] y) { y = custom.Op(x) }", "custom"),
        (HEADER + "g (float[4] x, float[5] z) => (float[4] y) { y = Add(x, z) }", "inference"),
        ('<ir_version: 8, opset_import: ["" : 6]>g (float[4] x) => (float[4] y) { y = Relu(x) }', "too old"),
        ('<ir_version: 8, opset_import: ["" : 999]>g (float[4] x) => (float[4] y) { y = Relu(x) }', "newer"),
        ('<ir_version: 2, opset_import: ["" : 7]>g (float[4] x) => (float[4] y) { y = Relu(x) }', "IR version 2"),
        ('<ir_version: 999, opset_import: ["" : 7]>g (float[4] x) => (float[4] y) { y = Relu(x) }', "IR version 999"),
        (
            '<ir_version: 4, opset_import: ["" : 8]>g (float[1, 2, 3] x) => (y) '
            '{ y = Scan <num_scan_inputs = 1, body = b (float[3] i) => (float[3] o) { o = Relu(i) }> ("", x) }',
            "Scan of opset 8",
        ),
    ],
)
def test_invalid_content_is_named(tmp_path: Path, text: str, said: str) -> None:
    error = refused(saved(tmp_path, text), InvalidModelError)
    assert said in str(error)


@pytest.mark.parametrize("kind", ["sequence", "no rank", "no type"])
def test_an_input_that_is_no_tensor_of_known_rank_is_invalid(tmp_path: Path, kind: str) -> None:
    model = onnx.parser.parse_model(RELU)
    if kind == "sequence":
        model.graph.input[0].type.CopyFrom(
            helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [4]))
        )
    elif kind == "no rank":
        model.graph.input[0].type.tensor_type.ClearField("shape")
    else:
        model.graph.input[0].ClearField("type")
    onnx.save(model, tmp_path / "m.onnx")
    assert "input x" in refused(tmp_path / "m.onnx", InvalidModelError).where


def test_text_that_is_not_utf8_is_invalid(tmp_path: Path) -> None:
    path = saved(tmp_path, RELU)
    path.write_bytes(path.read_bytes().replace(b"Relu", b"\xd7elu"))
    assert "damaged" in refused(path, InvalidModelError).what


def test_an_initializer_of_the_wrong_length_is_invalid(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        HEADER + "g (float[4] x) => (float[4] y) <float[4] w = {1,2,3,4}> { y = Add(x, w) }"
    )
    del model.graph.initializer[0].float_data[3:]
    onnx.save(model, tmp_path / "m.onnx")
    assert "initializer w" in refused(tmp_path / "m.onnx", InvalidModelError).where


# External data


def external_model(folder: Path, **entries: str) -> Path:
    """y = x + w, where w[4] lies in w.data."""
    model = onnx.parser.parse_model(HEADER + "g (float[4] x) => (float[4] y) { y = Add(x, w) }")
    tensor = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "w.data", "offset": "0", "length": "16", **entries}.items():
        tensor.external_data.add(key=key, value=value)
    np.arange(4, dtype=np.float32).tofile(folder / "w.data")
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    return folder / "m.onnx"


def test_external_weights_stay_in_their_file_and_are_hashed(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    artifact = load(path)
    weight = artifact.model.graph.initializers["w"].const_value
    assert weight is not None and type(weight).__name__ == "ExternalTensor"
    np.testing.assert_array_equal(weight.numpy(), np.arange(4, dtype=np.float32))
    parts = [hashlib.sha256(file.read_bytes()).digest() for file in (path, tmp_path / "w.data")]
    assert artifact.sha256 == hashlib.sha256(b"".join(parts)).hexdigest()


def test_a_relative_path_works_from_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    external_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    artifact = load("m.onnx")
    monkeypatch.chdir("/")
    weight = artifact.model.graph.initializers["w"].const_value
    assert weight is not None and weight.numpy()[3] == 3.0


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"location": "missing.data"}, "missing"),
        ({"location": "../w.data"}, "outside"),
        ({"location": "/etc/hostname"}, "absolute"),
        ({"location": "sub/../../w.data"}, "outside"),
        ({"location": ""}, "no file name"),
        ({"offset": "4"}, "too short"),
        ({"offset": "-4"}, "offset -4"),
        ({"length": "8"}, "need 16 bytes"),
        ({"offset": "zero"}, "not a number"),
    ],
)
def test_bad_external_data_is_invalid(tmp_path: Path, entries: dict[str, str], said: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "w.data").write_bytes(bytes(16))
    assert said in refused(external_model(folder, **entries), InvalidModelError).what


def test_a_truncated_weight_file_is_invalid(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    os.truncate(tmp_path / "w.data", 15)
    assert "too short" in refused(path, InvalidModelError).what


def test_a_symbolic_link_out_of_the_folder_is_invalid(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = external_model(folder)
    (folder / "w.data").rename(tmp_path / "elsewhere.data")
    (folder / "w.data").symlink_to(tmp_path / "elsewhere.data")
    assert "symbolic link" in refused(path, InvalidModelError).what


def test_a_symbolic_link_within_the_folder_is_fine(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    (tmp_path / "w.data").rename(tmp_path / "real.data")
    (tmp_path / "w.data").symlink_to(tmp_path / "real.data")
    weight = load(path).model.graph.initializers["w"].const_value
    assert weight is not None and weight.numpy()[3] == 3.0


def test_external_weights_are_mapped_when_they_are_loaded(tmp_path: Path) -> None:
    """Threads read them at a time, and onnx_ir fails where two of them map one tensor."""
    weight = load(external_model(tmp_path)).model.graph.initializers["w"].const_value
    (tmp_path / "w.data").unlink()
    assert weight is not None and weight.numpy()[3] == 3.0


def test_a_weight_file_with_two_names_is_invalid(tmp_path: Path) -> None:
    path = external_model(tmp_path)
    (tmp_path / "other.data").hardlink_to(tmp_path / "w.data")
    assert "hard link" in refused(path, InvalidModelError).what


@pytest.mark.parametrize("size", [0, 64])
def test_a_tensor_without_elements_in_another_file_can_be_read(tmp_path: Path, size: int) -> None:
    graph = "g (float[N, 4] x) => (float[N, 4] y) { y = Concat <axis = 0> (x, e) }"
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {graph}')
    tensor = proto.graph.initializer.add(name="e", data_type=onnx.TensorProto.FLOAT, dims=[0, 4])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="e.data")
    (tmp_path / "e.data").write_bytes(bytes(size))
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    found = load(tmp_path / "m.onnx").model.graph.initializers["e"].const_value
    assert found is not None
    assert found.numpy().shape == (0, 4) and found.tobytes() == b""


def test_external_data_of_a_nested_graph_is_checked(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        HEADER
        + "g (bool c) => (float[4] y) { y = If (c) <"
        "then_branch = a () => (float[4] p) { p = Identity(w) }, else_branch = b () => (float[4] q) "
        "{ q = Constant <value = float[4] {1, 2, 3, 4}> () }> }".replace(
            "{ p = Identity(w) }", "<float[4] w = {1, 2, 3, 4}> { p = Identity(w) }"
        )
    )
    tensor = model.graph.node[0].attribute[0].g.initializer[0]
    tensor.ClearField("float_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../w.data")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    assert "outside" in refused(tmp_path / "m.onnx", InvalidModelError).what


# What is brought to a common form


def build(tmp_path: Path, text: str, change: Callable[[onnx.ModelProto], None] | None = None) -> Path:
    model = onnx.parser.parse_model(text)
    if change:
        change(model)
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    return path


def test_initializers_listed_as_inputs_become_constants(tmp_path: Path) -> None:
    text = '<ir_version: 3, opset_import: ["" : 7]>g (float[4] x, float[4] w) => (float[4] y) <float[4] w = {1,2,3,4}> '
    artifact = load(build(tmp_path, text + "{ y = Add(x, w) }"))
    assert [item.name for item in artifact.inputs] == ["x"]
    assert "w" in artifact.model.graph.initializers
    assert any("1 initializers taken out" in detail for detail in artifact.steps[0].details)


def test_a_default_value_of_an_input_becomes_a_constant_and_is_reported(tmp_path: Path) -> None:
    text = HEADER + "g (float[4] x, float[4] w) => (float[4] y) <float[4] w = {1,2,3,4}> { y = Add(x, w) }"
    artifact = load(build(tmp_path, text))
    assert [item.name for item in artifact.inputs] == ["x"]
    assert any("input w has a default value" in detail for detail in artifact.steps[0].details)


def test_nodes_are_sorted(tmp_path: Path) -> None:
    artifact = load(build(tmp_path, HEADER + "g (float[4] x) => (float[4] y) { y = Relu(a) a = Neg(x) }"))
    assert [node.op_type for node in artifact.model.graph] == ["Neg", "Relu"]


def _calls(count: int, body: str, *, main: str) -> str:
    functions = [
        f'<domain: "own", opset_import: ["" : 17, "own" : 1]> f{k} (a) => (b) {{ {body.format(below=k - 1)} }}'
        for k in range(1, count)
    ]
    leaf = '<domain: "own", opset_import: ["" : 17]> f0 (a) => (b) { b = Relu(a) }'
    header = '<ir_version: 8, opset_import: ["" : 17, "own" : 1]>'
    graph = f"g (float[N, 4] x) => (float[N, 4] y) {{ y = own.{main} (x) }}"
    return "\n".join([header, graph, leaf, *functions])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (_calls(40, "c = own.f{below} (a) b = own.f{below} (c)", main="f39"), ("5.5e+11 nodes", "40 levels")),
        (_calls(3000, "b = own.f{below} (a)", main="f2999"), ("1 nodes", "3000 levels")),
        (_calls(2, "c = own.f1 (a) b = Relu (c)", main="f1"), ("calls itself", "f1 <- f1")),
    ],
    ids=["doubling", "deep", "itself"],
)
def test_functions_that_cannot_be_inlined_are_refused(tmp_path: Path, text: str, words: tuple[str, str]) -> None:
    error = refused(saved(tmp_path, text), InvalidModelError)
    assert all(word in f"{error.what} {error.where}" for word in words)


def test_local_functions_are_inlined_whatever_their_opset(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 12, "local" : 1]>g (float[2, 3] x) => (float[2] y) { y = local.f(x) } '
        '<domain: "local", opset_import: ["" : 13]> f (a) => (b) '
        "{ axes = Constant <value_ints = [1]> () b = ReduceSum <keepdims = 0> (a, axes) }"
    )
    artifact = load(build(tmp_path, text))
    assert not artifact.model.functions
    assert "local" not in artifact.model.graph.opset_imports
    assert {node.op_type for node in artifact.model.graph} == {"Constant", "ReduceSum"}


def test_every_node_and_value_has_a_unique_safe_name(tmp_path: Path) -> None:
    def rename(model: onnx.ModelProto) -> None:
        names = ["same", "same", "", "a]b\nc"]
        for node, name in zip(model.graph.node, names, strict=True):
            node.name = name

    text = HEADER + "g (float[4] x) => (float[4] y) { a = Relu(x) b = Neg(a) c = Abs(b) y = Exp(c) }"
    artifact = load(build(tmp_path, text, rename))
    assert [node.name for node in artifact.model.graph] == ["same", "same_1", "node_of_c", "a_b_c"]
    invariants.check(artifact.model)


def test_names_of_nested_graphs_do_not_shadow(tmp_path: Path) -> None:
    text = (
        HEADER + "g (bool c, float[4] x) => (float[4] y) { t = Relu(x) y = If (c) <"
        "then_branch = a () => (float[4] r) { s = Abs(x) r = Neg(s) },"
        "else_branch = b () => (float[4] r) { s = Exp(t) r = Neg(s) }> }"
    )
    artifact = load(build(tmp_path, text))
    invariants.check(artifact.model)
    assert len(list(all_nodes(artifact.model.graph))) == 6


def test_a_branch_that_hands_out_an_outer_value_gets_an_identity(tmp_path: Path) -> None:
    text = (
        HEADER + "g (bool c, float[4] x) => (float[4] y) { t = Relu(x) y = If (c) <"
        "then_branch = a () => (float[4] t) { unused = Abs(x) },"
        "else_branch = b () => (float[4] r) { r = Exp(t) }> }"
    )
    artifact = load(build(tmp_path, text))
    invariants.check(artifact.model)
    assert "Identity" in {node.op_type for node in all_nodes(artifact.model.graph)}


def test_custom_operators_are_kept_with_their_declared_types(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17, "my" : 1]>g (float[4] x) => (float[4] y) <float[4] a> '
    artifact = load(build(tmp_path, text + "{ a = my.Op(x) y = Relu(a) }"))
    assert [node.domain for node in artifact.model.graph] == ["my", ""]
    assert artifact.model.graph.opset_imports == {"": 21, "my": 1}
    value = next(iter(artifact.model.graph)).outputs[0]
    assert value.shape is not None and value.shape == [4]


def test_a_newer_opset_is_kept(tmp_path: Path) -> None:
    text = '<ir_version: 11, opset_import: ["" : 22]>g (float[4] x) => (float[4] y) { y = Relu(x) }'
    model = load(build(tmp_path, text)).model
    assert model.graph.opset_imports[""] == 22 and model.ir_version == 11


def test_dynamic_axes_keep_their_symbols(tmp_path: Path) -> None:
    artifact = load(saved(tmp_path, RELU))
    assert artifact.inputs[0].shape == ("N", 4) and not artifact.inputs[0].is_static
    assert str(artifact.model.graph.outputs[0].shape) == "[N,4]"


def test_dimensions_of_minus_one_are_open(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 7, opset_import: ["" : 11]> g (float[2, 3, 4] x) => (float[2, 3, 4] y) { y = Relu(x) }'
    )
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = value.type.tensor_type.shape.dim[2].dim_value = -1
    onnx.save(model, tmp_path / "m.onnx")
    (found,) = load(tmp_path / "m.onnx").model.graph.inputs
    assert found.shape is not None
    assert [isinstance(dim, int) for dim in found.shape] == [False, True, False]


@pytest.mark.parametrize(("axes", "left"), [([1], "Identity"), ([-1, 1], "Identity"), ([2], "Squeeze")])
def test_squeezing_a_long_axis_does_nothing_as_in_pytorch(tmp_path: Path, axes: list[int], left: str) -> None:
    model = onnx.parser.parse_model(
        HEADER + "g (float[2, 3, 1, 4] x) => (y) "
        "<float[2, 3, 1, 4] z, float[2, 3, 1, 4] w> { z = Relu(x) w = Squeeze(z, axes) y = Neg(w) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(axes), "axes"))
    onnx.save(model, tmp_path / "m.onnx")
    assert [node.op_type for node in load(tmp_path / "m.onnx").model.graph] == ["Relu", left, "Neg"]


def test_a_stale_shape_does_not_keep_an_axis(tmp_path: Path) -> None:
    """ONNX Runtime infers the shape anew, and runs it."""
    text = "g (float[2, 1, 4] x) => (float[2, 4] y) <float[2, 3, 4] z> { z = Relu(x) y = Squeeze(z, axes) }"
    model = onnx.parser.parse_model(HEADER + text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axes"))
    onnx.save(model, tmp_path / "m.onnx")
    assert [node.op_type for node in load(tmp_path / "m.onnx").model.graph] == ["Relu", "Squeeze"]


def test_a_stale_declared_batch_gives_way_to_the_symbol(tmp_path: Path) -> None:
    artifact = load(saved(tmp_path, HEADER + "g (float[N, 4] x) => (float[1, 4] y) { y = Relu(x) }"))
    assert str(artifact.model.graph.outputs[0].shape) == "[N,4]"


@pytest.mark.parametrize("declared", ["float[1, S]", "float[N, 1, 5]"])
def test_a_declared_output_that_the_nodes_contradict_is_left_out(tmp_path: Path, declared: str) -> None:
    artifact = load(saved(tmp_path, HEADER + f"g (float[N, 1, 4] x) => ({declared} y) {{ y = Relu(x) }}"))
    assert str(artifact.model.graph.outputs[0].shape) == "[N,1,4]"
    assert any("output y is declared as" in detail for detail in artifact.steps[0].details)


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path, RELU)
    artifact = load(path)
    assert artifact.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert artifact.path == path and artifact.steps[0].stage == "LOAD"
