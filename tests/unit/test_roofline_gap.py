"""Where the engine takes longer than the graph asks for, and what for."""

from __future__ import annotations

from trtopt.hardware.spec import find_gpu
from trtopt.roofline.gap import RULE, compare_levels, regions
from trtopt.roofline.layer import layer_time
from trtopt.roofline.work import Gemm, Layer, Work

GPU = find_gpu("L4")
MB = 10**6


def memory(name: str, op: str, nodes: str, megabytes: int, flop: int = 1000) -> Layer:
    return Layer(name, op, tuple(nodes.split()), Work("memory", flop, megabytes * MB, 0, megabytes * MB, "fp16"))


def product(name: str, nodes: str, megabytes: int = 4) -> Layer:
    gemm = Gemm(1024, 1024, 1024)
    work = Work("gemm", gemm.flop, megabytes * MB, 0, megabytes * MB, "fp16", gemm=gemm)
    return Layer(name, "MatMul", tuple(nodes.split()), work)


def predicted(*layers: Layer) -> float:
    return sum(layer_time(layer.work, GPU).predicted_us for layer in layers if layer.work is not None)


def test_equal_levels_give_no_finding() -> None:
    layers = [product("a", "m b"), memory("c", "Softmax", "s", 8)]
    assert compare_levels(layers, layers, GPU) == ()


def test_an_unfused_activation_is_named_with_its_cost() -> None:
    expected = [product("mm", "mm act")]
    engine = [product("gemm_0", "mm"), memory("__myl_Gelu_1", "Gelu", "act", 8)]
    (finding,) = compare_levels(expected, engine, GPU)
    assert (finding.rule, finding.severity, finding.nodes) == (RULE, "warning", ("mm", "act"))
    assert finding.gain_us == predicted(*engine) - predicted(*expected)
    assert "1 kernel, 8.0 MB" in finding.message and "2 kernels, 24.0 MB" in finding.message
    assert "expected to be fused: __myl_Gelu_1 (Gelu)" in finding.message


def test_the_same_gap_in_every_block_is_one_finding() -> None:
    expected = [product(f"mm{i}", f"mm{i} act{i}") for i in range(12)]
    engine = [layer for i in range(12) for layer in (product(f"g{i}", f"mm{i}"), memory(f"e{i}", "Gelu", f"act{i}", 8))]
    (finding,) = compare_levels(expected, engine, GPU)
    assert finding.message.startswith("12 regions like this one")
    assert {"mm0", "act0", "mm11", "act11"} <= set(finding.nodes)


def test_the_cause_is_what_the_extra_time_goes_to() -> None:
    expected = [product("mm", "mm act")]
    causes = {
        "quantizing": memory("x", "QuantizeLinear", "act", 8),
        "casts": memory("x", "Cast", "act", 8, flop=0),
        "copying": memory("x", "kgen", "act", 8, flop=0),
        "fused": memory("x", "Relu", "act", 8),
        "slower products": product("x", "act", 8),
    }
    for words, extra in causes.items():
        (finding,) = compare_levels(expected, [product("g", "mm act"), extra], GPU)
        assert words in finding.message


def test_a_kernel_that_computes_no_node_is_a_region_of_its_own() -> None:
    layers = [product("mm", "mm")]
    (finding,) = compare_levels(layers, [*layers, memory("__myl_Tran_3", "kgen", "", 8, flop=0)], GPU)
    assert finding.nodes == ("__myl_Tran_3",)
    assert "0 kernels, 0.0 MB and 0 us expected" in finding.message


def test_small_differences_and_small_regions_are_left_out() -> None:
    expected = [product("mm", "mm"), memory("s", "Softmax", "s", 100)]
    slower = [product("mm", "mm", 4), memory("s", "Softmax", "s", 110)]
    assert compare_levels(expected, slower, GPU) == ()
    tiny = [*expected, memory("t", "kgen", "t", 0)]
    big = [memory(f"big{i}", "Softmax", f"big{i}", 100) for i in range(10)]
    assert compare_levels([*expected, *big], [*tiny, *big], GPU) == ()


def test_layers_without_a_cost_are_in_no_sum() -> None:
    unknown = Layer("plugin", "Custom", ("mm",), None)
    assert compare_levels([product("mm", "mm")], [product("mm", "mm"), unknown], GPU) == ()


def test_regions_hold_every_layer_once() -> None:
    expected = [product("a", "a b"), product("c", "c"), memory("d", "Relu", "d", 1)]
    engine = [product("x", "a"), memory("y", "Add", "b c", 1), memory("z", "Relu", "d", 1)]
    found = regions(expected, engine)
    assert [[layer.name for layer in region.engine] for region in found] == [["x", "y"], ["z"]]
    assert [[layer.name for layer in region.onnx] for region in found] == [["a", "c"], ["d"]]
