"""The work of a layer from the inspector's entry alone, or none where it does not tell."""

from __future__ import annotations

from typing import Any

import pytest
from trtexec_files import (
    ATTENTION_10,
    CONVOLUTION_8,
    CONVOLUTION_10,
    FOREIGN,
    GEMM_10,
    GEMM_11,
    ODD,
    places,
    split_tensor,
    tensor,
    with_value,
)

from trtopt.engine.layers import read_layer
from trtopt.errors import EngineBuildError
from trtopt.profiling.engine_layers import layer_work
from trtopt.roofline.work import Gemm, Window, Work

LINEAR = "Row major linear FP16 format"
FP32 = "Row major linear FP32"


def work_of(entry: dict[str, Any]) -> Work:
    found = layer_work(read_layer(entry), entry)
    assert found is not None
    return found


def none_of(entry: dict[str, Any]) -> bool:
    return layer_work(read_layer(entry), entry) is None


def moving(kind: str, *shapes: tuple[int, ...], form: str = LINEAR, **more: Any) -> dict[str, Any]:
    """A layer of some type that reads all shapes but the last, which it writes."""
    *reads, write = shapes
    inputs = [tensor(f"x{index}", *shape, form=form) for index, shape in enumerate(reads)]
    return {"Name": "n", "LayerType": kind, "Inputs": inputs, "Outputs": [tensor("y", *write, form=form)], **more}


def product(*shapes: tuple[int, ...], kind: str = "gemm") -> dict[str, Any]:
    return moving(kind, *shapes, form="Half")


def test_a_convolution_has_the_sizes_its_fields_give() -> None:
    work = work_of(CONVOLUTION_10)
    assert work.kind == "conv"
    assert (work.gemm, work.window) == (Gemm(112 * 112, 64, 147), Window((7, 7), (2, 2), (1, 1)))
    assert work.flop == 2 * 112 * 112 * 64 * 147
    assert (work.dtype, work.accumulate_fp16) == ("fp16", True)
    assert work.read_bytes == 4 * 224 * 224 * 2, "three channels lie in memory as four"
    assert (work.weight_bytes, work.write_bytes) == (2 * (9408 + 64), 64 * 112 * 112 * 2)


def test_a_residual_is_read_too() -> None:
    data, residual = tensor("x", 1, 64, 56, 56, form=LINEAR), tensor("r", 1, 64, 56, 56, form=LINEAR)
    entry = {**CONVOLUTION_10, "Inputs": [data], "Kernel": [3, 3], "PrePadding": [1, 1], "PostPadding": [1, 1]}
    both = {**entry, "Inputs": [data, residual]}
    assert work_of(both).read_bytes == 2 * work_of(entry).read_bytes
    assert work_of(both).gemm == work_of(entry).gemm


def test_groups_divide_the_product_and_one_channel_per_group_is_depthwise() -> None:
    data = tensor("x", 2, 64, 28, 28, form=LINEAR)
    fields = {**CONVOLUTION_10, "Inputs": [data], "Kernel": [3, 3], "Stride": [1, 1], "PrePadding": [1, 1]}
    fields = {**fields, "PostPadding": [1, 1], "OutMaps": 64}
    assert work_of({**fields, "Groups": 64}).kind == "depthwise"
    work = work_of({**fields, "Groups": 4})
    assert (work.kind, work.gemm) == ("conv", Gemm(2 * 28 * 28, 16, 16 * 9, 4))
    assert none_of({**fields, "Groups": 3})


def test_a_convolution_in_three_dimensions() -> None:
    three = {key: [3, 3, 3] for key in ("Kernel",)} | {key: [1, 1, 1] for key in ("Stride", "Dilation", "PrePadding")}
    entry = {**CONVOLUTION_10, **three, "PostPadding": [1, 1, 1], "Inputs": [tensor("x", 1, 8, 4, 6, 6, form=LINEAR)]}
    assert work_of(entry).gemm == Gemm(4 * 6 * 6, 64, 8 * 27)


@pytest.mark.parametrize(("kind", "prefix"), [("ConvActPool", "Conv"), ("CaskConvActPool", "")])
def test_a_convolution_fused_with_a_pooling_computes_all_its_pixels(kind: str, prefix: str) -> None:
    """TensorRT 8 puts "Conv" before the fields, as the published INT8 engines do; without it, they are read as well."""
    own = ("Kernel", "PrePadding", "PostPadding", "Stride", "Dilation", "OutMaps", "Groups", "Weights", "Bias")
    fields = {f"{prefix}{key}": CONVOLUTION_10[key] for key in own}
    pooled = [tensor("z", 1, 64, 56, 56, form=LINEAR)]
    entry = moving(kind, (1, 3, 224, 224), (1,), form=LINEAR) | fields | {"Outputs": pooled, "WindowSize": [3, 3]}
    work = work_of(entry)
    assert work.gemm == Gemm(112 * 112, 64, 147)
    assert work.write_bytes == 64 * 56 * 56 * 2


@pytest.mark.parametrize(
    "told", [{"LayerType": "CaskDeconvolutionV2", "ParameterType": "Convolution"}, {"ParameterType": "Deconvolution"}]
)
def test_a_transposed_convolution_multiplies_each_input_pixel(told: dict[str, str]) -> None:
    """TensorRT calls it a convolution in ParameterType (trt-engine-explorer, trex/parser.py, convert_deconv)."""
    fields = {"Kernel": [2, 2], "Stride": [2, 2], "PrePadding": [0, 0], "PostPadding": [0, 0], "OutMaps": 16}
    data, out = tensor("x", 2, 64, 8, 8, form=LINEAR), tensor("y", 2, 16, 16, 16, form=LINEAR)
    work = work_of({**CONVOLUTION_10, **fields, **told, "Inputs": [data], "Outputs": [out]})
    assert work.gemm == Gemm(2 * 8 * 8, 16 * 4, 64)
    assert work.window == Window((2, 2), (2, 2), (1, 1), transposed=True)


@pytest.mark.parametrize(
    ("kind", "weight", "out", "gemm", "window"),
    [
        ("correlation", (32, 64, 3, 3), (2, 32, 8, 8), Gemm(128, 32, 576), Window((3, 3), (1, 1), (1, 1))),
        ("correlation", (32, 64, 3, 3), (2, 32, 4, 4), Gemm(32, 32, 576), Window((3, 3), (2, 2), (1, 1))),
        ("correlation", (32, 64, 1, 1), (2, 32, 4, 4), Gemm(32, 32, 64), Window((1, 1), (2, 2), (1, 1))),
        ("correlation", (32, 64, 3, 3), (2, 32, 6, 6), Gemm(72, 32, 576), Window((3, 3), (1, 1), (1, 1))),
        ("correlation", (32, 64, 8, 8), (2, 32, 1, 1), Gemm(2, 32, 4096), Window((8, 8), (1, 1), (1, 1))),
        ("correlation", (64, 1, 3, 3), (2, 64, 8, 8), Gemm(128, 1, 9, 64), Window((3, 3), (1, 1), (1, 1), 64)),
        ("deconv", (64, 16, 2, 2), (2, 16, 16, 16), Gemm(128, 64, 64), Window((2, 2), (2, 2), (1, 1), 1, True)),
    ],
)
@pytest.mark.parametrize("place", ["Constants", "Inputs"])
def test_convolutions_of_myelin_are_read_from_their_shapes(
    kind: str, weight: tuple[int, ...], out: tuple[int, ...], gemm: Gemm, window: Window, place: str
) -> None:
    """Weights are [K, C / groups, R, S], transposed [C, K / groups, R, S], as TensorRT for RTX 1.7.1 lists them."""
    bias = split_tensor("b", 1, out[1], 1, 1)
    entry = {
        "Name": "c_myl0_1",
        "LayerType": kind,
        "Inputs": [split_tensor("x", 2, 64, 8, 8)],
        "Outputs": [split_tensor("y", *out)],
        "TacticName": "__myelin_CASK_STUB",
    }
    entry[place] = [*entry.get(place, []), split_tensor("w", *weight), bias]
    work = work_of(entry)
    assert (work.gemm, work.window) == (gemm, window)
    assert work.kind == ("depthwise" if window.group == 64 else "conv")


@pytest.mark.parametrize(
    ("shapes", "gemm"),
    [
        (((8, 64), (64, 32), (8, 32)), Gemm(8, 32, 64)),
        (((8, 64), (32, 64), (8, 32)), Gemm(8, 32, 64)),
        (((64, 8), (64, 32), (8, 32)), Gemm(8, 32, 64)),
        (((1, 64), (1, 32), (64, 32), (1, 32)), Gemm(1, 32, 64)),
        (((2, 8, 64), (64, 32), (2, 8, 32)), Gemm(16, 32, 64)),
        (((2, 8, 64), (2, 64, 32), (2, 8, 32)), Gemm(8, 32, 64, 2)),
        (((2, 4, 8, 64), (2, 4, 32, 64), (2, 4, 8, 32)), Gemm(8, 32, 64, 8)),
        (((8, 64), (3, 64, 32), (3, 8, 32)), Gemm(8, 32, 64, 3)),
    ],
)
@pytest.mark.parametrize("kind", ["gemm", "MatrixMultiply", "CaskGemmMatrixMultiply"])
def test_a_product_is_read_from_its_shapes(shapes: tuple[tuple[int, ...], ...], gemm: Gemm, kind: str) -> None:
    work = work_of(product(*shapes, kind=kind))
    assert (work.kind, work.gemm, work.flop) == ("gemm", gemm, gemm.flop)
    assert work.weight_bytes == 0, "the weight is listed among the inputs"


def test_a_weight_that_is_not_listed_is_read_once() -> None:
    """Myelin's product of one input with three weights lists neither of them."""
    work = work_of(GEMM_10)
    assert work.gemm == Gemm(40, 256, 256, 3)
    assert (work.read_bytes, work.weight_bytes, work.write_bytes) == (40 * 256 * 2, 3 * 256 * 256 * 2, 3 * 40 * 256 * 2)
    assert not work.accumulate_fp16
    assert work_of(GEMM_11).weight_bytes == 64 * 32 * 2 + 4


@pytest.mark.parametrize(
    "shapes",
    [
        ((8,), (8, 32)),
        ((8, 64), (64, 32), ()),
        ((7, 64), (64, 32), (8, 32)),
        ((0, 64), (0, 32)),
        ((8, 64), (1, 64, 32), (3, 8, 32)),
        ((32, 512, 1, 1), (32, 1000, 1, 1)),
    ],
)
def test_a_product_whose_shapes_do_not_fit_has_no_work(shapes: tuple[tuple[int, ...], ...]) -> None:
    assert none_of(product(*shapes))


def test_fused_attention_is_two_products() -> None:
    work = work_of(ATTENTION_10)
    assert (work.kind, work.dtype) == ("attention", "fp16")
    assert work.flop == 2 * 4 * 40 * 40 * (64 + 64)
    assert work.gemm in (Gemm(40, 40, 64, 4), Gemm(40, 64, 40, 4))
    assert work.read_bytes == (3 * 4 * 40 * 64 + 40 * 40) * 2
    assert none_of({**ATTENTION_10, "Inputs": ATTENTION_10["Inputs"][:1]})


@pytest.mark.parametrize(
    "kind",
    "kgen PointWise PointWiseV2 CudaPooling CaskPooling TiledPooling Reduce CudaSoftMax Softmax TopK Scale Shuffle"
    " ElementWise Concatenation Resize Unary Activation Padding Normalization Cast".split(),
)
def test_layers_that_move_bytes_read_and_write_all_their_tensors(kind: str) -> None:
    work = work_of(moving(kind, (2, 64, 8, 8), (2, 64, 8, 8), (2, 64, 4, 4)))
    assert work.kind == ("layout" if kind == "Shuffle" else "memory")
    assert (work.read_bytes, work.weight_bytes, work.write_bytes) == (2 * 2 * 64 * 64 * 2, 0, 2 * 64 * 16 * 2)
    assert work.gemm is None


def test_a_gather_reads_what_it_writes() -> None:
    assert work_of(moving("Gather", (30000, 256), (1, 8, 256))).read_bytes == 8 * 256 * 2


def test_a_copy_aligns_on_the_channels_of_both_its_formats() -> None:
    work = work_of(moving("Reformat", (1, 24, 8, 8), (1, 24, 8, 8), form=FP32))
    assert (work.kind, work.alignment_bytes) == ("layout", 32)
    assert work_of(moving("Reformat", (1000,), (1000,), form=FP32)).kind == "layout"


@pytest.mark.parametrize(
    ("form", "tactic", "dtype", "half_sums"),
    [
        (FP32, "sm80_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc", "tf32", False),
        (FP32, "cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4", "tf32", False),
        (FP32, "ampere_scudnn_128x64_relu_xregs_large_nn_v1", "fp32", False),
        (LINEAR, "ampere_h16816cudnn_128x128_ldg8_relu_exp_stages_64x3_large_nhwc_tn_v1", "fp16", True),
        (
            LINEAR,
            "trt_turing_cutlass_image_network_first_layer_hmma_fprop_f16f16f32_nhwc_nhwc_k64r7s7c4",
            "fp16",
            False,
        ),
        ("Row major linear BF16 format", "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32", "bf16", False),
        ("Row major linear FP8 format", "sm90_xmma_fprop_implicit_gemm_e4m3e4m3_e4m3f32_f32", "fp8", False),
        ("Row major Int8 format", "", "int8", False),
    ],
)
def test_the_types_come_from_the_operand_and_the_tactic(form: str, tactic: str, dtype: str, half_sums: bool) -> None:
    data = tensor("x", 1, 64, 56, 56, form=form)
    work = work_of({**CONVOLUTION_10, "Inputs": [data], "TacticName": tactic})
    assert (work.dtype, work.accumulate_fp16) == (dtype, half_sums)


@pytest.mark.parametrize(
    "entry",
    [
        FOREIGN,
        moving("PluginV2DynamicExt", (8, 64), (8, 64)),
        moving("runtime_fusion", (8, 64), (8, 64)),
        moving("RNNv2", (8, 64), (8, 64)),
        moving("NoOp", (8, 64), (8, 64)),
        moving("shape_call", (8, 64), (8, 64)),
        moving("kgen", (-1, 64), (-1, 64)),
        moving("kgen", (8, 64), (8, 64), form="N/A due to dynamic shapes"),
        moving("kgen", (2**39, 2**39), (8, 64)),
        {**moving("kgen", (8, 64), (8, 64)), "Inputs": []},
        {**moving("kgen", (8, 64), (8, 64)), "Outputs": []},
        moving("correlation", (2, 64, 8, 8), (2, 64, 8, 8)),
        {**CONVOLUTION_10, "Kernel": [300, 300]},
        {**CONVOLUTION_10, "Kernel": [7]},
        {**CONVOLUTION_10, "Stride": [0, 0]},
        moving("CaskPooling", (1, 8, 8, 8), (1, 8, 4, 4), WindowSize="2x2"),
    ],
)
def test_what_is_not_told_is_not_invented(entry: dict[str, Any]) -> None:
    assert none_of(entry)


def test_a_bare_name_has_no_work() -> None:
    assert layer_work(read_layer("conv1 + relu1"), "conv1 + relu1") is None


@pytest.mark.parametrize("entry", [CONVOLUTION_8, CONVOLUTION_10], ids=["8", "10"])
@pytest.mark.parametrize("key", ["Kernel", "Stride", "Dilation", "OutMaps", "Groups", "PrePadding", "PostPadding"])
def test_a_convolution_that_lacks_a_field_has_no_work(entry: dict[str, Any], key: str) -> None:
    assert none_of({name: value for name, value in entry.items() if name != key})


@pytest.mark.parametrize(
    "entry",
    [CONVOLUTION_8, CONVOLUTION_10, GEMM_10, GEMM_11, ATTENTION_10, moving("CaskPooling", (1, 8, 8, 8), (1, 8, 4, 4))],
    ids=lambda entry: entry["Name"][:12],
)
def test_a_layer_with_any_value_changed_is_read_or_refused(entry: dict[str, Any]) -> None:
    read = 0
    for path in places(entry):
        for value in (..., *ODD):
            changed = with_value(entry, path, value)
            try:
                info = read_layer(changed)
            except EngineBuildError:
                continue
            work = layer_work(info, changed)
            read += work is not None
            assert work is None or (work.flop >= 0 and work.bytes >= 0 and work.moved_bytes >= 0)
    assert read, "most changes leave the work as it is"
