"""Which dtype a kernel computes in, and the shares of an engine."""

from __future__ import annotations

import pytest

from trtopt.engine.achieved import achieved_precision, math_dtype
from trtopt.report.schema.build import Achieved
from trtopt.report.schema.layers import LayerInfo, TensorInfo


def tensors(*dtypes: str, rank: int = 2) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(f"t{i}", (4,) * rank, dtype) for i, dtype in enumerate(dtypes))


def layer(
    kind: str,
    inputs: tuple[str, ...],
    constants: tuple[str, ...] = (),
    outputs: tuple[str, ...] = ("Half",),
    nodes: str = "",
) -> LayerInfo:
    return LayerInfo(
        f"{kind}{nodes}",
        "kgen" if kind == "pointwise" else kind,
        tuple(nodes.split()),
        tensors(*inputs),
        tensors(*outputs),
        tensors(*constants),
        kind=kind,
    )


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        (layer("conv", ("Half",), ("Half",)), "fp16"),
        (layer("conv", ("Float",), ("Float",), ("Float",)), "fp32"),
        (layer("gemm", ("BFloat16",), ("BFloat16",)), "bf16"),
        (layer("conv", ("Int8",), ("Int8",)), "int8"),
        (layer("conv", ("Int8", "Half"), ("Int8",)), "int8"),  # the residual is FP16
        (layer("fused", ("FP8",), ("FP8",)), "fp8"),
        (layer("fused", ("Half",), ("Half",), ("FP8",)), "fp16"),  # writes FP8, multiplies in FP16
        (layer("gemm", ("Half",), ("Int8",)), "fp16"),  # compressed weight
        (layer("fused", ("Half",), ("Int4",)), "fp16"),
        (layer("mha", ("Int8", "Int8", "Int8")), "int8"),
        (layer("mha", ("Half", "Half", "Half")), "fp16"),
        (layer("gemm", ("Int8", "Half"), ("Half",)), "fp16"),
        (layer("fused", ("Float",), ("Half",)), "fp16"),  # the input is cast as it is read
        (layer("pointwise", ("Half",), (), ("Int8",)), "fp16"),  # quantizes
        (layer("pointwise", ("Int8",), (), ("Half",)), "int8"),
        (layer("pointwise", ("Half", "Float")), "fp32"),
        (layer("pointwise", ("Int64",), (), ("Half",)), "fp16"),  # gathers
        (layer("pointwise", ("Int64",), (), ("Int32",)), "int64"),
        (layer("pointwise", (), ("Float",), ("Float",)), "fp32"),
        (layer("pointwise", (), (), ("Int32",)), "int32"),  # sets a counter
    ],
)
def test_the_operands_say_what_a_kernel_computes_in(kernel: LayerInfo, dtype: str) -> None:
    assert math_dtype(kernel) == dtype


@pytest.mark.parametrize(
    ("inputs", "dtype"),
    [
        (("Half", "Half", "Half", "Float"), "fp16"),
        (("Float", "Half", "Half"), "fp16"),
        (("Float", "Float", "Half"), "fp32"),
        (("Half", "Float"), "fp32"),
    ],
)
def test_a_wider_mask_of_attention_is_no_operand_of_its_products(inputs: tuple[str, ...], dtype: str) -> None:
    assert math_dtype(layer("mha", inputs)) == dtype


def test_a_vector_constant_is_no_weight() -> None:
    scale = (TensorInfo("s", (1,), "Int8"),)
    kernel = LayerInfo("g", "gemm", (), tensors("Int8", "Half"), tensors("Half"), scale, kind="gemm")
    assert math_dtype(kernel) == "fp16"


@pytest.mark.parametrize("shape", [(1, 192), (1, 192, 1, 1)])
def test_a_scale_per_channel_behind_a_product_is_no_weight(shape: tuple[int, ...]) -> None:
    constants = TensorInfo("w", (768, 192), "Half"), TensorInfo("gamma", shape, "Float")
    kernel = LayerInfo("FcCastMulCast", "kgen", (), tensors("Half"), tensors("Half"), constants, kind="fused")
    assert math_dtype(kernel) == "fp16"


def test_a_weight_of_one_column_is_one_where_there_is_no_other() -> None:
    column = (TensorInfo("w", (192, 1), "Float"),)
    kernel = LayerInfo("g", "gemm", (), tensors("Half"), tensors("Half"), column, kind="gemm")
    assert math_dtype(kernel) == "fp32"


def test_flop_goes_to_the_kernel_that_does_the_math() -> None:
    pad = layer("pointwise", ("Float",), (), ("Float",), "conv1")
    first = layer("conv", ("Int8",), ("Int8",), nodes="conv1 relu1")
    second = layer("conv", ("Half",), ("Half",), nodes="conv2")
    wait = LayerInfo("w", "wait", (), (), (), is_kernel=False, kind="none")
    shares = achieved_precision([pad, wait, first, second], {"conv1": 300, "conv2": 100, "folded": 50})
    assert shares == {"int8": Achieved(1, 0.75), "fp16": Achieved(1, 0.25), "fp32": Achieved(1, 0.0)}
    assert list(shares) == ["int8", "fp16", "fp32"]


def test_shares_without_any_flop_are_zero() -> None:
    assert achieved_precision([layer("pointwise", ("Half",))], {}) == {"fp16": Achieved(1, 0.0)}
    assert achieved_precision([], {"conv": 10}) == {}


def test_a_kernel_that_sets_a_counter_is_integer_and_takes_no_arithmetic_of_a_normalization() -> None:
    counter = layer("pointwise", (), outputs=("Int32",), nodes="norm")
    norm = LayerInfo("norm", "kgen", ("norm",), tensors("Int32", "Half"), tensors("Half"), kind="pointwise")
    assert math_dtype(counter) == "int32"
    found = achieved_precision([counter, norm], {"norm": 100})
    assert found == {"fp16": Achieved(1, 1.0), "int32": Achieved(1, 0.0)}
