"""Model repositories for Triton: what config.pbtxt says, and what is written when."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import triton_schema
from engine_files import file_hash, rtx_engine, tensorrt_engine, tensorrt_manifest
from engine_files import save as save_engine
from onnx import numpy_helper

import trtopt
from trtopt.errors import IntegrityError, InvalidModelError, TargetError, UsageError
from trtopt.report.schema.manifest import EngineTensor, HostFiles, ShapeRange
from trtopt.serve import triton
from trtopt.serve.triton import ServedModel, TritonConfig, config_text

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'


def save(path: Path, text: str, **constants: np.ndarray) -> Path:
    proto = onnx.parser.parse_model(HEADER + text)
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    onnx.save(proto, path)
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return save(tmp_path / "net.onnx", "g (float[N, 3, 8, 8] x) => (float[N, 3, 8, 8] y) { y = Relu(x) }")


def ranges(*shapes: tuple[int, ...]) -> ShapeRange:
    return ShapeRange(*shapes)


X = EngineTensor("x", "float16", ("N", 4), "chw", (ranges((1, 4), (8, 4), (16, 4)), ranges((16, 4), (32, 4), (64, 4))))
Y = EngineTensor("y", "float32", ("N", "boxes"))


def engine(folder: Path, **changes: Any) -> Path:
    data = tensorrt_engine()
    return save_engine(folder, data, tensorrt_manifest(data, **{"inputs": (X,), "outputs": (Y,), **changes}))


def test_a_model_gets_names_types_dims_batches_and_warm_up(images: Path, tmp_path: Path) -> None:
    report = trtopt.triton(images, tmp_path / "repo", max_delay_us=300, max_queue=64, instances=2)
    assert (report.name, report.version, report.max_batch, report.batch_axis) == ("net", 1, 16, "N")
    assert (tmp_path / "repo/net/1/model.onnx").read_bytes() == images.read_bytes()
    config = triton_schema.read(tmp_path / "repo/net")
    triton_schema.check_valid(config)
    assert (config.backend, config.max_batch_size) == ("onnxruntime", 16)
    assert [list(tensor.dims) for tensor in (*config.input, *config.output)] == [[3, 8, 8], [3, 8, 8]]
    assert config.dynamic_batching.max_queue_delay_microseconds == 300
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 64
    assert config.instance_group[0].count == 2
    assert [sample.batch_size for sample in config.model_warmup] == [1, 16]
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert accelerator.name == "tensorrt"
    assert dict(accelerator.parameters) == {
        "trt_profile_min_shapes": "x:1x3x8x8",
        "trt_profile_opt_shapes": "x:16x3x8x8",
        "trt_profile_max_shapes": "x:16x3x8x8",
    }


def test_shapes_and_an_engine_cache_reach_tensorrt(tmp_path: Path) -> None:
    path = save(tmp_path / "net.onnx", "g (int64[B, S] ids, float[1] t) => (float[B, S] y) { c = Cast <to = 1> (ids) y = Mul(c, t) }")  # fmt: skip # noqa: E501
    shapes = {"min_shapes": {"ids": (1, 4)}, "opt_shapes": {"ids": (8, 32)}, "max_shapes": {"ids": (32, 128)}}
    trtopt.triton(path, tmp_path / "repo", max_batch=0, engine_cache="/cache/net", **shapes)
    config = triton_schema.read(tmp_path / "repo/net")
    triton_schema.check_valid(config)
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert accelerator.parameters["trt_profile_max_shapes"] == "ids:32x128"
    assert accelerator.parameters["trt_engine_cache_path"] == "/cache/net"
    assert "precision_mode" not in accelerator.parameters  # its absence makes the network strongly typed
    assert [list(sample.inputs["ids"].dims) for sample in config.model_warmup] == [[8, 32]]


def test_axes_without_a_range_are_said_and_not_warmed_up(tmp_path: Path) -> None:
    path = save(tmp_path / "net.onnx", "g (float[B, S] x) => (float[B, S] y) { y = Relu(x) }")
    report = trtopt.triton(path, tmp_path / "repo")
    assert "the range of the axes S is not known" in report.notes[0] and "--opt-shapes" in report.notes[0]
    config = triton_schema.read(tmp_path / "repo/net")
    assert list(config.input[0].dims) == [-1] and not config.model_warmup
    assert not config.optimization.execution_accelerators.gpu_execution_accelerator[0].parameters


def test_on_the_cpu_there_is_no_accelerator(images: Path, tmp_path: Path) -> None:
    trtopt.triton(images, tmp_path / "repo", device="cpu")
    config = triton_schema.read(tmp_path / "repo/net")
    assert config.instance_group[0].kind == config.instance_group[0].KIND_CPU
    assert not config.HasField("optimization")


@pytest.mark.parametrize(
    ("signature", "dims", "batch"),
    [
        ("float[N] x) => (float[N] y", [1], 16),  # one dimension, which is the batch
        ("float x) => (float y", [1], 0),  # a scalar
        ("float[M, 2] other, float[N, 2] x) => (float[N, 2] y", [-1, 2], 0),  # not one batch axis
        ("float[1, 2] x) => (float[1, 2] y", [1, 2], 0),
    ],
)
def test_what_is_not_a_batch_keeps_all_its_dims(signature: str, dims: list[int], batch: int, tmp_path: Path) -> None:
    path = save(tmp_path / "net.onnx", f"g ({signature}) {{ y = Relu(x) }}")
    trtopt.triton(path, tmp_path / "repo", device="cpu")
    config = triton_schema.read(tmp_path / "repo/net")
    triton_schema.check_valid(config)
    assert (list(config.input[0].dims), config.max_batch_size) == (dims, batch)
    assert config.input[0].HasField("reshape") == (dims == [1] and batch > 0)
    assert config.HasField("dynamic_batching") == (batch > 0)


def test_batches_of_axes_with_two_names_are_made_on_request(tmp_path: Path) -> None:
    path = save(tmp_path / "net.onnx", "g (float[N, 2] x, float[M, 2] other) => (float[N, 2] y) { y = Relu(x) }")
    report = trtopt.triton(path, tmp_path / "repo", max_batch=4)
    assert (report.max_batch, report.batch_axis) == (4, None)
    assert list(triton_schema.read(tmp_path / "repo/net").output[0].dims) == [2]


def test_every_type_has_tritons_name(tmp_path: Path) -> None:
    names = "float16 float double int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool string".split()
    tensors = [f"{name}[2] {{}}{position}" for position, name in enumerate(names)]
    text = f"g ({', '.join(tensors).format(*'x' * 13)}) => ({', '.join(tensors).format(*'y' * 13)}) {{"
    text += " ".join(f"y{position} = Identity(x{position})" for position in range(len(names))) + "}"
    trtopt.triton(save(tmp_path / "net.onnx", text), tmp_path / "repo", device="cpu")
    config = triton_schema.read(tmp_path / "repo/net")
    triton_schema.check_valid(config)
    found = [triton_schema.type_name(tensor.data_type) for tensor in config.input]
    assert found == [f"TYPE_{name}" for name in "FP16 FP32 FP64 INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 BOOL STRING".split()]  # fmt: skip # noqa: E501


def test_a_type_that_triton_has_not_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path / "net.onnx", "g (bfloat16[N] x) => (bfloat16[N] y) { y = Identity(x) }")
    with pytest.raises(InvalidModelError, match="onnxruntime backend has no tensors of type bfloat16") as caught:
        trtopt.triton(path, tmp_path / "repo")
    assert caught.value.where == "tensor x" and not (tmp_path / "repo").exists()


def test_an_output_that_is_no_tensor_is_an_error(tmp_path: Path) -> None:
    path = save(tmp_path / "net.onnx", "g (float[N, 3] x) => (seq(float[N, 3]) y) { y = SequenceConstruct(x) }")
    with pytest.raises(InvalidModelError, match="no tensors") as caught:
        trtopt.triton(path, tmp_path / "repo")
    assert caught.value.where == "tensor y" and not (tmp_path / "repo").exists()


def test_names_are_quoted(tmp_path: Path) -> None:
    odd = "".join(map(chr, range(0x300))) + "0\U0001f600"
    model = ServedModel("m", "onnxruntime", (EngineTensor(odd, "float32", (2,)),), (EngineTensor("y", "bool", (2,)),))
    config = triton_schema.parsed(config_text(model, 0, TritonConfig()))
    assert config.input[0].name == odd and list(config.model_warmup[0].inputs) == [odd]
    assert triton.text({"a": triton.Word("B"), "c": True, "d": None, "e": []}) == "a: B\nc: true\ne: []\n"


def test_weights_in_other_files_come_along(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(HEADER + "g (float[N, 64] x) => (float[N, 64] y) { y = MatMul(x, w) }")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), np.float32), "w"))
    onnx.save(proto, tmp_path / "net.onnx", save_as_external_data=True, location="net.weights")
    report = trtopt.triton(tmp_path / "net.onnx", tmp_path / "repo")
    assert report.models[0].files == ("model.onnx", "net.weights")
    copied = onnx.load(tmp_path / "repo/net/1/model.onnx")
    np.testing.assert_array_equal(numpy_helper.to_array(copied.graph.initializer[0]), np.ones((64, 64)))


def test_weights_by_a_way_that_the_repository_has_not_are_an_error(tmp_path: Path) -> None:
    proto = onnx.parser.parse_model(HEADER + "g (float[N, 64] x) => (float[N, 64] y) { y = MatMul(x, w) }")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((64, 64), np.float32), "w"))
    onnx.save(proto, tmp_path / "net.onnx", save_as_external_data=True, location="net.weights")
    (tmp_path / "folder").mkdir()
    proto = onnx.load(tmp_path / "net.onnx", load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = "folder/../net.weights"
    (tmp_path / "net.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(InvalidModelError, match="through another folder"):
        trtopt.triton(tmp_path / "net.onnx", tmp_path / "repo")


def test_an_engine_has_its_profiles(tmp_path: Path) -> None:
    path = engine(tmp_path)
    report = trtopt.triton(path, tmp_path / "repo")
    assert (report.max_batch, report.profiles, report.models[0].backend) == (64, 2, "tensorrt")
    assert "TensorRT 10.3.0.26: take the release of Triton that has it" in report.notes[0]
    assert (tmp_path / "repo/m/1/model.plan").read_bytes() == path.read_bytes()
    config = triton_schema.read(tmp_path / "repo/m")
    triton_schema.check_valid(config)
    assert list(config.instance_group[0].profile) == ["0", "1"]
    assert list(config.dynamic_batching.preferred_batch_size) == [8, 32, 64]
    assert [list(tensor.dims) for tensor in (*config.input, *config.output)] == [[4], [-1]]
    assert triton_schema.type_name(config.input[0].data_type) == "TYPE_FP16"
    assert not config.HasField("optimization")
    assert [(sample.name, sample.batch_size) for sample in config.model_warmup] == [
        ("profile_0_batch_1", 1), ("profile_0_batch_8", 8), ("profile_0_batch_16", 16),
        ("profile_1_batch_16", 16), ("profile_1_batch_32", 32), ("profile_1_batch_64", 64),
    ]  # fmt: skip


def test_warm_up_stays_inside_the_profiles(tmp_path: Path) -> None:
    """A request that no profile takes fails, and a model whose warm-up fails is not loaded."""
    ids = EngineTensor("ids", "int64", ("N", "S"), "chw", (ranges((1, 1), (1, 128), (4, 512)), ranges((4, 1), (16, 16), (64, 32))))  # fmt: skip # noqa: E501
    mask = dataclasses.replace(ids, name="mask", ranges=(ids.ranges[0], ranges((8, 1), (16, 16), (32, 32))))
    trtopt.triton(engine(tmp_path, inputs=(ids, mask)), tmp_path / "repo", max_batch=24)
    config = triton_schema.read(tmp_path / "repo/m")
    assert [(sample.batch_size, list(sample.inputs["ids"].dims)) for sample in config.model_warmup] == [
        (1, [128]), (4, [128]), (8, [16]), (16, [16]), (24, [16]),
    ]  # fmt: skip


def test_a_batch_that_no_profile_takes_is_refused(tmp_path: Path) -> None:
    least = dataclasses.replace(X, ranges=(ranges((8, 4), (8, 4), (16, 4)),))
    with pytest.raises(UsageError, match="The smallest batch of the optimization profiles is 8"):
        trtopt.triton(engine(tmp_path, inputs=(least,)), tmp_path / "repo", max_batch=4)
    report = trtopt.triton(engine(tmp_path, inputs=(least,)), tmp_path / "repo")
    assert "begin at a batch of 8" in report.notes[1]
    config = triton_schema.read(tmp_path / "repo/m")
    assert [sample.batch_size for sample in config.model_warmup] == [8, 16]


@pytest.mark.parametrize(
    "inputs",
    [
        (X, dataclasses.replace(X, name="z", ranges=X.ranges[:1])),
        (dataclasses.replace(X, ranges=(ranges((), (), ()),)),),
        (dataclasses.replace(X, ranges=(ranges((1,), (8,), (16,)),)),),
        (dataclasses.replace(X, ranges=(ranges((-1, 4), (8, 4), (16, 4)),)),),
        (dataclasses.replace(X, ranges=(ranges((1, 4), (8, 4), (4, 4)),)),),
        (dataclasses.replace(X, ranges=(ranges((1, 4), (8, 4), (2**40, 4)),)),),
        (dataclasses.replace(X, shape=(-3, 4), ranges=()),),
        (X, X),
    ],
    ids="uneven empty short negative disordered huge shape names".split(),
)
def test_a_manifest_that_cannot_be_is_refused(inputs: tuple[EngineTensor, ...], tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="in the manifest"):
        trtopt.triton(engine(tmp_path, inputs=inputs), tmp_path / "repo")
    assert not (tmp_path / "repo").exists()


def test_another_memory_layout_is_said(tmp_path: Path) -> None:
    shapes = ranges((1, 4, 8, 8), (8, 4, 8, 8), (16, 4, 8, 8))
    image = EngineTensor("x", "float16", ("N", 4, 8, 8), "hwc8", (shapes,))
    trtopt.triton(engine(tmp_path, inputs=(image,)), tmp_path / "repo")
    config = triton_schema.read(tmp_path / "repo/m")
    assert config.input[0].is_non_linear_format_io and not config.output[0].is_non_linear_format_io
    still = dataclasses.replace(image, shape=(1, 4, 8, 8), ranges=())
    with pytest.raises(InvalidModelError, match="in the layout hwc8 that have no batch"):
        trtopt.triton(engine(tmp_path, inputs=(still,)), tmp_path / "repo", name="still")


def test_a_cut_engine_becomes_an_ensemble(tmp_path: Path) -> None:
    host = save(tmp_path / "net.host.onnx", "g (float[N, boxes] y, float[N, 1] scale) => (float[N, boxes] z) { z = Mul(y, scale) }")  # fmt: skip # noqa: E501
    part = HostFiles((file_hash(host.name, host.read_bytes()),), ("y", "scale"), ("z",), ("z",))
    path = engine(tmp_path, host=part)
    report = trtopt.triton(path, tmp_path / "repo", name="net")
    assert [(model.name, model.backend) for model in report.models] == [
        ("net_engine", "tensorrt"), ("net_host", "onnxruntime"), ("net", "ensemble"),
    ]  # fmt: skip
    configs = {model.name: triton_schema.read(Path(model.path)) for model in report.models}
    for config in configs.values():
        triton_schema.check_valid(config)
        assert config.max_batch_size == 64
    whole = configs["net"]
    assert [tensor.name for tensor in whole.input] == ["x", "scale"]
    assert [tensor.name for tensor in whole.output] == ["z"]
    check_ensemble(configs, "net")
    assert list((tmp_path / "repo/net/1").iterdir()) == []
    host.write_bytes(host.read_bytes() + b" ")
    with pytest.raises(IntegrityError):
        trtopt.triton(path, tmp_path / "repo", name="net")


def check_ensemble(configs: dict[str, Any], name: str) -> None:
    """Each input of a step is an input of the ensemble or an output of an earlier step, of the same type and dims."""
    whole = configs[name]
    known = {tensor.name: tensor for tensor in whole.input}
    for step in whole.ensemble_scheduling.step:
        assert step.model_version == -1
        model = configs[step.model_name]
        assert set(step.input_map) == {tensor.name for tensor in model.input}
        assert set(step.output_map) == {tensor.name for tensor in model.output}
        for tensor in model.input:
            source = known[step.input_map[tensor.name]]
            assert (source.data_type, list(source.dims)) == (tensor.data_type, list(tensor.dims))
        known.update((step.output_map[tensor.name], tensor) for tensor in model.output)
    for tensor in whole.output:
        assert (known[tensor.name].data_type, list(known[tensor.name].dims)) == (tensor.data_type, list(tensor.dims))


def test_a_cut_model_with_scalars_in_a_batch(tmp_path: Path) -> None:
    """Triton holds the reshaped dimensions of an ensemble against the plain ones of its steps, which differ."""
    save(tmp_path / "net.onnx", "g (float[N, 4] x, float[N] s) => (float[N, 4] y) { y = Relu(x) }")
    save(tmp_path / "net.host.onnx", "g (float[N, 4] y, float[N] s) => (float[N] z) { z = Identity(s) }")
    trtopt.triton(tmp_path / "net.onnx", tmp_path / "repo", device="cpu")
    configs = {name: triton_schema.read(tmp_path / "repo" / name) for name in ("net_engine", "net_host", "net")}
    assert configs["net_host"].input[1].HasField("reshape")
    assert not any(tensor.HasField("reshape") for tensor in (*configs["net"].input, *configs["net"].output))
    check_ensemble(configs, "net")


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for kind, made, message in (
        ("double", ("z",), "gives float32, and the part for the host takes float64"),
        ("float", ("z", "x"), "Neither part makes an output"),
    ):
        host = save(tmp_path / "net.host.onnx", f"g ({kind}[N, boxes] y) => ({kind}[N, boxes] z) {{ z = Relu(y) }}")
        part = HostFiles((file_hash(host.name, host.read_bytes()),), ("y",), ("z",), made)
        with pytest.raises(InvalidModelError, match=message):
            trtopt.triton(engine(tmp_path, host=part), tmp_path / "repo")
    assert not (tmp_path / "repo").exists()


def test_the_end_of_another_model_is_left_out(images: Path, tmp_path: Path) -> None:
    save(tmp_path / "net.host.onnx", "g (float[N, 4] boxes) => (float[N, 4] z) { z = Relu(boxes) }")
    report = trtopt.triton(images, tmp_path / "repo")
    assert [model.name for model in report.models] == ["net"]
    assert report.notes == ("net.host.onnx is not the end of this model, and is left out",)


def test_an_engine_of_tensorrt_for_rtx_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "net.rtx.engine").write_bytes(rtx_engine())
    with pytest.raises(TargetError, match="this one is of TensorRT for RTX") as caught:
        trtopt.triton(tmp_path / "net.rtx.engine", tmp_path / "repo")
    assert caught.value.exit_code == 4
    assert "trtopt optimize" in caught.value.remedy and "inside ONNX Runtime" in caught.value.remedy
    assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 65}, "The largest batch of the optimization profiles is 64"),
        ({"device": "cpu"}, "The option is for ONNX models"),
        ({"opt_shapes": {"x": (8, 4)}}, "The option is for ONNX models"),
        ({"name": "../net"}, "Not a name for a model"),
        ({"name": ""}, "Not a name for a model"),
        ({"version": 0}, "0 is not a whole number from 1"),
        ({"instances": -1}, "-1 is not a whole number from 1"),
        ({"device": "tpu"}, "There is no device 'tpu'"),
        ({"batch": 4}, "There is no option 'batch'"),
        ({"max_batch": True}, "True is not a whole number from 0"),
        ({"name": 3}, "Not a name for a model"),
    ],
)
def test_what_does_not_fit_an_engine_writes_nothing(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        trtopt.triton(engine(tmp_path), tmp_path / "repo", **options)
    assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 4}, "takes no batches: the first axis of x is not dynamic"),
        ({"max_queue": 4}, "the queue in which Triton makes batches"),
        ({"device": "cpu", "engine_cache": "/cache"}, "There are no engines to keep"),
        ({"engine_cache": "/caf\udce9"}, "is not UTF-8"),
        ({"opt_shapes": {"x": (1, 3)}}, "x"),
    ],
)
def test_what_does_not_fit_a_model_writes_nothing(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = save(tmp_path / "net.onnx", "g (float[1, 2] x) => (float[1, 2] y) { y = Relu(x) }")
    with pytest.raises(UsageError, match=message):
        trtopt.triton(path, tmp_path / "repo", **options)
    assert not (tmp_path / "repo").exists()


def test_an_engine_without_a_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "net.engine").write_bytes(tensorrt_engine())
    with pytest.raises(UsageError, match="has no manifest, which tells its inputs and outputs"):
        trtopt.triton(tmp_path / "net.engine", tmp_path / "repo")


def test_versions_are_added_and_models_never_replaced(images: Path, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    assert trtopt.triton(images, repo).version == 1
    assert trtopt.triton(images, repo).version == 2
    assert trtopt.triton(images, repo, version=7).version == 7
    assert trtopt.triton(images, repo).version == 8
    before = snapshot(repo)
    with pytest.raises(UsageError, match="has version 7 already"):
        trtopt.triton(images, repo, version=7)
    with pytest.raises(UsageError, match="a model of this name with another configuration"):
        trtopt.triton(images, repo, max_batch=4)
    (repo / "other").mkdir()
    with pytest.raises(UsageError, match="another configuration"):
        trtopt.triton(images, repo, name="other")
    (repo / "other").rmdir()
    assert snapshot(repo) == before
    assert sorted(path.name for path in (repo / "net").iterdir()) == ["1", "2", "7", "8", "config.pbtxt"]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_failed_write_leaves_nothing(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="cannot be written: No space left on device"):
        trtopt.triton(images, tmp_path / "repo")
    assert list((tmp_path / "repo").iterdir()) == []


def test_of_models_that_belong_together_all_appear_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "net.onnx", "g (float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }")
    save(tmp_path / "net.host.onnx", "g (float[N, 4] y) => (float[N, 4] z) { z = Relu(y) }")
    room, sync = [2], os.fsync

    def full(handle: int) -> None:
        room[0] -= 1
        if not room[0]:
            raise OSError(28, "No space left on device")
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for room[0] in range(2, 6):
            with pytest.raises(UsageError, match="No space left on device"):
                trtopt.triton(tmp_path / "net.onnx", tmp_path / "repo")
            assert list((tmp_path / "repo").iterdir()) == []
    order: list[str] = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda old, new: (order.append(Path(new).name), rename(old, new)))
    assert trtopt.triton(tmp_path / "net.onnx", tmp_path / "repo").version == 1
    assert order == ["net_engine", "net_host", "net"]  # what the ensemble needs is there before it


def test_a_repository_that_cannot_be_is_an_error(images: Path, tmp_path: Path) -> None:
    (tmp_path / "repo").write_text("")
    for name in ("repo", "x" * 300, "a\0b"):
        with pytest.raises(UsageError, match="cannot be written"):
            trtopt.triton(images, tmp_path / name)
