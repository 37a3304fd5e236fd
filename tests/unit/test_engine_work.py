"""The layers of an engine get the arithmetic of the ONNX graph, once, and the bytes the compiler lists."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from trtopt.engine.layers import parse_inspector_json
from trtopt.engine.work import EngineWork, layers_of_engine
from trtopt.graph import edit
from trtopt.graph.shapes import infer_shapes, static_shapes
from trtopt.hardware.spec import find_gpu
from trtopt.report.schema.layers import LayerInfo, TensorInfo
from trtopt.roofline.layer import layer_time
from trtopt.roofline.node_work import GraphTypes, work_of_node
from trtopt.roofline.work import Gemm, Layer, Work

PROFILES = Path(__file__).parents[3] / "shared" / "profiles" / "tensorrt-layers"
HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
NHWC = "(NHWC) Channel-last"


def parse(graph: str, header: str = HEADER) -> ir.Model:
    """The model: what is declared between <> without a value is a constant of zeros; each node is named after its first
    output that has a name."""
    proto = onnx.parser.parse_model(header + graph)
    for info in proto.graph.value_info:
        dims = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        proto.graph.initializer.append(numpy_helper.from_array(np.zeros(dims, dtype), info.name))
    del proto.graph.value_info[:]
    model = infer_shapes(ir.from_proto(proto))
    for node in edit.all_nodes(model.graph):
        node.name = next(str(value.name) for value in node.outputs if value.name)
    return model


def tensor(name: str, *shape: int, dtype: str = "Half", form: str = "") -> TensorInfo:
    return TensorInfo(name, shape, dtype, form)


def kernel(
    name: str,
    nodes: str,
    reads: list[TensorInfo],
    writes: list[TensorInfo],
    constants: tuple[TensorInfo, ...] = (),
    *,
    kind: str = "pointwise",
    tactic: str = "",
) -> LayerInfo:
    types = {"conv": "correlation", "gemm": "gemm", "mha": "kgen", "fused": "runtime_fusion"}
    return LayerInfo(
        name, types.get(kind, "kgen"), tuple(nodes.split()), tuple(reads), tuple(writes), constants, tactic, kind=kind
    )


def host(layer_type: str, reads: list[str], writes: list[str]) -> LayerInfo:
    """A layer that runs no kernel."""
    inputs, outputs = (tuple(tensor(name, 1, dtype="Int32") for name in names) for names in (reads, writes))
    return LayerInfo(f"{layer_type} {writes}", layer_type, (), inputs, outputs, is_kernel=False, kind="none")


def count(model: ir.Model, *layers: LayerInfo, tf32: bool = False) -> EngineWork:
    return layers_of_engine(layers, model, static_shapes(model, {}), tf32=tf32)


def graph_flop(model: ir.Model) -> int:
    shapes = static_shapes(model, {})
    works = [work_of_node(node, shapes, GraphTypes()) for node in edit.all_nodes(model.graph)]
    return sum(work.flop for work in works if work is not None)


def by_name(found: EngineWork) -> dict[str, Work]:
    return {layer.name: work_of(layer) for layer in found.layers}


def work_of(layer: Layer) -> Work:
    assert layer.work is not None, layer.name
    return layer.work


CONV = parse(
    "g (float16[8, 3, 32, 32] x) => (float16[8, 64, 16, 16] r) <float16[64, 3, 3, 3] w, float16[64] b> "
    "{ c = Conv<pads = [1, 1, 1, 1], strides = [2, 2]>(x, w, b) r = Relu(c) }"
)
CONV_KERNEL = kernel(
    "conv",
    "c r",
    [tensor("x4", 8, 4, 32, 32, form=NHWC)],
    [tensor("r", 8, 64, 16, 16, form=NHWC)],
    (tensor("w", 64, 4, 3, 3), tensor("b", 1, 64, 1, 1), tensor("alpha", 1, dtype="Float")),
    kind="conv",
)


def test_a_convolution_has_the_sizes_of_the_node_and_the_bytes_of_the_kernel() -> None:
    work = by_name(count(CONV, CONV_KERNEL))["conv"]
    assert (work.kind, work.dtype, work.gemm) == ("conv", "fp16", Gemm(m=8 * 16 * 16, n=64, k=27))
    assert work.window is not None and work.window.stride == (2, 2)
    assert (work.read_bytes, work.write_bytes) == (8 * 4 * 32 * 32 * 2, 8 * 64 * 16 * 16 * 2)
    assert work.weight_bytes == 64 * 4 * 9 * 2 + 64 * 2 + 4
    assert work.flop == graph_flop(CONV)
    assert work.alignment_bytes == 8  # the four padded input channels


def test_a_node_that_several_kernels_list_counts_once_for_the_one_that_does_its_math() -> None:
    pad = kernel("pad", "c r", [tensor("x", 8, 3, 32, 32)], [tensor("x4", 8, 4, 32, 32, form=NHWC)])
    works = by_name(count(CONV, pad, CONV_KERNEL))
    assert (works["pad"].kind, works["pad"].flop, works["conv"].flop) == ("memory", 0, graph_flop(CONV))
    assert works["pad"].bytes == 8 * 7 * 32 * 32 * 2


QKV = parse(
    "g (float16[64, 128] x) => (float16[64, 128] q, float16[64, 128] k, float16[64, 128] v) "
    "<float16[128, 128] wq, float16[128, 128] wk, float16[128, 128] wv> "
    "{ q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) }"
)


def test_merged_products_of_one_operand_are_one_wider_product() -> None:
    merged = kernel(
        "qkv", "q k v", [tensor("x", 64, 128)], [tensor("y", 64, 384)], (tensor("w", 128, 384),), kind="gemm"
    )
    work = by_name(count(QKV, merged))["qkv"]
    assert (work.gemm, work.flop) == (Gemm(m=64, n=384, k=128), 3 * 2 * 64 * 128 * 128)


def test_views_of_one_buffer_move_no_more_than_the_buffer() -> None:
    model = parse(
        "g (float16[64, 384] x) => (float16[64, 128] y) <int64[1] a = {0}, int64[1] b = {128}, int64[1] c = {256}, "
        "int64[1] ax = {1}> { p = Slice(x, a, b, ax) q = Slice(x, b, c, ax) y = Add(p, q) }"
    )
    whole = kernel("whole", "", [], [tensor("t", 64, 128)])
    twice = kernel("twice", "y p q", [tensor("t", 64, 128), tensor("t", 64, 128)], [tensor("y", 64, 128)])
    assert by_name(count(model, whole, twice))["twice"].read_bytes == 64 * 128 * 2


ATTENTION = parse(
    "g (float16[96, 197, 64] q, float16[96, 64, 197] k, float16[96, 197, 64] v) => (float16[96, 197, 64] o) "
    "{ s = MatMul(q, k) p = Softmax(s) o = MatMul(p, v) }"
)


def test_fused_attention_has_the_flop_of_both_products() -> None:
    fused = kernel(
        "_gemm_mha_v2",
        "o p s",
        [tensor("q", 96, 197, 64), tensor("k", 96, 64, 197), tensor("v", 96, 197, 64)],
        [tensor("o", 96, 197, 64)],
        kind="mha",
    )
    work = by_name(count(ATTENTION, fused))["_gemm_mha_v2"]
    assert (work.kind, work.flop) == ("attention", graph_flop(ATTENTION))
    assert work.gemm is not None and work.gemm.flop == 2 * 96 * 197 * 197 * 64
    assert work.bytes == 4 * 96 * 197 * 64 * 2  # the scores never leave the kernel


def test_a_kernel_without_nodes_moves_bytes_for_the_layer_that_reads_it() -> None:
    transpose = kernel("__myl_Tran", "", [tensor("x", 8, 3, 32, 32)], [tensor("x4", 8, 4, 32, 32, form=NHWC)])
    found = count(CONV, transpose, CONV_KERNEL)
    assert found.layers[0].onnx_nodes == ("c", "r")
    assert (work_of(found.layers[0]).flop, found.layers[0].op) == (0, "kgen")


def test_nodes_that_no_layer_lists_count_for_their_consumer() -> None:
    model = parse(
        "g (float16[8, 16] x) => (float16[8, 4] z) <float16[16, 4] w> { y = Sigmoid(x) v = Mul(x, y) z = MatMul(v, w) }"
    )
    found = count(
        model, kernel("fc", "z", [tensor("x", 8, 16)], [tensor("z", 8, 4)], (tensor("w", 16, 4),), kind="fused")
    )
    assert work_of(found.layers[0]).flop == graph_flop(model)
    assert set(found.layers[0].onnx_nodes) == {"z", "y", "v"}
    assert not found.notes


def test_nodes_of_constants_belong_to_no_layer() -> None:
    model = parse(
        "g (float16[4] x) => (float16[4] y) <float16[4] a = {1, 2, 3, 4}, float16[4] b = {1, 2, 3, 4}> "
        "{ c = Add(a, b) y = Mul(x, c) }"
    )
    found = count(model, kernel("mul", "y", [tensor("x", 4)], [tensor("y", 4)], (tensor("c", 4),)))
    (layer,) = found.layers
    assert (layer.onnx_nodes, work_of(layer).flop, found.notes) == (("y",), 4, ())


def test_a_kernel_that_lists_no_node_computes_the_output_it_writes() -> None:
    model = parse("g (float[3, 4] x) => (float[3, 4] y) { y = Elu(x) }")
    (layer,) = count(
        model, kernel("elu", "", [tensor("x", 3, 4, dtype="Float")], [tensor("y", 3, 4, dtype="Float")])
    ).layers
    assert (layer.op, work_of(layer).flop) == ("Elu", graph_flop(model))


def test_a_node_that_belongs_nowhere_is_named() -> None:
    model = parse("g (float[8] x, float[8] z) => (float[8] y, float[8] u) { y = Relu(x) u = Exp(z) }")
    relu = kernel("relu", "y", [tensor("x", 8, dtype="Float")], [tensor("y", 8, dtype="Float")])
    assert count(model, relu).notes == ("no layer of the engine computes u",)


def test_gathered_rows_are_read_not_the_table() -> None:
    model = parse(
        "g (int64[2, 5] i) => (float16[2, 5, 64] y) <float16[1000, 64] t> { y = Gather(t, i) }",
    )
    gather = kernel("g", "y", [tensor("i", 2, 5, dtype="Int64")], [tensor("y", 2, 5, 64)], (tensor("t", 1000, 64),))
    work = by_name(count(model, gather))["g"]
    assert (work.read_bytes, work.weight_bytes, work.write_bytes) == (2 * 5 * 8, 10 * 64 * 2, 10 * 64 * 2)


def test_an_operator_without_a_cost_leaves_its_layer_without_one() -> None:
    model = parse(
        "g (float[3] x) => (float[3] y) { a = my.Custom(x) y = Relu(a) }",
        '<ir_version: 10, opset_import: ["" : 21, "my" : 1]>',
    )
    layers = (
        kernel("plugin", "a", [tensor("x", 3, dtype="Float")], [tensor("a", 3, dtype="Float")]),
        kernel("relu", "y", [tensor("a", 3, dtype="Float")], [tensor("y", 3, dtype="Float")]),
    )
    found = layers_of_engine(layers, model, dict.fromkeys("xay", (3,)))
    assert [layer.work is None for layer in found.layers] == [True, False]


@pytest.mark.parametrize(
    ("tf32", "tactic", "dtype"), [(False, "", "fp32"), (True, "", "tf32"), (False, "a_tf32f32_f32", "tf32")]
)
def test_fp32_products_are_tf32_where_allowed_or_chosen(tf32: bool, tactic: str, dtype: str) -> None:
    single = kernel(
        "fc",
        "q k v",
        [tensor("x", 64, 128, dtype="Float")],
        [tensor("y", 64, 384, dtype="Float")],
        (tensor("w", 128, 384, dtype="Float"),),
        kind="gemm",
        tactic=tactic,
    )
    assert by_name(count(QKV, single, tf32=tf32))["fc"].dtype == dtype


@pytest.mark.parametrize(
    ("tactic", "half"),
    [
        ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize64x64x64", True),
        ("sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize64x64x64", False),
        ("ampere_h16816cudnn_128x64_sliced1x2_ldg8_relu_exp_stages_64x3_small_nhwc_tn_v1", True),
        ("ampere_fp16_s16816cudnn_fp16_128x64_ldg8_relu_f2f_stages_64x3_large_nhwc_tn_v1", False),
        ("__myelin_CASK_STUB", True),  # hidden: as TensorRT does in convolutions
    ],
)
def test_the_tactic_says_whether_fp16_is_summed_in_fp16(tactic: str, half: bool) -> None:
    layer = kernel("conv", "c r", [tensor("x", 8, 3, 32, 32)], [tensor("r", 8, 64, 16, 16)], kind="conv", tactic=tactic)
    assert by_name(count(CONV, layer))["conv"].accumulate_fp16 is half


def test_layers_of_one_name_stay_apart() -> None:
    found = count(CONV, *[kernel("copy", "", [], [])] * 3, CONV_KERNEL)
    assert [layer.name for layer in found.layers] == ["copy", "copy #2", "copy #3", "conv"]


LOOP = (
    host("memset", [], ["__d^16i32_myl0"]),
    host("memset", [], ["__d^4i32_myl0"]),
    host("memset", [], ["phi_myl0"]),
)
LSTM = parse(
    "g (float[16, 2, 8] x) => (float[16, 1, 2, 32] y) "
    "<float[1, 128, 8] w, float[1, 128, 32] r, float[1, 256] b> { y = LSTM<hidden_size = 32>(x, w, r, b) }"
)


def lstm_layers(limit: str = "__d^16i32_myl0") -> tuple[LayerInfo, ...]:
    """As the compiler does it: 16 steps, 4 of them unrolled in a loop of 4 trips, the input product hoisted."""
    hoisted = kernel("in", "", [tensor("x", 32, 8)], [tensor("xw", 32, 128)], (tensor("w", 8, 128),), kind="gemm")
    body = []
    for step in range(4):
        body.append(
            kernel(
                f"recurrent{step}",
                "",
                [tensor(f"h{step}", 1, 2, 32)],
                [tensor(f"g{step}", 1, 2, 128)],
                (tensor("r", 1, 32, 128),),
                kind="gemm",
            )
        )
        last = "y" if step == 3 else ""
        gates = [tensor(f"g{step}", 1, 2, 128), tensor("xw", 1, 2, 128)]
        body.append(kernel(f"gates{step}", last, gates, [tensor(f"h{step + 1}", 1, 2, 32), tensor("y", 1, 2, 32)]))
    advance = host("add", ["phi_myl0", "__d^4i32_myl0"], ["phi_myl0"])
    return (hoisted, *LOOP, *body, advance, host("cjmp", ["phi_myl0", limit], []))


def test_a_recurrent_layer_is_spread_over_its_kernels_and_adds_up() -> None:
    found = count(LSTM, *lstm_layers())
    works = by_name(found)
    assert sum(work.flop for work in works.values()) == graph_flop(LSTM)
    assert (works["in"].kind, works["in"].flop, works["in"].steps) == ("gemm", 2 * 32 * 128 * 8, 1)
    assert (works["recurrent0"].kind, works["recurrent0"].steps) == ("recurrent", 4)
    assert works["recurrent0"].gemm == Gemm(m=2, n=128, k=32)
    assert works["recurrent0"].flop == 4 * 2 * 2 * 128 * 32
    assert works["recurrent0"].weight_bytes == 32 * 128 * 2  # once, although every step reads them
    assert works["recurrent0"].read_bytes == 4 * 2 * 32 * 2  # those of all its trips
    assert {layer.op for layer in found.layers} == {"LSTM"}
    assert not found.notes


def test_a_recurrent_layer_that_no_kernel_names_is_spread_over_those_before_its_reader() -> None:
    model = parse(
        "g (float[16, 2, 8] x) => (float16[16, 1, 2, 32] z) "
        "<float[1, 128, 8] w, float[1, 128, 32] r> { y = LSTM<hidden_size = 32>(x, w, r) z = Cast<to = 10>(y) }"
    )
    unnamed = [dataclasses.replace(layer, onnx_nodes=()) for layer in lstm_layers()]
    cast = kernel("cast", "z", [tensor("y", 16, 1, 2, 32, dtype="Float")], [tensor("z", 16, 1, 2, 32)])
    works = by_name(count(model, *unnamed, cast))
    assert sum(work.flop for work in works.values()) == graph_flop(model)
    assert (works["in"].kind, works["in"].gemm) == ("gemm", Gemm(m=32, n=128, k=8))
    assert (works["recurrent3"].kind, works["recurrent3"].gemm) == ("recurrent", Gemm(m=2, n=128, k=32))
    assert (works["cast"].kind, works["cast"].flop) == ("memory", 0)


def test_a_loop_of_unknown_length_counts_once_and_says_so() -> None:
    found = count(LSTM, *lstm_layers(limit="n"))
    assert by_name(found)["recurrent0"].steps == 1
    assert found.notes == ("the trip count of a loop is not a constant: its kernels count once",)


def test_layers_of_tensorrt_8_find_their_nodes_in_joined_names() -> None:
    model = parse(
        "g (float16[8, 3, 32, 32] x) => (float16[8, 64] o) <float16[64, 3, 3, 3] w, float16[64, 64] f> "
        "{ c = Conv<pads = [1, 1, 1, 1]>(x, w) r = Relu(c) a = GlobalAveragePool(r) s = Sigmoid(a) h = Mul(a, s) "
        "e = Flatten(h) o = MatMul(e, f) }"
    )
    names = [
        "Reformatting CopyNode for Input Tensor 0 to c + r",
        "c + r",
        "a",
        "PWN(PWN(s), h)",
        "{ForeignNode[e...o]}",
    ]
    types = ["Reformat", "CaskConvolution", "CudaPooling", "PointWiseV2", "Myelin"]
    shapes = [[8, 3, 32, 32], [8, 3, 32, 32], [8, 64, 32, 32], [8, 64, 1, 1], [8, 64, 1, 1], [8, 64]]
    form = "Channel major FP16 format where channel % 8 == 0"
    entries = [
        {
            "Name": name,
            "LayerType": types[i],
            "Inputs": [{"Name": f"t{i}", "Dimensions": shapes[i], "Format/Datatype": form}],
            "Outputs": [{"Name": f"t{i + 1}", "Dimensions": shapes[i + 1], "Format/Datatype": form}],
        }
        for i, name in enumerate(names)
    ]
    found = count(model, *parse_inspector_json(json.dumps({"Layers": entries})))
    assert [layer.op for layer in found.layers[1:]] == ["Conv", "GlobalAveragePool", "Mul", "MatMul"]
    assert [work_of(layer).kind for layer in found.layers] == ["memory", "conv", "memory", "memory", "gemm"]
    assert sum(work_of(layer).flop for layer in found.layers) == graph_flop(model)


@pytest.mark.parametrize(
    ("form", "channels", "alignment"),
    [
        (NHWC, 3, 2),
        (NHWC, 64, 128),
        ("Channel major FP16 format where channel % 8 == 0", 3, 16),
        ("Thirty-two wide channel vectorized row major FP16 format", 33, 128),
        ("Row major linear FP16 format", 64, 32),  # the last axis is 16 wide
        ("(Transposed) Transposed format", 64, 128),  # what TensorRT for RTX hands on between convolutions
    ],
)
def test_alignment_is_that_of_the_rows_in_memory(form: str, channels: int, alignment: int) -> None:
    out = [tensor("r", 8, 64, 16, 16, form=NHWC)]
    layer = kernel("conv", "c r", [tensor("x", 8, channels, 32, 16, form=form)], out, kind="conv")
    assert by_name(count(CONV, layer))["conv"].alignment_bytes == alignment


def resnet18(batch: int) -> ir.Model:
    """ResNet-18 with the node names of an old PyTorch export, batch normalisations folded."""
    lines: list[str] = []

    def add(op: str, inputs: str) -> str:
        lines.append(f"{op.partition('<')[0]}_{len(lines)} = {op}({inputs})")
        return lines[-1].partition(" = ")[0]

    weights: list[str] = []

    def conv(x: str, channels: tuple[int, int], kernel: int, stride: int) -> str:
        name = f"w{len(lines)}"
        weights.extend(
            (f"float[{channels[1]}, {channels[0]}, {kernel}, {kernel}] {name}", f"float[{channels[1]}] b{name}")
        )
        pads = ", ".join([str(kernel // 2)] * 4)
        return add(f"Conv<strides = [{stride}, {stride}], pads = [{pads}]>", f"{x}, {name}, b{name}")

    x = add("Relu", conv("x", (3, 64), 7, 2))
    x = add("MaxPool<kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]>", x)
    channels = 64
    for width, first in ((64, 1), (128, 2), (256, 2), (512, 2)):
        for stride in (first, 1):
            y = add("Relu", conv(x, (channels, width), 3, stride))
            y = conv(y, (width, width), 3, 1)
            x = conv(x, (channels, width), 1, stride) if stride != 1 else x
            x = add("Relu", add("Add", f"{y}, {x}"))
            channels = width
    x = add("Flatten", add("GlobalAveragePool", x))
    y = add("Gemm<transB = 1>", f"{x}, fc, bfc")
    weights += ["float[1000, 512] fc", "float[1000] bfc"]
    inputs, outputs = f"float[{batch}, 3, 224, 224] x", f"float[{batch}, 1000] {y}"
    return parse(f"g ({inputs}) => ({outputs}) <{', '.join(weights)}> {{ {' '.join(lines)} }}")


@pytest.mark.shared
@pytest.mark.skipif(not PROFILES.exists(), reason="the profiles folder is not beside the checkout")
@pytest.mark.parametrize(("folder", "dtype", "half_sums"), [("fp16", "fp16", True), ("fp32", "tf32", False)])
def test_a_published_engine_of_tensorrt_8_adds_up_to_its_graph(folder: str, dtype: str, half_sums: bool) -> None:
    text = (PROFILES / "A100-80GB-PCIe" / folder / "resnet.onnx.engine.graph.json").read_text(encoding="utf-8")
    model = resnet18(batch=32)
    found = count(model, *parse_inspector_json(text))
    works = by_name(found)
    assert sum(work.flop for work in works.values()) == graph_flop(model)
    block = works["Conv_5 + Add_6 + Relu_7"]
    assert (block.kind, block.gemm, block.dtype) == ("conv", Gemm(m=32 * 56 * 56, n=64, k=576), dtype)
    assert block.accumulate_fp16 is half_sums
    assert not found.notes


def test_streams_that_wait_and_copies_are_layers_of_their_own() -> None:
    """One each, whatever their number; a signal is the other end of a wait, and host arithmetic takes no GPU time."""
    model = parse("g (float16[4] x) => (float16[4] y) { y = Relu(x) }")
    relu = kernel("k", "y", [tensor("x", 4)], [tensor("y", 4)])
    idle = [
        host(each, [], []) for each in ("signal", "wait", "wait", "ShapeHostToDevice", "copy", "memset", "shape_call")
    ]
    found = by_name(count(model, idle[0], relu, *idle[1:]))
    assert {name: (work.kind, work.steps) for name, work in found.items() if name != "k"} == {
        "stream syncs": ("sync", 2),
        "host copies": ("copy", 2),
    }
    gpu = find_gpu("L4")
    relu_us, sync_us, copy_us = (layer_time(found[name], gpu).predicted_us for name in found)
    assert sync_us / 2 < 0.2 < relu_us < copy_us / 2
    assert list(by_name(count(model, relu))) == ["k"]
