"""The builder's list of layers: reading it, and what it adds up to."""

from __future__ import annotations

import pytest
from drawn_cases import given
from hypothesis import strategies as st

from trtopt.engine.layers import (
    activation_bytes,
    kernel_count,
    layers_of_profile,
    parse_layers_log,
    parse_metadata,
    resolve_nodes,
    tensor_bytes,
    weight_bytes,
)
from trtopt.errors import EngineBuildError
from trtopt.report.schema.layers import LayerInfo, TensorInfo

LINEAR = "(Linear) Row major linear format"


def tensor_text(tensor: TensorInfo) -> str:
    dims = ",".join(str(dim) for dim in tensor.shape)
    return (
        f"{{ Name: {tensor.name}, Dimensions: [{dims}], Strides: [{dims}], StrideOrder: [{dims}], "
        f"Datatype: {tensor.dtype}, Format: {tensor.format} }}"
    )


def list_text(tensors: tuple[TensorInfo, ...]) -> str:
    return "[" + ",".join(f" {tensor_text(tensor)}" for tensor in tensors) + "]"


def line(layer: LayerInfo, extra: str = "", separator: str = "") -> str:
    metadata = separator.join(f"[ONNX Layer: {name}]" for name in layer.onnx_nodes)
    return (
        f"Name: {layer.name}, LayerType: {layer.type}, Inputs: {list_text(layer.inputs)}, "
        f"Constants: {list_text(layer.constants)}, Outputs: {list_text(layer.outputs)}, "
        f"TacticName: {layer.tactic}, StreamId: 0, {extra}Metadata: {metadata}"
    )


def log(*lines: str) -> str:
    return "Layers:\n" + "\n".join(lines) + "\n\nI/O Tensors:\n Name: x\n\nEngine Metadata:\n Multi-Device: Disabled"


def tensor(name: str, *shape: int, dtype: str = "Half") -> TensorInfo:
    return TensorInfo(name, shape, dtype, LINEAR)


CONV = LayerInfo(
    "conv_myl0_1",
    "correlation",
    ("conv", "relu"),
    (tensor("a", 8, 3, 4, 4),),
    (tensor("b", 8, 16, 4, 4),),
    (tensor("w", 16, 3, 3, 3), tensor("beta", 1, dtype="Float")),
    "__myelin_CASK_STUB",
    kind="conv",
)


def test_a_layer_is_read_whole() -> None:
    assert parse_layers_log(log(line(CONV))) == (CONV,)


@pytest.mark.parametrize("dtype", ["Float", "Half", "BFloat16", "FP8", "FP4E2M1", "Int4", "Int64", "Bool", "UInt8"])
def test_every_dtype_the_compiler_writes_is_known(dtype: str) -> None:
    (layer,) = parse_layers_log(log(line(CONV).replace("Datatype: Half", f"Datatype: {dtype}")))
    assert layer.inputs[0].dtype == dtype
    assert tensor_bytes(layer.inputs[0]) > 0


@pytest.mark.parametrize("separator", ["", "\x1e", "\x1f"])
def test_claims_are_separated_with_or_without_control_characters(separator: str) -> None:
    (layer,) = parse_layers_log(log(line(CONV, separator=separator)))
    assert layer.onnx_nodes == ("conv", "relu")


def test_what_the_compiler_adds_to_a_claim_is_not_part_of_the_name() -> None:
    assert parse_metadata("[ONNX Layer: a]\x1f[ONNX Layer: b]__gemm_from_conv1x1") == ("a", "b")
    assert parse_metadata("[ONNX Layer: a]__gemm_from_conv1x1\x1f[ONNX Layer: b]") == ("a", "b")
    assert parse_metadata("") == ()


@pytest.mark.parametrize("kind", ["signal", "wait", "memset", "add", "copy", "shape_call", "cjmp", "jmp"])
def test_bookkeeping_layers_are_no_kernels_and_may_lack_fields(kind: str) -> None:
    text = f"Name: s_myl0_0, LayerType: {kind}, Inputs: [], Outputs: [], StreamId: 1, Metadata: "
    (layer,) = parse_layers_log(log(text))
    assert (layer.is_kernel, layer.kind, layer.tactic) == (False, "none", "")


@pytest.mark.parametrize("kind", ["reshape", "cast"])
def test_a_dimension_moved_to_the_host_is_no_kernel_and_a_tensor_is(kind: str) -> None:
    dim, tokens = tensor("hvar^8i64_myl1", 1, dtype="Int64"), tensor("ids", 8, 128, dtype="Int64")
    (moved,) = parse_layers_log(log(line(LayerInfo("m_myl1_4", kind, (), (), (dim,)))))
    (kernel,) = parse_layers_log(log(line(LayerInfo("k_myl1_5", kind, (), (tokens,), (tokens,)))))
    assert (moved.is_kernel, moved.kind) == (False, "none") and kernel.is_kernel


def test_jumps_and_shape_layers_with_fields_of_their_own_are_read() -> None:
    jump = line(
        LayerInfo("c_myl0_2", "cjmp", ("If_0",), (tensor("c", 1, dtype="Bool"),), ()),
        extra="JumpTargetThen: a_myl0_3, JumpTargetElse: <EXIT>, ",
    )
    shape = (
        "Name: [ShapeHostToDeviceCopy 0] [profile 1], LayerType: ShapeHostToDevice, Inputs: [], Outputs: [ { Name: "
        "/m/Gather_3_output_0 [profile 1], Location: Device, Dimensions: [1], Datatype: Int64, Format: Format not "
        "available due to dynamic shapes }], ParameterType: ShapeH2D, shapeValues0: [-5], TacticValue: "
        "0x0000000000000000, StreamId: 0, Metadata: "
    )
    first, second = parse_layers_log(log(jump, shape))
    assert first.onnx_nodes == ("If_0",)
    assert second.outputs[0].name == "/m/Gather_3_output_0 [profile 1]"
    assert not second.is_kernel


PIECES = [*"aB0_/.:,[]{} é漢\n", "}, {", "], Outputs: [", "Inputs: [", "[profile", "]__", "Metadata"]
ODD_NAMES = st.lists(st.sampled_from(PIECES), min_size=1, max_size=12).map(lambda pieces: "".join(pieces).strip())


@given(names=st.lists(ODD_NAMES.filter(bool), min_size=5, max_size=5))
def test_names_may_hold_punctuation_brackets_and_line_breaks(names: list[str]) -> None:
    layer = LayerInfo(
        f"{names[0]}_myl0_0",
        "kgen",
        (names[1],),
        (tensor(names[2], 2, -1),),
        (tensor(names[3], 4),),
        (tensor(names[4], 1),),
        "__myl_x",
        kind="pointwise",
    )
    assert parse_layers_log(log(line(layer), line(CONV))) == (layer, CONV)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nothing of the kind",
        log("what is this"),
        log(line(CONV).replace("LayerType: correlation, ", "")),
        log(line(CONV).replace("Datatype: Half", "Datatype: Quarter")),
        log(line(CONV).replace("Outputs: [", "Results: [")),
        log(line(CONV).replace("StreamId: 0, ", "")),
        log(line(CONV).replace("[ONNX Layer: conv]", "(conv)")),
        log(line(CONV)[:200]),
    ],
)
def test_a_line_that_is_not_understood_is_an_error(text: str) -> None:
    with pytest.raises(EngineBuildError):
        parse_layers_log(text)


def test_an_engine_without_layers_has_none() -> None:
    assert parse_layers_log("Layers:\n\n\nI/O Tensors:\n") == ()


def test_nodes_that_no_layer_claims_are_listed_in_graph_order() -> None:
    resolved = resolve_nodes([CONV], ["first", "conv", "relu", "last"])
    assert resolved.unclaimed == ("first", "last")
    assert resolved.layers == (CONV,)


def test_nodes_of_subgraphs_lose_the_path_tensorrt_adds() -> None:
    layer = LayerInfo("l", "kgen", ("mm | t (then_branch) | If_0 (If)", "a | b"), (), ())
    (resolved,) = resolve_nodes([layer], ["mm", "a | b", "If_0"]).layers
    assert resolved.onnx_nodes == ("mm", "a | b")


def test_a_claim_the_graph_does_not_have_is_an_error() -> None:
    with pytest.raises(EngineBuildError, match="relu"):
        resolve_nodes([CONV], ["conv"])


def test_bytes_of_packed_and_scalar_tensors() -> None:
    assert tensor_bytes(tensor("a", 3, dtype="Int4")) == 2
    assert tensor_bytes(tensor("a", dtype="Int64")) == 8
    assert tensor_bytes(tensor("a", 0, 5)) == 0
    assert tensor_bytes(tensor("a", 2, 3, dtype="FP8")) == 6


def test_bytes_count_each_buffer_of_a_kernel_once() -> None:
    producer = LayerInfo("p_myl0_0", "gemm", (), (tensor("x", 4, 8),), (tensor("qkv", 4, 24),))
    views = (tensor("qkv", 4, 8), tensor("qkv", 4, 8), tensor("qkv", 4, 8))
    whole_thrice = (tensor("qkv", 4, 24),) * 3
    reads_views = LayerInfo("v_myl0_1", "kgen", (), views, (tensor("o", 4, 8),))
    reads_whole = LayerInfo("w_myl0_1", "kgen", (), whole_thrice, (tensor("o", 4, 8),))
    expected = 2 * (4 * 8 + 4 * 24 + 4 * 24 + 4 * 8)
    assert activation_bytes([producer, reads_views]) == expected
    assert activation_bytes([producer, reads_whole]) == expected
    part = LayerInfo("n_myl0_1", "kgen", (), views[:1], (tensor("o", 4, 8),))
    assert activation_bytes([producer, part]) == 2 * (4 * 8 + 4 * 24 + 4 * 8 + 4 * 8)


def test_only_kernels_count_and_weights_are_apart() -> None:
    copy = LayerInfo("c_myl0_0", "copy", (), (tensor("a", 100),), (tensor("b", 100),), is_kernel=False, kind="none")
    layers = [copy, CONV]
    assert kernel_count(layers) == 1
    assert activation_bytes(layers) == 2 * (8 * 3 * 16 + 8 * 16 * 16)
    assert weight_bytes(layers) == 2 * 16 * 27 + 4


def test_kernels_of_further_profiles_are_told_apart_by_their_lowering() -> None:
    first = LayerInfo("a_myl0_0", "kgen", (), (tensor("x", 4),), (tensor("y_myl0", 4),))
    second = LayerInfo("a [profile 1]_myl2_0", "kgen", (), (tensor("x [profile 1]", 4),), (tensor("z_myl2", 4),))
    third = LayerInfo("b_myl2_1", "kgen", (), (tensor("z_myl2", 4),), (tensor("t_myl2", 4),))
    assert layers_of_profile([first, second, third]) == (first,)
    assert layers_of_profile([first, second, third], 1) == (second, third)
    assert kernel_count([first, second, third]) == 1


def test_the_list_of_tensorrt_for_rtx_1_4_is_read_too() -> None:
    """Lines of that release: no strides, type and format in one word, another heading behind the list."""
    text = (
        "Layers:\nName: __mye1554_0_myl0_0, LayerType: shape_call, Inputs: [], Outputs: [], TacticName: , StreamId: 0, "
        "Metadata: \nName: __myl_AddCast_myl0_25, LayerType: kgen, Inputs: [ { Name: __myln_k_arg__bb1_28_myl0, "
        "Dimensions: [-1,10], Format/Datatype: Half }], Outputs: [ { Name: logits, Dimensions: [-1,10], "
        "Format/Datatype: Float }], TacticName: __myl_AddCast_0x7dd3, StreamId: 0, "
        "Metadata: [ONNX Layer: /linear/Gemm]\x1f[ONNX Layer: trtopt/cast/logits]\n\nBindings:\ninput\nlogits"
    )
    found = parse_layers_log(text)
    assert [layer.is_kernel for layer in found] == [False, True]
    assert found[1].onnx_nodes == ("/linear/Gemm", "trtopt/cast/logits")
    assert found[1].outputs == (TensorInfo("logits", (-1, 10), "Float", "Float"),)
    with pytest.raises(EngineBuildError):
        parse_layers_log(text.replace("Datatype: Half", "Datatype: Odd"))
