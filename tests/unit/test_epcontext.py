"""ONNX models that ONNX Runtime loads an engine from: what is in them, and what of them is refused."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from drawn_cases import few_or
from engine_files import file_hash, manifest, rtx_engine, tensorrt_engine, tensorrt_manifest

from trtopt.engine.epcontext import context_model, engine_in, hardware_of
from trtopt.engine.manifest import load_engine, manifest_path, write_manifest
from trtopt.errors import IntegrityError, InvalidModelError
from trtopt.report.schema.manifest import EngineTensor, HostFiles, Manifest, content_hash

DATA = rtx_engine()
OUTPUTS = (EngineTensor("y", "float16", ("N", 4)), EngineTensor("s", "float32", ("N", "?")))
HOST = onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["" : 17]>
    host (float16[N, 4] y, float[k] limits) => (float[N, 4] z) { c = Cast <to = 1> (y)
        z = Mul (c, two) }
""")
HOST.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(2), "two"))


def whole() -> Manifest:
    return manifest(DATA, outputs=OUTPUTS)


def cut() -> Manifest:
    return manifest(DATA, outputs=OUTPUTS, host=HostFiles((), ("y", "limits"), ("z",), ("z", "s")))


def node_of(content: bytes) -> dict[str, Any]:
    (node,) = (node for node in onnx.load_from_string(content).graph.node if node.op_type == "EPContext")
    assert node.domain == "com.microsoft"
    return {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}


def saved(folder: Path, *, embed: bool, found: Manifest | None = None, file: str = "m.engine") -> Path:
    """A model with its manifest, and the engine beside it unless it is embedded."""
    found = found or cut()
    content = context_model(DATA, found, HOST, file=None if embed else file)
    path = folder / "m.onnx"
    path.write_bytes(content)
    write_manifest(path, dataclasses.replace(found, epcontext=content_hash(path.name, content)))
    if not embed:
        (folder / "m.engine").write_bytes(DATA)
    return path


def test_the_node_says_what_onnx_runtime_reads() -> None:
    content = context_model(DATA, whole(), file="m.engine")
    found = node_of(content)
    assert found.pop("partition_name") == f"trtopt_{whole().engine_sha256[:16]}".encode()
    assert found == {
        "main_context": 1, "embed_mode": 0, "ep_cache_context": b"m.engine", "ep_sdk_version": b"1.7.1.116",
        "hardware_architecture": b"89", "source": b"NvTensorRTRTXExecutionProvider",
    }  # fmt: skip
    model = onnx.load_from_string(content)
    onnx.checker.check_model(model, full_check=True)
    assert [item.name for item in model.graph.input] == ["x"]
    x, y, s = (item.type.tensor_type for item in (*model.graph.input, *model.graph.output))
    assert (x.elem_type, y.elem_type, s.elem_type) == (10, 10, 1)
    assert [dim.dim_param or dim.dim_value for dim in x.shape.dim] == ["N", 4, 8, 8]
    assert [dim.WhichOneof("value") for dim in s.shape.dim] == ["dim_param", None]
    assert model.metadata_props[0].key == "ep_compatibility_info.NvTensorRTRTXExecutionProvider"
    assert bytes.fromhex(model.metadata_props[0].value) == DATA[:64]


def test_an_engine_of_tensorrt_is_for_its_own_provider() -> None:
    data = tensorrt_engine()
    found = node_of(context_model(data, tensorrt_manifest(data)))
    assert (found["source"], found["hardware_architecture"]) == (b"TensorrtExecutionProvider", b"80")
    assert found["embed_mode"] == 1 and found["ep_cache_context"] == data


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "89"),
        ({"compute_capabilities": ("12.0",)}, "120"),
        ({"compute_capabilities": ("8.0", "8.6", "8.9", "12.0")}, "80+"),
        ({"hardware_compatibility": "ampere+"}, "80+"),
        ({"hardware_compatibility": "same_compute_capability"}, "89"),
    ],
)
def test_the_hardware_is_written_as_onnx_runtime_compares_it(changes: dict[str, Any], wanted: str) -> None:
    assert hardware_of(manifest(DATA, **changes)) == wanted


def test_the_part_for_the_host_is_behind_the_node() -> None:
    model = onnx.load_from_string(context_model(DATA, cut(), HOST))
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["EPContext", "Cast", "Mul"]
    assert [item.name for item in model.graph.input] == ["x", "limits"]
    assert [item.name for item in model.graph.output] == ["z", "s"]  # those of the whole model, in its order
    assert "y" in [item.name for item in model.graph.value_info]  # no one infers the type of what the node gives
    assert {item.domain: item.version for item in model.opset_import} == {"": 17, "com.microsoft": 1}
    assert context_model(DATA, cut(), HOST) == context_model(DATA, cut(), HOST)


def test_what_one_file_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtopt.engine.epcontext.LARGEST_EMBEDDED_BYTES", len(DATA) - 1)
    with pytest.raises(InvalidModelError, match="does not fit one ONNX file"):
        context_model(DATA, whole())
    context_model(DATA, whole(), file="m.engine")


@pytest.mark.parametrize("embed", [True, False])
def test_the_engine_that_is_taken_out_is_the_one_that_was_built(tmp_path: Path, embed: bool) -> None:
    path = saved(tmp_path, embed=embed)
    assert engine_in(path.read_bytes()) == (DATA if embed else "m.engine")
    found = load_engine(path)
    assert found.data == DATA and found.manifest is not None


@pytest.mark.parametrize("embed", [True, False])
@pytest.mark.parametrize("flips", few_or(1000))
def test_a_bit_flipped_anywhere_is_noticed(tmp_path: Path, embed: bool, flips: int) -> None:
    path, dice = saved(tmp_path, embed=embed), random.Random(7)
    places = [path, manifest_path(path), *([] if embed else [tmp_path / "m.engine"])]
    for number in range(flips):
        place = places[number % len(places)]
        content = place.read_bytes()
        changed = bytearray(content)
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
        place.write_bytes(changed)
        with pytest.raises(IntegrityError) as caught:
            load_engine(path, allow_unverified=True)
        assert caught.value.remedy
        place.write_bytes(content)
    load_engine(path)


@pytest.mark.parametrize("name", ["../m.engine", "/m.engine", "a/m.engine", "..\\m.engine", "C:m.engine", "", "."])
def test_an_engine_in_another_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "inner").mkdir()
    path = saved(tmp_path / "inner", embed=False, file=name)
    (tmp_path / "m.engine").write_bytes(DATA)
    with pytest.raises(IntegrityError, match="not beside the engine"):
        load_engine(path)


def test_a_model_whose_engine_is_missing_or_another_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, embed=False)
    (tmp_path / "m.engine").write_bytes(rtx_engine(seed=1))
    with pytest.raises(IntegrityError, match="engine of the model is not the one"):
        load_engine(path)
    (tmp_path / "m.engine").unlink()
    with pytest.raises(IntegrityError, match="cannot be read"):
        load_engine(path)


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 30,
        onnx.ModelProto().SerializeToString(),
        HOST.SerializeToString(),
        context_model(DATA, whole()).replace(b"ep_cache_context", b"ep_cache_nothing"),
        context_model(DATA, whole(), file="m.engine").replace(b"m.engine", b"\xff.engine"),
    ],
)
def test_what_is_no_such_model_is_refused_though_its_manifest_fits(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    write_manifest(path, dataclasses.replace(whole(), epcontext=content_hash(path.name, content)))
    with pytest.raises(IntegrityError, match="none that an engine is loaded from"):
        load_engine(path)


def test_weights_of_the_host_in_files_of_their_own_are_checked(tmp_path: Path) -> None:
    weights = b"weights" * 100
    files = (file_hash("m.host.onnx", b"not needed: it is in the model"), file_hash("m.host.onnx.0.data", weights))
    host = HostFiles(files, ("y", "limits"), ("z",), ("z", "s"))
    path = saved(tmp_path, embed=True, found=manifest(DATA, outputs=OUTPUTS, host=host))
    with pytest.raises(IntegrityError, match="cannot be read"):
        load_engine(path)
    (tmp_path / "m.host.onnx.0.data").write_bytes(weights)
    assert load_engine(path).data == DATA
