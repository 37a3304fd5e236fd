"""Antialiased Resize as products with constant matrices: against ONNX Runtime's own."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from trtopt.graph.resize import write_out_antialias
from trtopt.graph.shapes import infer_in_place
from trtopt.support.ort_session import OrtSession

SIZES = [((64, 48), (32, 24)), ((61, 47), (17, 9)), ((30, 30), (30, 11)), ((20, 21), (32, 42)), ((9, 9), (1, 1))]


def resize(attributes: str, before: tuple[int, ...], arguments: str, constants: str, batch: str = "N") -> ir.Model:
    dims = ", ".join(map(str, before))
    text = f"""<ir_version: 10, opset_import: ["": 21]> g (float[{batch}, 2, {dims}] x) => (float[N, C, H, W] y)
        <{constants}> {{ y = Resize <antialias = 1, {attributes}> (x, {arguments}) }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    infer_in_place(model)
    return model


def run(model: ir.Model, x: np.ndarray) -> np.ndarray:
    with OrtSession(model) as session:
        return session.run({"x": x})[0].astype(np.float64)


def sqnr_db(reference: np.ndarray, found: np.ndarray) -> float:
    assert reference.shape == found.shape
    return float(10 * np.log10((reference**2).sum() / max(((reference - found) ** 2).sum(), 1e-30)))


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("outside", [0, 1])
@pytest.mark.parametrize(
    "place", ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel", "half_pixel_symmetric"]
)
def test_products_give_what_onnx_runtime_gives(mode: str, outside: int, place: str) -> None:
    """Of a dynamic batch, by sizes and by scales, in every mode that is defined for antialiasing."""
    attributes = f'mode = "{mode}", exclude_outside = {outside}, coordinate_transformation_mode = "{place}"'
    for before, after in SIZES:
        x = np.random.default_rng(0).standard_normal((3, 2, *before)).astype(np.float32)
        scales = [float(np.nextafter(np.float32(b / a), np.float32(9))) for a, b in zip(before, after, strict=True)]
        ways = [(", axes = [2, 3]", ", , s", f"int64[2] s = {{{after[0]}, {after[1]}}}")]
        ways += [("", ", s", f"float[4] s = {{1.0, 1.0, {scales[0]:.9f}, {scales[1]:.9f}}}")]
        for axes, arguments, constants in ways:
            model = resize(attributes + axes, before, arguments, constants)
            reference = run(model, x)
            assert write_out_antialias(model) == 1
            assert all(node.op_type == "MatMul" for node in model.graph)
            assert sqnr_db(reference, run(model, x)) > 100


def test_sizes_that_follow_the_batch() -> None:
    """As exporters write them: the first two sizes are those of the input."""
    text = """<ir_version: 10, opset_import: ["": 21]> g (float[N, 2, 40, 30] x) => (float[N, 2, 16, 12] y)
        <int64[2] inner = {16, 12}> {
            own = Shape <start = 0, end = 2> (x)
            s = Concat <axis = 0> (own, inner)
            y = Resize <antialias = 1, mode = "linear"> (x, , , s)
        }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    infer_in_place(model)
    x = np.random.default_rng(1).standard_normal((3, 2, 40, 30)).astype(np.float32)
    reference = run(model, x)
    assert write_out_antialias(model) == 1
    assert sqnr_db(reference, run(model, x)) > 100


def test_the_coefficient_of_the_cubic_filter_counts() -> None:
    attributes = 'mode = "cubic", cubic_coeff_a = -0.5, axes = [2, 3]'
    model = resize(attributes, (40, 30), ", , s", "int64[2] s = {16, 12}")
    x = np.random.default_rng(1).standard_normal((1, 2, 40, 30)).astype(np.float32)
    reference = run(model, x)
    write_out_antialias(model)
    assert sqnr_db(reference, run(model, x)) > 100


def test_sizes_that_stay_need_no_product() -> None:
    model = resize('mode = "linear"', (8, 8), ", s", "float[4] s = {1.0, 1.0, 1.0, 1.0}")
    assert write_out_antialias(model) == 1
    (node,) = model.graph
    assert node.op_type == "Resize" and "antialias" not in node.attributes


@pytest.mark.parametrize(
    ("before", "attributes", "constants"),
    [
        (("H", "W"), 'mode = "linear", axes = [2, 3]', "int64[2] s = {8, 8}"),
        ((8, 8), 'mode = "linear", axes = [1, 2]', "int64[2] s = {1, 8}"),
        ((8, 8), 'mode = "linear", keep_aspect_ratio_policy = "not_larger", axes = [2, 3]', "int64[2] s = {4, 4}"),
        ((8, 8), 'mode = "linear", axes = [2, 3]', "int64[2] s = {4, 99999999}"),
    ],
)
def test_what_has_no_such_form_stays(before: tuple[int, ...], attributes: str, constants: str) -> None:
    model = resize(attributes, before, ", , s", constants)
    assert write_out_antialias(model) == 0 and [node.op_type for node in model.graph] == ["Resize"]
