"""What ships is what was judged, and never slower than plain."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from onnx import helper
from rtx_nets import constant, conv_net, model

import trtopt
from trtopt.engine.build import Compiler
from trtopt.engine.request import BuildRequest
from trtopt.errors import RecipeError
from trtopt.graph import edit
from trtopt.graph.artifact import ModelArtifact
from trtopt.report.schema.build import BuildReport
from trtopt.report.schema.layers import LayerInfo
from trtopt.report.schema.steps import Cost
from trtopt.report.text.build import view
from trtopt.rewrite import driver, registry
from trtopt.rewrite.protocol import Findings, Match, Recipe, Refusal, Stage, Target

pytest.importorskip("tensorrt_rtx")

_SLOWER = 1.001
RANGE = {
    "min_shapes": ({"x": (1, 16, 16, 16)},),
    "opt_shapes": ({"x": (8, 16, 16, 16)},),
    "max_shapes": ({"x": (16, 16, 16, 16)},),
}


def saved(folder: Path, proto: onnx.ModelProto) -> Path:
    path = folder / "net.onnx"
    onnx.save(proto, path)
    return path


def decoder(scale: float = 1.0, channels: int = 64, size: int = 32) -> onnx.ModelProto:
    """Two blocks of a VAE's decoder as exporters write them: GroupNorm around InstanceNormalization, SiLU, Conv."""
    rng = np.random.default_rng(0)
    constants = [
        constant("grouped", np.array([0, 16, -1])),
        constant("whole", np.array([0, channels, size, size])),
        constant("ones", np.full(16, scale, np.float32)),
        constant("zeros", np.zeros(16, np.float32)),
    ]
    nodes, last = [], "x"
    for number in range(2):
        weight = rng.standard_normal((channels, channels, 3, 3)) / np.sqrt(9 * channels)
        constants += [
            constant(f"gain{number}", np.ones((channels, 1, 1), np.float32)),
            constant(f"shift{number}", np.zeros((channels, 1, 1), np.float32)),
            constant(f"weight{number}", weight.astype(np.float32)),
        ]
        steps: Sequence[tuple[str, list[str], dict[str, Any]]] = (
            ("Reshape", [last, "grouped"], {}),
            ("InstanceNormalization", [f"v{number}_0", "ones", "zeros"], {"epsilon": 1e-6}),
            ("Reshape", [f"v{number}_1", "whole"], {}),
            ("Mul", [f"v{number}_2", f"gain{number}"], {}),
            ("Add", [f"v{number}_3", f"shift{number}"], {}),
            ("Sigmoid", [f"v{number}_4"], {}),
            ("Mul", [f"v{number}_4", f"v{number}_5"], {}),
            ("Conv", [f"v{number}_6", f"weight{number}"], {"pads": [1, 1, 1, 1]}),
        )
        for index, (op, inputs, attributes) in enumerate(steps):
            name = f"v{number}_{index}"
            nodes.append(helper.make_node(op, inputs, [name], name=f"node_{name}", **attributes))
        last = f"v{number}_{len(steps) - 1}"
    nodes[-1].output[0] = "y"
    return model(nodes, [("x", np.float32, ["N", channels, size, size])], [("y", np.float32)], constants)


def computed_shapes() -> onnx.ModelProto:
    """A convolution whose map is given other shapes, computed from the batch."""
    rng = np.random.default_rng(0)
    constants = [
        constant("w1", (rng.standard_normal((32, 16, 3, 3)) * 0.1).astype(np.float32)),
        constant("w2", (rng.standard_normal((256, 8)) * 0.1).astype(np.float32)),
        constant("first", np.array([0])),
        constant("second", np.array([1])),
        constant("channels", np.array([32])),
        constant("rest", np.array([-1])),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["a"], name="conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["a"], ["b"], name="relu"),
        helper.make_node("Shape", ["b"], ["s"], name="shape"),
        helper.make_node("Slice", ["s", "first", "second"], ["n"], name="slice"),
        helper.make_node("Concat", ["n", "channels", "rest"], ["t"], name="sizes", axis=0),
        helper.make_node("Reshape", ["b", "t"], ["r"], name="rows"),
        helper.make_node("Softmax", ["r"], ["p"], name="softmax"),
        helper.make_node("MatMul", ["p", "w2"], ["y"], name="product"),
    ]
    return model(nodes, [("x", np.float32, ["N", 16, 16, 16])], [("y", np.float32)], constants)


def assert_held(report: BuildReport) -> tuple[Cost, Cost]:
    """What ships and plain: never slower, or said; and to the digit what the engine's layers say."""
    shipped, plain = report.shipped, report.plain
    assert shipped is not None and plain is not None
    if report.engine is not None and report.analysis is not None:
        assert shipped.kernels == report.engine.kernels
        assert shipped.syncs == sum(layer.type in ("signal", "wait") for layer in report.engine.layers)
        assert shipped.predicted_us == pytest.approx(report.analysis.totals.predicted_us, rel=1e-12)
    assert shipped.predicted_us <= plain.predicted_us * _SLOWER or report.accuracy_cost is not None
    assert report.judge.startswith("compiler:tensorrt-rtx")
    return shipped, plain


def test_the_engine_costs_what_the_recipes_were_judged_at(tmp_path: Path) -> None:
    report = trtopt.build(saved(tmp_path, conv_net()), cache_dir=str(tmp_path))
    shipped, _ = assert_held(report)
    assert report.rewriting.after == shipped
    assert report.judged_apart == "" and report.dynamic_cost is None and report.accuracy_cost is None


def test_a_decoder_is_held_against_plain(tmp_path: Path) -> None:
    shapes = {"opt_shapes": ({"x": (2, 64, 32, 32)},)}
    report = trtopt.build(saved(tmp_path, decoder()), cache_dir=str(tmp_path), **shapes)
    shipped, plain = assert_held(report)
    found = report.accuracy_cost
    if found is not None:
        assert found.predicted_us == pytest.approx(shipped.predicted_us - plain.predicted_us)
        assert found.nodes and found.reason and found.remedy
        assert sum("accuracy costs" in text for text in report.warnings) == 1


def test_a_range_of_shapes_has_a_price(tmp_path: Path) -> None:
    report = trtopt.build(saved(tmp_path, computed_shapes()), cache_dir=str(tmp_path), recipes="none", **RANGE)
    shipped, _ = assert_held(report)
    found = report.dynamic_cost
    assert found is not None
    assert found.kernels == shipped.kernels - found.fixed.kernels > 0
    assert found.share == pytest.approx(shipped.predicted_us / found.fixed.predicted_us - 1)
    assert found.share > 0
    assert found.remedy == "--opt-shapes x:8x16x16x16"
    fixed = trtopt.build(saved(tmp_path, computed_shapes()), cache_dir=str(tmp_path), opt_shapes=RANGE["opt_shapes"])
    assert fixed.dynamic_cost is None


def test_an_optimized_model_is_priced_with_its_profiles(tmp_path: Path) -> None:
    path, out = saved(tmp_path, computed_shapes()), tmp_path / "out.onnx"
    options: dict[str, Any] = {"cache_dir": str(tmp_path), "precision": "fp16", "recipes": "none", **RANGE}
    built = trtopt.build(path, **options)
    report = trtopt.optimize(path, output=str(out), **options)
    assert_held(report)
    assert report.shipped == built.shipped and report.plain == built.plain
    assert report.dynamic_cost == built.dynamic_cost


@dataclass(frozen=True)
class Detour:
    """Multiplies what a convolution reads with the identity."""

    name: str = "detour"
    stage: Stage = Stage.CLEAN
    lossless: bool = True

    def find(self, model: ir.Model, target: Target) -> Findings:
        nodes = [node for node in model.graph if node.op_type == "Conv" and not _is_detoured(node)]
        return Findings(tuple(Match((node,)) for node in nodes))

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        conv = match.nodes[0]
        names = edit.Names(model)
        source = conv.inputs[0]
        assert source is not None and source.shape is not None
        eye = ir.tensor(np.eye(int(source.shape[-1]), dtype=np.float32), name=names.value("detour"))
        weight = ir.Value(name=eye.name, shape=ir.Shape(eye.shape), type=source.type, const_value=eye)
        model.graph.register_initializer(weight)
        node = ir.node("MatMul", [source, weight], name=names.node(f"{conv.name}_detour"))
        node.outputs[0].name = names.value(f"{conv.name}_detour")
        node.outputs[0].type, node.outputs[0].shape = source.type, source.shape
        model.graph.insert_before(conv, node)
        source = node.outputs[0]
        conv.replace_input_with(0, source)
        return None


def _is_detoured(conv: ir.Node) -> bool:
    source = conv.inputs[0].producer() if conv.inputs[0] is not None else None
    return source is not None and "detour" in str(source.name)


def unjudged(artifact: ModelArtifact, *args: Any, **_: Any) -> driver.Rewritten:
    """Every recipe applied, whatever it costs."""
    chosen: tuple[Recipe, ...] = registry.select(args[2].recipes)
    return driver.apply(artifact, chosen, target=Target())


def test_a_recipe_that_makes_what_ships_slower_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the judge of recipes did not see it."""
    monkeypatch.setattr("trtopt.pipeline.session.rewrite", unjudged)
    path = saved(tmp_path, conv_net())
    options: dict[str, Any] = {"cache_dir": str(tmp_path), "no_cache": True}
    monkeypatch.setattr(registry, "all_recipes", lambda: (Detour(),))
    report = trtopt.build(path, **options)
    assert_held(report)
    assert not any("detour" in str(layer.onnx_nodes) for layer in (report.engine.layers if report.engine else ()))
    step = next(step for step in report.steps if step.name == "held-against-plain")
    assert step.changes == 1 and step.details[0].startswith("without detour")


def test_a_recipe_that_does_not_pay_beside_what_stays_fp32_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever plain costs; one that does stays."""
    monkeypatch.setattr("trtopt.pipeline.session.rewrite", unjudged)
    monkeypatch.setattr("trtopt.pipeline.session._Run._trials", lambda *_: iter(()))
    monkeypatch.setattr(registry, "all_recipes", lambda: (Detour(),))
    path = saved(tmp_path, conv_net())
    options: dict[str, Any] = {"cache_dir": str(tmp_path), "no_cache": True}
    assert any("detour" in str(layer.onnx_nodes) for layer in layers_of(trtopt.build(path, **options)))
    monkeypatch.setattr("trtopt.pipeline.session.doubted", lambda first, used: list(used))
    report = trtopt.build(path, **options)
    step = next(step for step in report.steps if step.name == "held-against-plain")
    assert step.changes == 1 and step.details[0].startswith("without detour")
    assert not any("detour" in str(layer.onnx_nodes) for layer in layers_of(report))
    monkeypatch.setattr("trtopt.pipeline.session._Run._price", lambda *_: 1.0)
    assert any("detour" in str(layer.onnx_nodes) for layer in layers_of(trtopt.build(path, **options)))


def layers_of(report: BuildReport) -> tuple[LayerInfo, ...]:
    assert report.engine is not None and report.engine.layers is not None
    return report.engine.layers


@dataclass(frozen=True)
class DeadEnd(Detour):
    """Puts an operator before a convolution that the compiler refuses: a cut to the size it has."""

    name: str = "dead-end"

    def rewrite(self, model: ir.Model, match: Match) -> Refusal | None:
        conv = match.nodes[0]
        source = conv.inputs[0]
        assert source is not None and source.shape is not None
        size = ir.node("Constant", [], {"value": ir.tensor(np.array(list(source.shape), np.int64))})
        size.outputs[0].name = edit.Names(model).value("size")
        node = ir.node("CenterCropPad", [source, size.outputs[0]], name=f"{conv.name}_detour")
        node.outputs[0].name = edit.Names(model).value(f"{conv.name}_detour")
        node.outputs[0].type, node.outputs[0].shape = source.type, source.shape
        model.graph.insert_before(conv, [size, node])
        conv.replace_input_with(0, node.outputs[0])
        return None


@pytest.mark.parametrize("make", [trtopt.build, trtopt.optimize])
def test_a_recipe_with_which_nothing_builds_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., BuildReport]
) -> None:
    monkeypatch.setattr("trtopt.pipeline.session.rewrite", unjudged)
    monkeypatch.setattr(registry, "all_recipes", lambda: (DeadEnd(),))
    report = make(saved(tmp_path, conv_net()), gpu="L4", precision="fp16", output=str(tmp_path / "out.onnx"))
    (warning,) = [text for text in report.warnings if "dead-end" in text]
    assert warning.startswith("without the recipe dead-end, with which nothing builds: ")
    assert not any(step.name == "dead-end" for step in report.steps) and report.shipped
    with pytest.raises(RecipeError, match="dead-end, with which nothing builds"):
        make(tmp_path / "net.onnx", gpu="L4", precision="fp16", output=str(tmp_path / "no.onnx"), strict_recipes=True)
    assert not (tmp_path / "no.onnx").exists()


def test_plain_does_not_ship_where_it_overflows(tmp_path: Path) -> None:
    """The report says what accuracy costs and where."""
    proto = conv_net()
    weight = next(item for item in proto.graph.initializer if item.name == "w1")
    weight.CopyFrom(constant("w1", onnx.numpy_helper.to_array(weight) * np.float32(1e6)))
    second = next(item for item in proto.graph.initializer if item.name == "w2")
    second.CopyFrom(constant("w2", onnx.numpy_helper.to_array(second) * np.float32(1e-6)))
    report = trtopt.build(saved(tmp_path, proto), cache_dir=str(tmp_path), recipes="none")
    assert report.shipped is not None and report.plain is not None
    assert report.accuracy is not None and report.accuracy.outputs["y"].nonfinite == 0
    if report.shipped.predicted_us > report.plain.predicted_us * _SLOWER:
        assert report.accuracy_cost is not None and "conv1" in report.accuracy_cost.nodes


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_eight_bits_are_held_against_q_dq_everywhere(tmp_path: Path, precision: str) -> None:
    samples = {"x": np.random.default_rng(0).standard_normal((4, 16, 16, 16)).astype(np.float32)}
    path = saved(tmp_path, conv_net(batch="n"))
    report = trtopt.build(path, calib=samples, precision=precision, cache_dir=str(tmp_path))
    assert_held(report)
    assert report.precision.requested == precision


def test_the_model_of_tensorrt_judges_its_own_backend(tmp_path: Path) -> None:
    out = tmp_path / "out.onnx"
    path = saved(tmp_path, computed_shapes())
    report = trtopt.optimize(
        path, output=str(out), backend="tensorrt", precision="fp16", cache_dir=str(tmp_path), **RANGE
    )
    assert report.judge == "model:tensorrt"
    assert report.shipped is not None and report.plain is not None
    assert report.shipped.predicted_us <= report.plain.predicted_us * _SLOWER
    assert report.dynamic_cost is not None and report.dynamic_cost.fixed == report.shipped
    assert report.rewriting.after == report.shipped


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_what_a_range_leaves_to_be_computed_costs(tmp_path: Path, backend: str) -> None:
    """The rows of a constant, as many as the batch: a constant at one batch, a kernel where it varies."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[N, 64, 64] x) => (float[N, 64, 64] y)
        { s = Shape (x) m = Expand (w, s) e = Softmax (m) a = MatMul (x, e) y = Relu (a) }"""
    )
    rng = np.random.default_rng(0)
    proto.graph.initializer.append(constant("w", rng.standard_normal((1, 64, 64)).astype(np.float32)))
    sizes = {"min_shapes": 1, "opt_shapes": 8, "max_shapes": 16}
    shapes: dict[str, Any] = {key: ({"x": (size, 64, 64)},) for key, size in sizes.items()}
    options: dict[str, Any] = {"precision": "fp16", "backend": backend, "recipes": "none", **shapes}
    out = tmp_path / "out.onnx"
    report = trtopt.optimize(saved(tmp_path, proto), output=str(out), cache_dir=str(tmp_path), **options)
    found, shipped = report.dynamic_cost, report.shipped
    assert found is not None and shipped is not None
    assert (found.kernels, shipped.kernels, found.fixed.kernels) == (1, 3, 2)
    assert found.share == shipped.predicted_us / found.fixed.predicted_us - 1 > 0.1
    assert found.remedy == "--opt-shapes x:8x64x64"


@pytest.mark.parametrize("precision", ["fp16", "tf32"])
def test_the_model_of_tensorrt_judges_recipes_as_it_ships(tmp_path: Path, precision: str) -> None:
    """The casts at the network's inputs and outputs count."""
    out = tmp_path / "out.onnx"
    options: dict[str, Any] = {"backend": "tensorrt", "precision": precision, "cache_dir": str(tmp_path)}
    report = trtopt.optimize(saved(tmp_path, conv_net()), output=str(out), **options)
    assert report.shipped is not None and report.rewriting.after == report.shipped


def test_the_text_has_both(tmp_path: Path) -> None:
    from rich.console import Console

    report = trtopt.build(saved(tmp_path, conv_net()), cache_dir=str(tmp_path), recipes="none")
    console = Console(record=True, width=120)
    console.print(view(replace(report, judged_apart="judged 1 us, ships 2 us"), verbose=True))
    text = console.export_text()
    assert "x plain FP16" in text and "Against plain" in text and "kernels" in text and "judged 1 us" in text


def test_two_profiles_of_one_shape_each_are_a_range(tmp_path: Path) -> None:
    ends = ({"x": (1, 16, 16, 16)}, {"x": (4, 16, 16, 16)})
    shapes = {"min_shapes": ends, "opt_shapes": ends, "max_shapes": ends}
    report = trtopt.build(saved(tmp_path, computed_shapes()), cache_dir=str(tmp_path), recipes="none", **shapes)
    assert_held(report)
    found = report.dynamic_cost
    assert found is not None and found.ranges == "x 1x16x16x16 .. 4x16x16x16"
    assert found.remedy == "--opt-shapes x:1x16x16x16"


def test_the_report_of_a_plain_cast_that_ships_is_of_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions and the 16-bit cost are those of what ships, not of what was taken back."""

    def unjudged(artifact: ModelArtifact, *args: Any, **_: Any) -> driver.Rewritten:
        return driver.apply(artifact, registry.select(args[2].recipes), target=Target())

    monkeypatch.setattr("trtopt.pipeline.session.rewrite", unjudged)
    monkeypatch.setattr("trtopt.pipeline.session._Run._slow_recipes", lambda *_: ())
    monkeypatch.setattr(registry, "all_recipes", lambda: (Detour(),))
    samples = {"x": np.random.default_rng(0).standard_normal((2, 8, 16, 16, 16)).astype(np.float32)}
    path = saved(tmp_path, conv_net())
    report = trtopt.build(path, calib=samples, precision="int8", cache_dir=str(tmp_path), no_cache=True)
    assert_held(report)
    assert report.guard and not any(item.kept for item in report.guard)
    assert report.sixteen_bit == report.shipped
    assert report.precision.int8_flop_share == 0


def test_a_search_is_what_was_judged_last(tmp_path: Path) -> None:
    samples = {"x": np.random.default_rng(0).standard_normal((6, 16, 16, 16)).astype(np.float32)}
    options: dict[str, Any] = {"precision": "int8", "max_accuracy_drop": 0.5, "opt_shapes": ({"x": (3, 16, 16, 16)},)}
    report = trtopt.build(saved(tmp_path, conv_net(batch="n")), calib=samples, cache_dir=str(tmp_path), **options)
    assert_held(report)
    assert report.search is not None and any(item.kept for item in report.guard)
    assert report.judged_apart == ""


@pytest.mark.parametrize(
    ("io", "shapes"),
    [
        (("x:fp16:hwc8", "y:fp16:chw"), RANGE),
        pytest.param(("x:fp16:hwc",), RANGE, marks=pytest.mark.long),
        pytest.param(("x:fp16:hwc",), {"opt_shapes": RANGE["opt_shapes"]}, marks=pytest.mark.long),
        pytest.param(("x:fp16:hwc8", "y:fp16:chw"), {"opt_shapes": RANGE["opt_shapes"]}, marks=pytest.mark.long),
    ],
)
def test_8_bit_regions_are_judged_with_the_inputs_and_outputs_that_ship(
    tmp_path: Path, io: tuple[str, ...], shapes: dict[str, Any]
) -> None:
    """Judged is shipped to the digit, so there is nothing to say of what lies between."""
    samples = {"x": np.random.default_rng(0).standard_normal((6, 16, 16, 16)).astype(np.float32)}
    options: dict[str, Any] = {"cache_dir": str(tmp_path), "precision": "int8", "calib": samples, **shapes}
    path = saved(tmp_path, conv_net(batch="n"))
    report = trtopt.build(path, io=io, **options)
    assert_held(report)
    assert any(item.kept for item in report.guard) and report.judged_apart == ""
    other = trtopt.build(path, **options)  # prices of one are not those of the other
    assert other.judged_apart == "" and other.sixteen_bit != report.sixteen_bit


def test_what_stays_fp32_shows_in_what_ships_and_was_not_judged(tmp_path: Path) -> None:
    """The exact difference, however small, and why."""
    samples = {"x": np.random.default_rng(0).standard_normal((6, 16, 16, 16)).astype(np.float32) * 3e4}
    options: dict[str, Any] = {"opt_shapes": RANGE["opt_shapes"], "calib": samples, "cache_dir": str(tmp_path)}
    report = trtopt.build(saved(tmp_path, conv_net(batch="n")), **options)
    shipped, _ = assert_held(report)
    assert report.precision.kept and report.rewriting.after is not None
    judged_us, us = report.rewriting.after.predicted_us, shipped.predicted_us
    assert report.judged_apart == (
        f"judged {judged_us:.2f} us after its recipes, ships {us:.2f} us ({us / judged_us - 1:+.2%}); between them: "
        f"{len(report.precision.kept)} nodes in a wider type"
    )


@pytest.mark.parametrize("slower", [False, True])
def test_numbers_that_make_what_ships_slower_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slower: bool
) -> None:
    """Also where they need no node more. A change is priced before what it is held against."""
    proto = conv_net(batch="n")
    weights = {item.name: item for item in proto.graph.initializer}
    scale = np.logspace(-1, 1, 32, dtype=np.float32)
    for name, factor in (("w1", scale[:, None, None, None]), ("w2", 1 / scale[None, :, None, None])):
        weights[name].CopyFrom(constant(name, onnx.numpy_helper.to_array(weights[name]) * factor))
    prices = itertools.count(1000.0, -10.0 if slower else 0.0)
    monkeypatch.setattr("trtopt.pipeline.lower.form_price", lambda *_: lambda *_: next(prices))
    samples = {"x": np.random.default_rng(0).standard_normal((32, 16, 16, 16)).astype(np.float32)}
    options: dict[str, Any] = {"opt_shapes": RANGE["opt_shapes"], "calib": samples, "cache_dir": str(tmp_path)}
    report = trtopt.build(saved(tmp_path, proto), precision="int8", **options)
    step = next(step for step in report.steps if step.name == "smooth")
    assert (step.changes == 0) == slower == step.details[0].endswith("not kept, the network is slower with it")


def test_a_product_whose_saved_form_has_a_node_more_is_built(tmp_path: Path) -> None:
    """The lower operand is given another axis in the file, for ONNX Runtime; no layer claims what the graph has not."""
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        g (float[2, 8, 4] x) => (float[8, 2, 2] y)
        { w = Constant <value = float[4, 2] {1, 2, 3, 4, 5, 6, 7, 8}> ()
          t = Transpose <perm = [1, 0, 2]> (x) y = MatMul(t, w) }"""
    )
    for node in proto.graph.node:
        node.name = node.output[0]
    report = trtopt.build(saved(tmp_path, proto), precision="fp16", no_cache=True, cache_dir=str(tmp_path))
    assert_held(report)
    assert report.engine is not None
    assert not [name for layer in report.engine.layers for name in layer.onnx_nodes if name.startswith("trtopt/saved")]


def test_of_a_table_the_bytes_are_those_of_the_rows_that_are_read(tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((50_000, 64)).astype(np.float32)
    nodes = [helper.make_node("Gather", ["table", "ids"], ["y"], name="gather")]
    path = saved(tmp_path, model(nodes, [("ids", np.int64, [8, 16])], [("y", np.float32)], [constant("table", table)]))
    report = trtopt.build(path, cache_dir=str(tmp_path), recipes="none")
    assert report.shipped is not None and report.plain is not None and report.analysis is not None
    assert report.shipped.bytes == report.analysis.totals.bytes < report.plain.bytes * 1.01
    assert report.shipped.bytes < 8 * 16 * (2 * 64 * 4 + 8) * 1.01


def test_a_network_is_compiled_once_as_it_is_judged_and_as_it_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is asked for each network, with its profile, once: not again for the price of what ships."""
    asked: list[tuple[object, ...]] = []
    layers = Compiler.layers

    def counted(self: Compiler, request: BuildRequest) -> tuple[LayerInfo, ...]:
        proto = onnx.load(request.onnx)
        nodes = tuple((node.op_type, *node.input, *node.output) for node in proto.graph.node)
        types = tuple((value.name, value.type.tensor_type.elem_type) for value in proto.graph.value_info)
        asked.append((nodes, types, repr(request.profiles)))
        return layers(self, request)

    monkeypatch.setattr(Compiler, "layers", counted)
    path = saved(tmp_path, computed_shapes())
    options = {**RANGE, "precision": "fp16", "gpu": "L4", "cache_dir": str(tmp_path / "cache")}
    report = trtopt.optimize(path, output=tmp_path / "optimized.onnx", **options)
    assert report.shipped is not None and report.rewriting is not None and report.rewriting.after is not None
    assert report.shipped.predicted_us == pytest.approx(report.rewriting.after.predicted_us, rel=1e-12)
    assert len(asked) == len(set(asked)) >= 4


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_a_pruned_network_is_held_against_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """What is taken in place of the slower form is pruned as well, and the report is of that."""
    monkeypatch.setattr("trtopt.pipeline.session.rewrite", unjudged)
    monkeypatch.setattr(registry, "all_recipes", lambda: (Detour(),))
    samples = {"x": np.random.default_rng(0).standard_normal((4, 8, 16, 16, 16)).astype(np.float32)}
    options: dict[str, Any] = {"sparse_all": True, "allow_accuracy_loss": True, "save_onnx": str(tmp_path / "out.onnx")}
    report = trtopt.build(saved(tmp_path, conv_net()), calib=samples, precision=precision, no_cache=True, **options)
    assert_held(report)
    step = next(step for step in report.steps if step.name == "held-against-plain")
    assert step.changes == 1 and step.details[0].startswith("without detour")
    assert report.sparsity is not None
    assert [layer.nodes for layer in report.sparsity.layers if layer.sparse] == [("conv1",), ("conv2",), ("gemm",)]
    weights = [onnx.numpy_helper.to_array(item) for item in onnx.load(tmp_path / "out.onnx").graph.initializer]
    kernels = [item for item in weights if item.ndim == 4]
    assert kernels and all(2 * np.count_nonzero(item) <= item.size for item in kernels)
