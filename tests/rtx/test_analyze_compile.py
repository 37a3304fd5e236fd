"""The compiler's level of an analysis, with the real TensorRT for RTX builder and no sample."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from rtx_nets import attention_net, constant, conv_net, loop_net, lstm_net, model, recurrent_net

from trtopt.analysis.compiled import CompiledLevel, compile_level
from trtopt.engine.backend import RTX_TARGETS
from trtopt.errors import EngineBuildError, MissingDependencyError
from trtopt.events import ignore
from trtopt.graph import edit
from trtopt.hardware.spec import all_gpus, find_gpu
from trtopt.judge.target import nearest_target
from trtopt.roofline.layer import layer_time
from trtopt.roofline.node_work import GraphTypes, work_of_node
from trtopt.roofline.onnx_layers import layers_of_graph
from trtopt.roofline.work import Gemm, Layer, Work
from trtopt.source.onnx_file import load
from trtopt.support.clock import Clock
from trtopt.support.precision import Precision

pytest.importorskip("tensorrt_rtx")


def compiled(
    proto: onnx.ModelProto,
    folder: Path,
    precision: str | None,
    gpu: str = "L4",
    recipes: str = "all",
    **shapes: tuple[int, ...],
) -> CompiledLevel:
    onnx.save(proto, folder / "model.onnx")
    artifact = load(folder / "model.onnx")
    return compile_level(
        artifact, find_gpu(gpu), precision and Precision(precision), shapes, Clock(ignore), recipes=recipes
    )


def graph_flop(level: CompiledLevel) -> int:
    works = [work_of_node(node, level.shapes, GraphTypes()) for node in edit.all_nodes(level.model.graph)]
    assert None not in works
    return sum(work.flop for work in works if work is not None)


def work_of(layer: Layer) -> Work:
    assert layer.work is not None, layer.name
    return layer.work


@pytest.mark.parametrize(
    ("precision", "types"),
    [("fp32", {"fp32"}), ("tf32", {"tf32"}), ("fp16", {"fp16"}), ("bf16", {"bf16"}), ("int8", {"int8"})],
)
def test_every_kernel_has_a_cost_and_their_flop_are_the_graphs(precision: str, types: set[str], tmp_path: Path) -> None:
    level = compiled(conv_net(), tmp_path, precision)
    assert sum(work_of(layer).flop for layer in level.layers) == graph_flop(level)
    assert {work_of(layer).dtype for layer in level.layers if work_of(layer).gemm is not None} == types
    assert level.proxy is None


def test_the_precision_of_the_model_is_kept_when_none_is_asked_for(tmp_path: Path) -> None:
    level = compiled(conv_net("int8"), tmp_path, None)
    kinds = {layer.onnx_nodes[0]: work_of(layer).dtype for layer in level.layers if work_of(layer).gemm is not None}
    assert kinds["conv1"] == kinds["conv2"] == "int8"
    assert sum(work_of(layer).flop for layer in level.layers) == graph_flop(level)


def test_fused_attention_and_merged_projections_are_one_kernel_each(tmp_path: Path) -> None:
    level = compiled(attention_net(), tmp_path, None)
    (attention,) = [work_of(layer) for layer in level.layers if work_of(layer).kind == "attention"]
    products = [work.gemm for work in map(work_of, level.layers) if work.gemm is not None and work.kind == "gemm"]
    assert sorted((gemm.m, gemm.n, gemm.k) for gemm in products) == [(128, 128, 128), (128, 384, 128)]
    assert attention.flop >= 2 * 2 * 2 * 4 * 64 * 64 * 32
    assert sum(work_of(layer).flop for layer in level.layers) == graph_flop(level)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_recurrent_layers_count_every_step(precision: str, tmp_path: Path) -> None:
    level = compiled(lstm_net(), tmp_path, precision, recipes="none")
    assert sum(work_of(layer).flop for layer in level.layers) == graph_flop(level)
    assert any(work_of(layer).kind == "recurrent" for layer in level.layers)


@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_a_compiled_recurrent_layer_takes_a_few_times_as_long_as_one_fused_kernel(op: str, tmp_path: Path) -> None:
    """It launches several kernels a step instead of one; its weights are read once a step in both."""
    level = compiled(recurrent_net(op, steps=64, batch=8, size=512), tmp_path, "fp16", recipes="none")
    alone = layers_of_graph(level.model, level.shapes, GraphTypes())
    engine, graph = (sum(layer_time(work_of(layer), find_gpu("L4")).predicted_us for layer in layers)
                     for layers in (level.layers, alone))  # fmt: skip
    assert graph < engine < 4 * graph
    products = [work_of(layer) for layer in level.layers if work_of(layer).kind == "recurrent"]
    assert sum(work.flop for work in products) == 2 * 64 * 8 * 512 * 512 * {"LSTM": 4, "GRU": 3}[op]


def test_a_loop_whose_length_is_an_input_counts_once_and_says_so(tmp_path: Path) -> None:
    onnx.save(loop_net(), tmp_path / "model.onnx")
    clock = Clock(ignore)
    level = compile_level(load(tmp_path / "model.onnx"), find_gpu("L4"), None, {}, clock)
    assert {work_of(layer).steps for layer in level.layers} == {1}
    assert clock.warnings == ["the trip count of a loop is not a constant: its kernels count once"]


def test_kernels_of_a_loop_move_their_bytes_in_every_trip(tmp_path: Path) -> None:
    network = loop_net()
    del network.graph.input[1]
    network.graph.initializer.append(constant("n", np.asarray(7, np.int64)))
    level = compiled(network, tmp_path, None)
    (body,) = [work_of(layer) for layer in level.layers if "matmul_body" in layer.onnx_nodes and work_of(layer).gemm]
    assert (body.steps, body.gemm) == (7, Gemm(m=4, n=16, k=16))
    assert body.read_bytes == 7 * 4 * 16 * 4
    assert body.flop >= 7 * 2 * 4 * 16 * 16


def test_a_dynamic_batch_is_compiled_at_the_shapes_given(tmp_path: Path) -> None:
    dynamic = compiled(conv_net(batch="N"), tmp_path, "fp16", x=(8, 16, 16, 16))
    static = compiled(conv_net(), tmp_path, "fp16")
    assert sum(work_of(layer).flop for layer in dynamic.layers) == graph_flop(static)
    assert sum(work_of(layer).bytes for layer in dynamic.layers) == sum(work_of(layer).bytes for layer in static.layers)


def test_another_gpu_stands_in_where_the_compiler_has_no_target(tmp_path: Path) -> None:
    level = compiled(conv_net(), tmp_path, "fp16", gpu="H100")
    assert level.proxy is not None and "compute capability 8.9" in level.proxy
    assert sum(work_of(layer).flop for layer in level.layers) == graph_flop(level)


def test_every_gpu_of_the_table_has_a_target() -> None:
    found = {gpu.compute_capability: nearest_target(gpu).compute_capability for gpu in all_gpus()}
    assert set(found.values()) <= set(RTX_TARGETS)
    assert all(found[own] == own for own in found if own in RTX_TARGETS)
    others = {own: target for own, target in found.items() if own not in RTX_TARGETS}
    assert others == {"7.0": "8.0", "8.7": "8.6", "9.0": "8.9", "10.0": "12.0", "10.3": "12.0", "11.0": "12.0"}


@pytest.mark.parametrize(("own", "target"), [("6.1", "8.0"), ("8.8", "8.6"), ("13.0", "12.0")])
def test_a_gpu_that_users_add_has_a_target_too(own: str, target: str) -> None:
    gpu = dataclasses.replace(find_gpu("V100"), compute_capability=own)
    assert nearest_target(gpu).compute_capability == target


def test_a_model_the_compiler_refuses_is_a_build_error(tmp_path: Path) -> None:
    node = helper.make_node("MaxPool", ["x"], ["y", "places"], name="pool", kernel_shape=[2, 2])
    outputs = [("y", np.float32), ("places", np.int64)]
    refused = model([node], [("x", np.float32, [1, 4, 4, 4])], outputs, [constant("unused", np.zeros(1))])
    with pytest.raises(EngineBuildError):
        compiled(refused, tmp_path, "fp32")


def test_a_missing_compiler_is_a_missing_dependency_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(MissingDependencyError) as caught:
        compiled(conv_net(), tmp_path, "fp16")
    assert caught.value.exit_code == 4
    assert "pip install" in caught.value.remedy
