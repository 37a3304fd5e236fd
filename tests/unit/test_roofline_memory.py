"""Weights once, activations while they are alive."""

from __future__ import annotations

import onnx_ir as ir
from fusion import parsed

from trtopt.graph.shapes import static_shapes
from trtopt.hardware.spec import find_gpu
from trtopt.report.schema.analysis import Memory
from trtopt.roofline.memory import RESERVED_BYTES, peak_memory
from trtopt.roofline.node_work import GraphTypes
from trtopt.roofline.onnx_layers import FusedModel
from trtopt.support.precision import Precision

IMAGE = "g (float[1, 8, 4, 4] x) => (y)"
TENSOR = 8 * 16 * 2
WEIGHTS = "<float[8, 8, 1, 1] w, float[16, 8, 1, 1] u, float[8, 16, 1, 1] v>"


def memory(text: str, precision: GraphTypes | None = None) -> Memory:
    model = parsed(text)
    return peak_memory(
        FusedModel(model, static_shapes(model, {}), precision or GraphTypes(Precision.FP16)), find_gpu("L4")
    )


def test_a_chain_holds_the_input_and_two_tensors() -> None:
    nodes = "a = Conv(x, w) b = Conv(a, w) c = Conv(b, w) y = Conv(c, w)"
    found = memory(f"{IMAGE} {WEIGHTS} {{ {nodes} }}")
    assert (found.activation_bytes, found.peak_node) == (3 * TENSOR, "b")


def test_the_peak_is_where_the_largest_tensors_meet() -> None:
    found = memory(f"{IMAGE} {WEIGHTS} {{ a = Conv(x, w) b = Conv(a, u) y = Conv(b, v) }}")
    assert (found.activation_bytes, found.peak_node) == ((1 + 1 + 2) * TENSOR, "b")


def test_a_residual_stays_until_it_is_read() -> None:
    nodes = "a = Conv(x, w) b = Conv(a, w) c = Conv(b, w) d = Add(c, a) y = Conv(d, w)"
    found = memory(f"{IMAGE} {WEIGHTS} {{ {nodes} }}")
    assert (found.activation_bytes, found.peak_node) == (4 * TENSOR, "c")


def test_what_stays_inside_a_kernel_and_views_take_no_memory() -> None:
    nodes = "a = Conv(x, w) b = Relu(a) c = Sigmoid(b) d = Reshape(c, s) y = Relu(d)"
    found = memory(f"{IMAGE} <float[8, 8, 1, 1] w, int64[2] s = {{8, 16}}> {{ {nodes} }}")
    assert found.activation_bytes == 2 * TENSOR


def test_the_inputs_of_a_concat_lie_in_its_output() -> None:
    nodes = "a = Conv(x, w) b = Conv(x, w) k = Concat <axis = 1> (a, b) y = Conv(k, v)"
    assert memory(f"{IMAGE} {WEIGHTS} {{ {nodes} }}").activation_bytes == (1 + 2 + 1) * TENSOR


def test_each_weight_counts_once_at_its_precision() -> None:
    text = f"{IMAGE} <float[8, 8, 1, 1] w> {{ a = Conv(x, w) y = Conv(a, w) }}"
    assert memory(text).weight_bytes == 64 * 2
    assert memory(text, GraphTypes(Precision.FP32)).weight_bytes == 64 * 4
    assert memory(text, GraphTypes(Precision.FP16, frozenset({"a", "y"}))).weight_bytes == 64


def test_a_model_larger_than_the_gpu_does_not_fit_and_its_weights_are_not_read() -> None:
    """26 GB of weights in FP16, in a file that is not there."""
    assert find_gpu("L4").memory_gb * 1e9 - RESERVED_BYTES < 26e9
    model = parsed("g (float[1, 8] x) => (y) <float[8, 8] w> { y = MatMul(x, w) }")
    columns = 1_625_000_000
    shape = ir.Shape((8, columns))
    weight = ir.ExternalTensor("absent", 0, 32 * columns, ir.DataType.FLOAT, shape=shape, name="w", base_dir="absent")
    model.graph.initializers["w"].const_value = weight
    shapes = {"x": (1, 8), "w": (8, columns), "y": (1, columns)}
    fused = FusedModel(model, shapes, GraphTypes(Precision.FP16))
    (layer,) = fused.layers()
    assert layer.work is not None and layer.work.weight_bytes == 2 * 8 * columns
    found = peak_memory(fused, find_gpu("L4"))
    assert found.weight_bytes == 2 * 8 * columns
    assert not found.fits
    assert peak_memory(fused, find_gpu("H100")).fits


def test_a_branch_needs_its_own_tensors_on_top_of_those_around_it() -> None:
    text = """g (float[8, 16] x, bool c) => (float[8, 16] y) <float[16, 16] w> {
        r = MatMul(x, w)
        i = If (c) <then_branch = t () => (float[8, 16] a) { p = MatMul(r, w) q = MatMul(p, w) a = MatMul(q, w) },
                    else_branch = e () => (float[8, 16] b) { b = MatMul(r, w) }>
        y = MatMul(i, w)
    }"""
    found = memory(text)
    tensor = 8 * 16 * 2
    assert found.peak_node in ("q", "a")
    # x, r, the result of the branch, and two tensors within it; the condition takes one byte.
    assert found.activation_bytes == 5 * tensor + 1


def test_a_graph_of_views_has_a_peak_of_its_input() -> None:
    assert memory("g (float[3, 5] x) => (y) { y = Identity(x) }").activation_bytes == 2 * 15
