"""Saved models run in ONNX Runtime with every level of its optimizations, in processes of their own: some crash it."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import trtopt
from trtopt.errors import InvalidModelError
from trtopt.graph.shapes import infer_shapes
from trtopt.pipeline.saved import LOADS, computes_wrong, remedy, save_checked, tried_in_onnxruntime
from trtopt.precision.plan import FP16, NarrowType, Operand, PrecisionPlan, QuantizedOp
from trtopt.precision.qdq.apart import apart, together
from trtopt.precision.write import apply_plan
from trtopt.report.schema.build import BuildReport
from trtopt.source.onnx_file import load
from trtopt.source.save import save_model
from trtopt.support.ort_session import OrtSession
from trtopt.support.precision import Precision

LEVELS = ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_EXTENDED", "ENABLE_LAYOUT", "ENABLE_ALL")

RUN = """
import sys
import numpy as np
import onnxruntime as ort
path, level, inputs, outputs = sys.argv[1:]
options = ort.SessionOptions()
options.log_severity_level, options.intra_op_num_threads = 4, 1
options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
np.savez(outputs, *session.run(None, dict(np.load(inputs))))
"""


def outputs_at_every_level(
    path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, list[np.ndarray]]:
    """What each level gives on random numbers; a level that crashes or does not load fails the test."""
    model = onnx.load(path)
    initializers = {tensor.name for tensor in model.graph.initializer}
    rng = np.random.default_rng(0)
    feeds = {}
    for item in model.graph.input:
        if item.name not in initializers:
            shape = (shapes or {}).get(item.name) or [dim.dim_value or 2 for dim in item.type.tensor_type.shape.dim]
            dtype = onnx.helper.tensor_dtype_to_np_dtype(item.type.tensor_type.elem_type)
            feeds[item.name] = rng.standard_normal(shape).astype(dtype)
    np.savez(path.with_suffix(".in.npz"), allow_pickle=False, **feeds)
    found = {}
    for level in LEVELS:
        result = path.with_suffix(f".{level}.npz")
        command = [sys.executable, "-c", RUN, str(path), level, str(path.with_suffix(".in.npz")), str(result)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, (path.name, level, ended.returncode, ended.stderr[-1000:])
        arrays = np.load(result)
        found[level] = [arrays[name] for name in arrays.files]
    return found


def onnxruntime_outputs(path: Path, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What a file gives without optimizations, which cannot crash."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def saved(text: str, folder: Path) -> Path:
    """A graph saved in its portable form."""
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}'), folder / "given.onnx")
    path = folder / "saved.onnx"
    save_model(load(folder / "given.onnx").model, path)
    onnx.checker.check_model(path, full_check=True)
    return path


def assert_equal(found: dict[str, list[np.ndarray]], expected: Sequence[np.ndarray], atol: float) -> None:
    for level, arrays in found.items():
        for array, wanted in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(array.astype(np.float32), wanted, rtol=0, atol=atol, err_msg=level)


def halves(numbers: np.ndarray) -> str:
    return "{" + ", ".join(str(int(bits)) for bits in numbers.astype(np.float16).view(np.uint16).reshape(-1)) + "}"


PRODUCTS = [
    pytest.param("1,0,2", (5, 3, 2), (2, 4), 1, id="batch and sequence"),
    pytest.param("1,2,0", (2, 3, 5), (2, 4), 1, id="last axis from the front"),
    pytest.param("1,2,0,3", (4, 5, 3, 2), (2, 4), 1, id="rank 4"),
    pytest.param("1,2,3,0", (2, 5, 3, 4), (3, 2, 4), 1, id="rank 4 and rank 3"),
    pytest.param("1,0,2", (5, 3, 2), (4, 5), 0, id="the constant on the left"),
    pytest.param("1,0,2", (5, 3, 2), (2,), 1, id="a vector"),
    pytest.param("1,0,2", (5, 3, 2), (5,), 0, id="a vector on the left"),
]


@pytest.mark.parametrize(("perm", "shape", "weight", "place"), PRODUCTS)
@pytest.mark.parametrize("computed", [False, True], ids=["constant", "computed"])
def test_a_product_behind_a_transpose_of_fp16_does_not_crash(
    perm: str, shape: tuple[int, ...], weight: tuple[int, ...], place: int, computed: bool, tmp_path: Path
) -> None:
    """The smallest graph of unrolled LSTMs and GRUs that crashed ONNX Runtime 1.31 at its default level."""
    w = np.random.default_rng(1).integers(-8, 8, weight).astype(np.float16) / 4
    x = np.zeros(shape).transpose([int(axis) for axis in perm.split(",")])
    rank = np.ndim(x @ w if place else w @ x)
    operands = ("u, w" if place else "w, u") if not computed else ("c, r" if place else "r, c")
    if computed:
        dims = ", ".join(map(str, weight))
        cast = "c = Cast<to = 1>(u) r = Relu(w)"
        head = f"(float16[{', '.join(map(str, shape))}] x, float[{dims}] w) => (float[{', '.join('N' * rank)}] y) {{"
    else:
        cast = ""
        head = (
            f"(float16[{', '.join(map(str, shape))}] x) => (float16[{', '.join('N' * rank)}] y) "
            f"<float16[{', '.join(map(str, weight))}] w = {halves(w)}> {{"
        )
    path = saved(f"g {head} u = Transpose<perm = [{perm}]>(x) {cast} y = MatMul({operands}) }}", tmp_path)
    found = outputs_at_every_level(path)
    feeds = np.load(path.with_suffix(".in.npz"))
    turned = feeds["x"].astype(np.float32).transpose([int(axis) for axis in perm.split(",")])
    other = np.maximum(feeds["w"], 0) if computed else w.astype(np.float32)
    assert_equal(found, [turned @ other if place else other @ turned], 1e-2)


def test_only_products_behind_such_a_transpose_change(tmp_path: Path) -> None:
    weight = halves(np.ones((2, 2)))
    path = saved(
        "g (float16[5, 3, 2] x) => (float16[5, 3, 2] y, float16[3, 5, 2] z) "
        f"<float16[2, 2] w = {weight}, float16[2, 2] v = {weight}> "
        "{ y = MatMul(x, w) u = Transpose<perm = [1, 0, 2]>(x) t = MatMul(u, w) z = MatMul(t, v) }",
        tmp_path,
    )
    shapes = {name: value.shape for name, value in ir.load(path).graph.initializers.items()}
    assert sorted(tuple(shape or ()) for shape in shapes.values()) == [(1, 2, 2), (2, 2), (2, 2)]


TAKE = {
    "slices": "{0}5 = Slice(p, i{1}, i{2}, i0) {0} = Squeeze({0}5, i0)",
    "gathers": "{0} = Gather<axis = 0>(p, n{1})",
}
SCALED = ["Mul(q, f)", "Mul(f, q)"]


def attention_of_a_map(taken: str, scaled: str) -> tuple[str, np.ndarray]:
    """Attention as timm writes it on a map, queries multiplied by a number of FP16; the weight of its projection."""
    weight = np.random.default_rng(2).integers(-8, 8, (8, 24)).astype(np.float16) / 8
    indices = ", ".join(f"int64[1] i{at} = {{{at}}}, int64 n{at} = {{{at}}}" for at in range(4))
    heads = " ".join(TAKE[taken].format(name, at, at + 1) for at, name in enumerate("qkv"))
    text = (
        "g (float16[2, 8, 2, 3] x) => (float16[2, 2, 6, 4] y) "
        f"<int64[3] a = {{2, 8, 6}}, int64[5] b = {{2, 6, 3, 2, 4}}, "
        f"float16 f = {halves(np.array([0.5]))}, float16[8, 24] w = {halves(weight)}, {indices}> {{ "
        "r = Reshape(x, a) t = Transpose<perm = [0, 2, 1]>(r) m = MatMul(t, w) h = Reshape(m, b) "
        f"p = Transpose<perm = [2, 0, 3, 1, 4]>(h) {heads} s = {scaled} u = Transpose<perm = [0, 1, 3, 2]>(k) "
        "o = MatMul(s, u) z = Softmax<axis = -1>(o) y = MatMul(z, v) }"
    )
    return text, weight


def attended(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    packed = x.astype(np.float32).reshape(2, 8, 6).transpose(0, 2, 1) @ weight.astype(np.float32)
    q, k, v = packed.reshape(2, 6, 3, 2, 4).transpose(2, 0, 3, 1, 4)
    exponents = np.exp(0.5 * q @ k.transpose(0, 1, 3, 2))
    return np.asarray(exponents / exponents.sum(-1, keepdims=True) @ v)


@pytest.mark.parametrize("taken", TAKE)
@pytest.mark.parametrize("scaled", SCALED)
def test_attention_scaled_by_a_number_of_fp16_loads(taken: str, scaled: str, tmp_path: Path) -> None:
    """ONNX Runtime 1.31 read the number as FP32, from ENABLE_EXTENDED on (timm's CSATv2)."""
    text, weight = attention_of_a_map(taken, scaled)
    path = saved(text, tmp_path)
    found = outputs_at_every_level(path)
    assert_equal(found, [attended(np.load(path.with_suffix(".in.npz"))["x"], weight)], 2e-2)


@pytest.mark.parametrize("made", ["Cast<to = 10>(e)", "Identity(e)"])
def test_attention_scaled_by_a_number_made_of_a_constant_loads(made: str, tmp_path: Path) -> None:
    """ONNX Runtime computes the number before it looks for attention."""
    text, weight = attention_of_a_map("slices", SCALED[0])
    given = "float e = {0.5}" if made.startswith("Cast") else f"float16 e = {halves(np.array([0.5]))}"
    number = f"float16 f = {halves(np.array([0.5]))}"
    path = saved(text.replace(number, given).replace("{ r =", f"{{ f = {made} r ="), tmp_path)
    assert_equal(outputs_at_every_level(path), [attended(np.load(path.with_suffix(".in.npz"))["x"], weight)], 2e-2)


@pytest.mark.parametrize("taken", TAKE)
def test_attention_of_others_scaled_by_a_number_of_fp16_runs(taken: str, tmp_path: Path) -> None:
    """As it is given, before any of our rewriting."""
    text, weight = attention_of_a_map(taken, SCALED[0])
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}'), tmp_path / "given.onnx")
    x = np.random.default_rng(0).standard_normal((2, 8, 2, 3)).astype(np.float16)
    with OrtSession(load(tmp_path / "given.onnx").model) as session:
        assert_equal({"given": session.run({"x": x})}, [attended(x, weight)], 2e-2)


@pytest.mark.parametrize("move", ["Transpose<perm = [1, 0]>(d)", "Reshape(d, s)", "Unsqueeze(d, a)"])
def test_int8_moved_by_the_runtime_loads(move: str, tmp_path: Path) -> None:
    """ONNX Runtime 1.31 wrote a quantizer whose output_dtype INT8 met a UINT8 zero point, with ENABLE_ALL only."""
    shape = "1, 4, 4" if "Unsqueeze" in move else "M, N"
    path = saved(
        f"g (float[4, 4] x) => (float[{shape}] y) "
        "<float k = {0.1}, int8 z = {0}, int64[2] s = {2, 8}, int64[1] a = {0}> "
        f"{{ q = QuantizeLinear(x, k, z) d = DequantizeLinear(q, k, z) m = {move} y = Sigmoid(m) }}",
        tmp_path,
    )
    found = outputs_at_every_level(path)
    assert_equal(found, found["DISABLE_ALL"], 1e-6)
    quantize, dequantize = (node for node in onnx.load(path).graph.node if "uantizeLinear" in node.op_type)
    assert (len(quantize.input), len(dequantize.input)) == (3, 2)


CRASHES = (
    f"g (float16[5, 3, 2] x) => (float16[3, 5, 2] y) <float16[2, 2] w = {halves(np.ones((2, 2)))}> "
    "{ u = Transpose<perm = [1, 0, 2]>(x) y = MatMul(u, w) }"
)


def test_a_model_of_others_that_crashes_the_runtime_is_served(tmp_path: Path) -> None:
    """As it would end the process of the tests, it is loaded in one of its own."""
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {CRASHES}'), path)
    code = (
        "import sys, numpy, trtopt\n"
        "with trtopt.Engine.load(sys.argv[1]) as engine:\n"
        "    print(engine.run({'x': numpy.ones((5, 3, 2), numpy.float16)})['y'].sum())\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "60.0"), ended.stderr[-1000:]


def test_what_crashes_the_runtime_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {CRASHES}'), path)
    assert tried_in_onnxruntime([path]) == "ONNX Runtime (CPU) crashes on it: SIGSEGV"
    assert tried_in_onnxruntime([saved(CRASHES, tmp_path)]) == "ONNX Runtime (CPU) loads it"
    bf16 = "g (bfloat16[2, 2] x) => (bfloat16[2, 2] y) { y = MatMul(x, x) }"
    assert "does not load it: " in tried_in_onnxruntime([saved(bf16, tmp_path)])


def test_a_file_that_the_checks_refuse_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(CRASHES, tmp_path)
    before = path.read_bytes()
    model = load(path).model
    node = model.graph[0]
    node.attributes["wrong"] = ir.AttrInt64("wrong", 1)
    with pytest.raises(InvalidModelError, match="wrong"):
        save_checked(model, path, None)
    assert path.read_bytes() == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["given.onnx", "saved.onnx"]


SHARED = Path(__file__).parents[3] / "shared" / "models"


FP8_PRODUCT = """
agraph (TYPE[2, 2] a, TYPE[2, 2] b, TYPE s) => (TYPE[2, 2] y) {
    aq = QuantizeLinear <output_dtype = 17> (a, s)
    bq = QuantizeLinear <output_dtype = 17> (b, s)
    x = DequantizeLinear(aq, s)
    v = DequantizeLinear(bq, s)
    y = MatMul(x, v)
}
"""


@pytest.mark.parametrize(("dtype", "refused"), [("float", True), ("float16", False)])
def test_the_report_says_how_fp8_products_load(dtype: str, refused: bool, tmp_path: Path) -> None:
    path = saved(FP8_PRODUCT.replace("TYPE", dtype), tmp_path)
    assert ("does not load it" in tried_in_onnxruntime([path])) is refused
    assert "session.disable_quant_qdq=1" in remedy(load(path).model)
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("narrow", [None, FP16])
@pytest.mark.parametrize("largest", [3.0, 4e4])
def test_fp8_is_not_mistaken_for_int8(narrow: NarrowType | None, largest: float, tmp_path: Path) -> None:
    """Products of FP8, and activations before them, as they are written for TensorRT for RTX."""
    body = "r = Relu(x) a = MatMul(r, v) l = Clip(a, low) b = Gemm(l, w, c) s = MatMul(b, l) y = Softmax(s)"
    head = "g (float[6, 6] x) => (float[6, 6] y) <float low = {-0.1}>"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {head} {{ {body} }}')
    rng = np.random.default_rng(0)
    for name, dims in {"v": (6, 6), "w": (6, 6), "c": (6,)}.items():
        array = (rng.standard_normal(dims) / 3).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, tmp_path / "given.onnx")
    base = infer_shapes(load(tmp_path / "given.onnx").model)
    first, gemm, second = (str(node.name) for node in base.graph if node.op_type in ("MatMul", "Gemm"))
    ops = (
        QuantizedOp(first, "r", largest, None, "max", dtype=Precision.FP8),
        QuantizedOp(gemm, "l", 3.0, None, "max", dtype=Precision.FP8),
        QuantizedOp(second, "b", 3.0, None, "max", dtype=Precision.FP8, other=Operand("l", 3.0, "max")),
    )
    path = tmp_path / "saved.onnx"
    made = apply_plan(base, PrecisionPlan(Precision.FP8, narrow, {}, ops, fused_quantizers=True))
    assert (remedy(made), computes_wrong(made)) == ("", "")
    save_model(made, path)
    assert tried_in_onnxruntime([path]) == LOADS
    found = outputs_at_every_level(path)
    without = apply_plan(base, PrecisionPlan(Precision.FP8, narrow, {}, ops))
    save_model(without, path)
    assert remedy(without)
    assert computes_wrong(without)
    (exact,) = onnxruntime_outputs(path, {"x": np.load(path.with_suffix(".in.npz"))["x"]})
    again = apart(load(path).model, "tensorrt-rtx")
    together(again)
    kinds = [[node.op_type for node in m.graph if node.op_type != "DequantizeLinear"] for m in (again, without)]
    assert kinds[0] == kinds[1]
    for level, (array,) in found.items():
        assert np.abs(array - exact).max() <= (2e-6 if narrow is None else 2e-2), level


@pytest.mark.parametrize(
    "between",
    [
        "b = Squeeze(a, zero)",
        "s = Unsqueeze(a, zero) b = Squeeze(s, zero)",
        "b = Slice(a, zero, last, axis)",
        "s = Slice(a, zero, last, axis) b = Transpose <perm = [0, 2, 1]> (s)",
        "s = Squeeze(a, zero) b = Reshape(s, turned)",
        "s = Relu(a) b = Transpose <perm = [0, 2, 1]> (s)",
    ],
)
def test_fp8_behind_what_moves_values_runs_at_every_level(between: str, tmp_path: Path) -> None:
    """ONNX Runtime moves a quantizer before what moves values, which has no kernel for FP8, or drops Relu there."""
    body = f"a = MatMul(x, v) {between} y = MatMul(b, w)"
    lists = "int64[1] zero = {0}, int64[1] last = {6}, int64[1] axis = {2}, int64[2] turned = {6, 6}"
    head = f"g (float[1, 6, 6] x) => (float y) <{lists}>"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {head} {{ {body} }}')
    rng = np.random.default_rng(0)
    for name in "vw":
        array = (rng.standard_normal((6, 6)) / 3).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model = onnx.shape_inference.infer_shapes(model)
    onnx.save(model, tmp_path / "given.onnx")
    base = infer_shapes(load(tmp_path / "given.onnx").model)
    last = str([node.name for node in base.graph if node.op_type == "MatMul"][-1])
    ops = (QuantizedOp(last, "b", 3.0, None, "max", dtype=Precision.FP8),)
    path = tmp_path / "saved.onnx"
    save_model(apply_plan(base, PrecisionPlan(Precision.FP8, FP16, {}, ops, fused_quantizers=True)), path)
    assert tried_in_onnxruntime([path]) == LOADS
    found = outputs_at_every_level(path)
    for level, (array,) in found.items():
        assert np.abs(array - found["DISABLE_ALL"][0]).max() <= 2e-2, level


BIASED = {
    "Conv": ("1, 8, 6, 6", "8, 8, 3, 3", "<pads = [1, 1, 1, 1]>"),
    "ConvTranspose": ("1, 8, 6, 6", "8, 8, 1, 1", ""),
    "Gemm": ("6, 8", "8, 8", "<beta = 2.0>"),
    "ConvTranspose in groups": ("1, 8, 6, 6", "8, 4, 1, 1", "<group = 2>"),
    "Conv before a pool": ("1, 8, 6, 6", "8, 8, 3, 3", "<pads = [1, 1, 1, 1]>"),
    "Conv before an identity": ("1, 8, 6, 6", "8, 8, 3, 3", "<pads = [1, 1, 1, 1]>"),
}


@pytest.mark.parametrize("kind", BIASED)
@pytest.mark.parametrize("dtype", [Precision.INT8, Precision.FP8])
def test_a_large_bias_between_quantizers_gives_the_same_at_every_level(
    kind: str, dtype: Precision, tmp_path: Path
) -> None:
    """ONNX Runtime 1.31 writes it as INT32 with an FP16 scale, and was wrong where that is too small."""
    op, is_grouped = kind.split()[0], "groups" in kind
    axis = 1 if is_grouped else None
    x, w, attributes = BIASED[kind]
    pool = "p = Relu(a) r = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (p)"
    between = pool if "pool" in kind else "r = Identity(a)" if "identity" in kind else "r = Clip(a, low)"
    body = f"a = {op} {attributes} (x, v, c) {between} y = {op} {attributes} (r, w)"
    head = f"g (float[{x}] x) => (float[{x}] y) <float low = {{-9.0}}>"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {head} {{ {body} }}')
    rng = np.random.default_rng(0)
    numbers = {"v": 0.02, "w": 0.1}
    for name, size in numbers.items():
        array = size * rng.standard_normal(tuple(map(int, w.split(",")))).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.linspace(-3, 3, 8, dtype=np.float32), "c"))
    onnx.save(model, tmp_path / "given.onnx")
    base = infer_shapes(load(tmp_path / "given.onnx").model)
    first, second = (str(node.name) for node in base.graph if node.op_type == op)
    ops = (
        QuantizedOp(first, "x", 3.0, axis, "max", dtype=dtype),
        QuantizedOp(second, "r", 6.0, axis, "max", dtype=dtype),
    )
    path = tmp_path / "saved.onnx"
    save_model(apply_plan(base, PrecisionPlan(dtype, FP16, {}, ops)), path)
    assert not computes_wrong(load(path).model) or dtype == Precision.FP8
    found = outputs_at_every_level(path)
    for level, (array,) in found.items():
        plain = found["DISABLE_ALL"][0]
        assert np.linalg.norm(array - plain) <= 0.02 * np.linalg.norm(plain), level


@pytest.mark.long
@pytest.mark.skipif(not SHARED.is_dir(), reason="the models are not here")
@pytest.mark.parametrize("precision", ["fp16", "int8", "fp8"])
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("dscnn_kws/model", ()),
        ("resnet20_cifar10/model", ()),
        ("crepe_tiny/model", ()),
        ("silero_vad/model_ifless", ("input:1x576,state:2x1x128",)),
    ],
)
def test_optimized_models_give_the_same_at_every_level(
    name: str, shapes: tuple[str, ...], precision: str, tmp_path: Path
) -> None:
    """Within what a rounding to 8 bits may turn over between two kernels."""
    path = tmp_path / "saved.onnx"
    command = [
        "optimize",
        str(SHARED / f"{name}.onnx"),
        f"--{precision}",
        "-o",
        str(path),
        "--cache-dir",
        str(tmp_path),
    ]
    command += [item for shape in shapes for item in ("--opt-shapes", shape)]
    if precision != "fp16":
        command += ["--keep-all-int8", "--allow-accuracy-loss"]
    assert subprocess.run([sys.executable, "-m", "trtopt", *command], check=False, timeout=600).returncode == 0
    onnx.checker.check_model(path, full_check=True)
    given = dict(item.split(":") for shape in shapes for item in shape.split(","))
    assert (remedy(load(path).model), computes_wrong(load(path).model)) == ("", "")
    found = outputs_at_every_level(path, {key: tuple(map(int, dims.split("x"))) for key, dims in given.items()})
    for level, arrays in found.items():
        for array, plain in zip(arrays, found["DISABLE_ALL"], strict=True):
            bound = 1e-2 if precision == "fp16" else 0.1
            assert np.linalg.norm(array - plain) <= bound * np.linalg.norm(plain), level


def test_the_metric_of_a_saved_model_is_what_its_users_measure(tmp_path: Path) -> None:
    """ONNX Runtime's defaults give the file the figure of the report, and other roundings than the engine's another."""
    import onnxruntime as ort

    rng = np.random.default_rng(0)
    body = " ".join(f"r{i + 1} = MatMul(r{i}, w{i})" for i in range(6)).replace("r0", "x").replace("r6", "y")
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 21]> g (float[1, 8, 8] x) => (float[1, 8, 8] y) {{ {body} }}'
    )
    weights = rng.standard_normal((6, 8, 8)).astype(np.float32)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights))
    samples = {"x": rng.standard_normal((4, 8, 8)).astype(np.float32)}

    exact = functools.reduce(np.matmul, weights, samples["x"])

    def nearness(run: Callable[[dict[str, np.ndarray]], list[np.ndarray]]) -> float:
        found = np.concatenate([run({"x": samples["x"][i : i + 1]})[0] for i in range(4)])
        return -float(np.abs(found - exact).mean())

    def saved_for(drop: float) -> BuildReport:
        options = {"max_accuracy_drop": drop, "recipes": "none", "precision": "fp16"}
        return trtopt.optimize(model, calib=samples, metric=nearness, output=tmp_path / "saved.onnx", **options)

    report = saved_for(100.0)
    session = ort.InferenceSession(tmp_path / "saved.onnx", providers=["CPUExecutionProvider"])
    record = report.accuracy
    assert record is not None and record.metric is not None and record.saved_metric is not None
    own = nearness(lambda feeds: session.run(None, feeds))
    assert record.saved_metric.optimized == own != record.metric.optimized
    assert record.saved_metric.drop == record.metric.baseline - own
    drops = (record.metric.drop, record.saved_metric.drop)
    assert record.worst_metric is not None and record.worst_metric.drop == max(drops)
    failed = saved_for(sum(drops) / 2).gate_failures
    assert len(failed) == 1 and ("of the saved model in ONNX Runtime" in failed[0]) == (drops[1] > drops[0])
