"""The gates of a report: figures that pass, figures that fail, and what cannot be judged."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from analysis_samples import full_analysis
from profile_samples import small_profile
from report_samples import ENGINE, LAYER, full_report

from trtopt.errors import UsageError
from trtopt.gates.check import Limits, changes, evaluate
from trtopt.gates.facts import Facts, KernelFacts, ModelIdentity, ModelInput, facts_of
from trtopt.report.schema.build import (
    AccuracyRecord,
    Achieved,
    HostRecord,
    MetricRecord,
    OutputAccuracy,
    PassedTensor,
    PrecisionRecord,
)
from trtopt.report.schema.check import Checked, CheckReport, Gate
from trtopt.report.text import check as words

CHECKED = Checked("r.json", "trtopt.build/1", "model.onnx", "ab", "L4", "tensorrt-rtx 1.7", "int8")
MODEL = ModelIdentity("model.onnx", "ab", (ModelInput("x", "float32", ("N", 3)),))
GOOD = OutputAccuracy(40.0, 0.999, 0.1, 0.99)


def kernel(*nodes: str, dtype: str = "int8", us: float | None = 10.0, name: str = "") -> KernelFacts:
    return KernelFacts(name or f"{nodes[0]}_myl0", nodes, dtype, us, (nodes, dtype))


LAYERS = (kernel("conv1"), kernel("conv2"), kernel("head", dtype="fp16"))


def facts(**changes: Any) -> Facts:
    """A report of an engine that passes everything, with other values of the named fields."""
    base = Facts(
        CHECKED,
        MODEL,
        {"x": (8, 3)},
        "tensorrt-rtx",
        times={"predicted": 100.0},
        shares={"int8": 0.8, "fp16": 0.2},
        kernels=3,
        layers=LAYERS,
        bytes=1_000_000,
        output_names=("scores",),
        outputs={"scores": GOOD},
        metric=MetricRecord("top1", 0.95, 0.94, 0.01),
        own_failures=(),
    )
    return dataclasses.replace(base, **changes)


def judged(after: Facts, before: Facts | None = None, **limits: Any) -> dict[str, Gate]:
    return {gate.name: gate for gate in evaluate(after, before, Limits(**limits)).gates}


def failed(after: Facts, before: Facts | None = None, **limits: Any) -> list[str]:
    return [name for name, gate in judged(after, before, **limits).items() if gate.verdict == "failed"]


def test_a_report_equal_to_its_baseline_passes_every_gate() -> None:
    found = judged(facts(), facts())
    assert list(found) == [
        "build",
        "finite",
        "accuracy:top1",
        "latency",
        "share:8-bit",
        "share:16-bit",
        "bytes",
        "kernels",
    ]
    assert {gate.verdict for gate in found.values()} == {"passed"}
    assert all(gate.is_default for name, gate in found.items() if name not in ("build", "finite"))


@pytest.mark.parametrize(
    ("change", "gate"),
    [
        ({"metric": MetricRecord("top1", 0.95, 0.9299, 0.0201)}, "accuracy:top1"),
        ({"times": {"predicted": 105.1}}, "latency"),
        ({"shares": {"int8": 0.789, "fp16": 0.211}}, "share:8-bit"),
        ({"shares": {"int8": 0.8, "fp16": 0.18, "fp32": 0.02}}, "share:16-bit"),
        ({"bytes": 1_100_001}, "bytes"),
        ({"kernels": 4}, "kernels"),
    ],
)
def test_each_default_fails_just_beyond_its_limit(change: dict[str, Any], gate: str) -> None:
    assert failed(facts(**change), facts()) == [gate]


@pytest.mark.parametrize(
    "change",
    [
        {"metric": MetricRecord("top1", 0.95, 0.93, 0.02)},
        {"times": {"predicted": 105.0}},
        {"shares": {"int8": 0.79, "fp16": 0.21}},
        {"shares": {"int8": 0.5, "fp8": 0.3, "fp16": 0.1, "bf16": 0.1}},
        {"shares": {"int8": 0.8, "fp16": 0.19, "fp32": 0.01}},
        {"bytes": 1_100_000},
        {"kernels": 1},
    ],
)
def test_each_default_passes_at_its_limit(change: dict[str, Any]) -> None:
    assert failed(facts(**change), facts()) == []


def test_a_threshold_replaces_the_default_of_its_gate_and_of_no_other() -> None:
    worse = facts(
        metric=MetricRecord("top1", 0.95, 0.93, 0.02),
        times={"predicted": 120.0},
        shares={"int8": 0.4, "fp16": 0.6},
        bytes=2_000_000,
        kernels=9,
    )
    loose = {
        "max_accuracy_drop": 0.05,
        "max_latency_regress": 0.5,
        "min_share": {"int8": 0.3},
        "max_bytes": 2_000_000,
        "max_kernels": 9,
    }
    assert failed(worse, facts(), **loose) == []
    for name, gate in (
        ("max_latency_regress", "latency"),
        ("min_share", "share:8-bit"),
        ("max_bytes", "bytes"),
        ("max_kernels", "kernels"),
    ):
        assert failed(worse, facts(), **{key: value for key, value in loose.items() if key != name}) == [gate]
    tight = {"max_accuracy_drop": 0.015, "max_latency_regress": 0.1, "min_share": {"int8": 0.5}}
    tight |= {"max_bytes": 1_999_999, "max_kernels": 8}
    names = ["accuracy-fp32", "latency", "share:int8", "bytes", "kernels"]
    assert failed(worse, facts(metric=MetricRecord("top1", 0.95, 0.94, 0.01)), **tight) == names


def test_without_a_baseline_thresholds_alone_are_judged() -> None:
    found = judged(facts(), max_accuracy_drop=0.005, max_kernels=3, min_share={"int8": 0.9, "fp8": 0.0})
    verdicts = {name: gate.verdict for name, gate in found.items()}
    assert verdicts == {
        "build": "passed",
        "finite": "passed",
        "accuracy-fp32": "failed",
        "share:int8": "failed",
        "share:fp8": "passed",
        "kernels": "passed",
    }


def test_a_drop_that_training_caused_says_so() -> None:
    now = facts(metric=MetricRecord("top1", 0.90, 0.89, 0.01))
    reason = judged(now, facts())["accuracy:top1"].reason
    assert "5 points less accurate than the baseline" in reason
    assert "its FP32 form is 5 points less accurate too" in reason
    quantized = facts(metric=MetricRecord("top1", 0.95, 0.89, 0.06))
    assert "FP32" not in judged(quantized, facts())["accuracy:top1"].reason


def test_without_a_metric_outputs_are_judged_by_agreement_else_cosine() -> None:
    boxes = OutputAccuracy(30.0, 0.97, 0.1, None)
    plain = facts(metric=None, outputs={"scores": GOOD, "boxes": boxes}, output_names=("scores", "boxes"))
    worse = dataclasses.replace(
        plain, outputs={"scores": dataclasses.replace(GOOD, top1_agreement=0.97), "boxes": boxes}
    )
    assert failed(worse, plain) == ["accuracy:scores"]
    assert failed(plain, max_accuracy_drop=0.02) == ["accuracy-fp32:boxes"]
    found = judged(plain, plain)["accuracy:boxes"]
    assert found.title == "boxes: cosine with FP32" and found.after == 0.97


def test_gates_of_outputs_name_what_these_were_compared_with() -> None:
    plain = facts(metric=None)
    recorded = dataclasses.replace(plain, reference="the recorded outputs")
    gates = judged(recorded, plain, max_accuracy_drop=0.001)
    for name in ("accuracy-fp32:scores", "accuracy:scores"):
        assert "the recorded outputs" in gates[name].title and "FP32" not in gates[name].title + gates[name].reason
    assert "compared with changed: FP32 in the baseline, the recorded outputs here" in " ".join(
        evaluate(recorded, plain, Limits()).notes
    )


def test_an_output_measured_in_another_way_before_is_not_judged() -> None:
    plain = facts(metric=None)
    old = facts(metric=None, outputs={"scores": dataclasses.replace(GOOD, top1_agreement=None)})
    gate = judged(plain, old)["accuracy:scores"]
    assert gate.verdict == "not judged" and gate.reason == "the baseline has no top-1 agreement of it"


def test_a_baseline_that_did_not_know_what_holds_scores_is_judged_by_what_is_known_now() -> None:
    states = facts(metric=None, outputs={"scores": dataclasses.replace(GOOD, has_scores=False)})
    gate = judged(states, facts(metric=None))["accuracy:scores"]
    assert gate.verdict == "passed" and gate.title == "scores: cosine with FP32"


def test_an_sqnr_is_bounded_against_the_baseline_in_db() -> None:
    def of(value: float) -> Facts:
        return facts(metric=MetricRecord("sqnr", math.nan, value, math.nan))

    assert failed(of(39.1), of(40.0)) == []
    assert failed(of(38.9), of(40.0)) == ["accuracy:sqnr"]
    assert judged(of(39.1), of(40.0))["accuracy:sqnr"].unit == "dB"
    assert failed(of(38.9), of(40.0), max_accuracy_drop=2.0) == []


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_not_finite_fails(value: float) -> None:
    assert failed(facts(metric=MetricRecord("top1", 0.95, value, value)), facts()) == ["accuracy:top1"]
    assert failed(facts(), facts(metric=MetricRecord("top1", 0.95, math.nan, 0.0))) == ["accuracy:top1"]
    assert failed(facts(times={"predicted": math.nan}), facts()) == ["latency"]
    assert failed(facts(outputs={"scores": dataclasses.replace(GOOD, nonfinite=3)})) == ["finite"]


def test_what_cannot_be_judged_fails_only_where_it_was_asked_for() -> None:
    bare = Facts(CHECKED, MODEL, own_failures=())
    found = judged(bare, facts())
    assert {name for name, gate in found.items() if gate.verdict == "not judged"} == {
        "accuracy:top1",
        "latency",
        "share:8-bit",
        "bytes",
        "kernels",
    }
    assert all(gate.reason for name, gate in found.items() if name != "build")
    asked = {"max_accuracy_drop": 0.1, "max_latency_regress": 0.1, "min_share": {"int8": 0.1}}
    names = ["accuracy:top1", "latency", "share:int8", "bytes", "kernels"]
    assert failed(bare, facts(), **asked, max_bytes=1, max_kernels=1) == names
    assert "not measured" in judged(bare, max_accuracy_drop=0.1)["accuracy"].reason
    other = facts(metric=MetricRecord("mine", 1.0, 1.0, 0.0))
    assert judged(facts(), other)["accuracy:top1"].reason == "the baseline has the metric mine"


def test_the_gates_of_the_build_itself_are_kept() -> None:
    found = judged(facts(own_failures=("output scores: SQNR 3 dB",)))
    assert found["build"].verdict == "failed" and "SQNR 3 dB" in found["build"].reason
    report = full_report(gate_failures=("metric top1",))
    config = {**report.config, "allow_accuracy_loss": True}
    allowed = facts_of(dataclasses.replace(report, config=config, model=_model()), Path("r.json"))
    result = evaluate(allowed, None, Limits(allow_synthetic=True))
    assert "build" not in [gate.name for gate in result.failed]
    assert result.notes == ("allowed by --allow-accuracy-loss of the build: metric top1",)


def test_ranges_from_random_data_are_refused_unless_allowed() -> None:
    assert failed(facts(synthetic=True)) == ["calibration"]
    assert failed(facts(synthetic=False)) == []
    found = evaluate(facts(synthetic=True), None, Limits(allow_synthetic=True))
    assert not found.failed and "random data" in found.notes[0]


def test_the_graph_of_an_optimized_model_says_its_eight_bit_share_only() -> None:
    graph = facts(shares={"int8": 0.8}, all_shares=False, share_of="flop in the graph")
    assert failed(graph, min_share={"int8": 0.7}) == []
    assert judged(graph, min_share={"fp16": 0.1})["share:fp16"].verdict == "failed"
    assert list(judged(graph, graph)).count("share:16-bit") == 0
    less = dataclasses.replace(graph, shares={"int8": 0.5})
    assert failed(less, graph) == ["share:8-bit"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"checked": dataclasses.replace(CHECKED, schema="trtopt.profile/1")}, "another kind"),
        (
            {"model": dataclasses.replace(MODEL, inputs=(ModelInput("y", "float32", ("N", 3)),))},
            "other inputs: y: float32 .x3 there, x: ",
        ),
        ({"model": dataclasses.replace(MODEL, inputs=(ModelInput("x", "float32", ("N", 4)),))}, "other inputs"),
        ({"output_names": ("boxes",)}, "other outputs: boxes there, scores here"),
        ({"checked": dataclasses.replace(CHECKED, gpu="A100")}, "another GPU: A100; this report is for L4"),
        ({"compiler": "tensorrt"}, "built by tensorrt, this by tensorrt-rtx"),
        ({"shapes": {"x": (1, 3)}}, "other shapes: x:1x3 there, x:8x3 here"),
        ({"layers": (kernel("a"), kernel("b"))}, "no layer in common"),
    ],
)
def test_a_baseline_of_something_else_is_refused(change: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        evaluate(facts(), facts(**change), Limits())


def test_what_may_differ_is_noted() -> None:
    model = ModelIdentity("elsewhere/m.onnx", "cd", (ModelInput("x", "float32", ("batch", 3)),))
    checked = dataclasses.replace(CHECKED, sha256="cd", precision="fp16", backend="tensorrt-rtx 1.6")
    found = evaluate(
        facts(), facts(model=model, checked=checked, accuracy_samples="8 samples (eval, engine)"), Limits()
    )
    assert [note.partition(" changed: ")[0] for note in found.notes] == [
        "the model",
        "the precision asked for",
        "the compiler",
        "the samples of the accuracy",
    ]
    assert evaluate(facts(), facts(), Limits()).notes == ()


def test_what_needs_a_baseline_says_so_and_a_report_without_gates_is_no_success() -> None:
    with pytest.raises(UsageError, match="needs a baseline"):
        evaluate(facts(), None, Limits(max_latency_regress=0.1))
    with pytest.raises(UsageError, match="nothing to judge"):
        evaluate(Facts(CHECKED), None, Limits())


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"max_accuracy_drop": -0.1}, "--max-accuracy-drop"),
        ({"max_latency_regress": math.nan}, "--max-latency-regress"),
        ({"max_kernels": -1}, "--max-kernels"),
        ({"min_share": {"int4": 0.5}}, "did you mean int8?"),
        ({"min_share": {"INT8": 0.5}}, "did you mean int8?"),
        ({"min_share": {"int8": 50}}, "give 0.5 for 50 %"),
    ],
)
def test_a_wrong_threshold_is_named(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        Limits(**limits)
    assert words in str(caught.value)


def test_where_to_look_is_aligned_by_nodes() -> None:
    """conv1 lost INT8, conv2 was split in two kernels, and head became slower, under other kernel names."""
    now = facts(
        kernels=4,
        shares={"int8": 0.4, "fp16": 0.6},
        times={"predicted": 130.0},
        layers=(
            kernel("conv1", dtype="fp16", name="other_1"),
            kernel("conv2", name="other_2", us=6.0),
            kernel("conv2", name="other_3", us=4.0),
            kernel("head", dtype="fp16", us=40.0, name="other_4"),
        ),
    )
    found = judged(now, facts())
    assert [change.nodes for change in found["share:8-bit"].layers] == [("conv1",)]
    assert found["share:8-bit"].layers[0].dtypes == (("int8",), ("fp16",))
    assert [change.nodes for change in found["kernels"].layers] == [("conv2",)]
    assert found["kernels"].layers[0].kernels == (1, 2)
    assert found["kernels"].reason == "1 kernel more than the baseline, at conv2"
    assert [change.nodes for change in found["latency"].layers] == [("head",)]
    assert found["latency"].layers[0].us == (10.0, 40.0)
    narrower = facts(metric=MetricRecord("top1", 0.95, 0.5, 0.45), layers=(*LAYERS[:2], kernel("head", dtype="int8")))
    assert [change.nodes for change in judged(narrower, facts())["accuracy:top1"].layers] == [("head",)]


def test_the_most_telling_layer_comes_first() -> None:
    layers = (kernel("conv1", us=11.0), kernel("conv2", us=30.0), kernel("head", dtype="fp16", us=20.0))
    found = judged(facts(times={"predicted": 130.0}, layers=layers), facts())["latency"]
    assert [change.nodes for change in found.layers] == [("conv2",), ("head",), ("conv1",)]


def test_a_region_is_as_narrow_as_its_narrowest_kernel() -> None:
    """A quantizer in 16 bits before an 8-bit product: both are 16 bits when the product is."""
    both = (kernel("conv", dtype="fp16", name="a"), kernel("conv", dtype="int8", name="b"))
    now = (kernel("conv", dtype="fp16", name="a"), kernel("conv", dtype="fp16", name="b"))
    gate = judged(facts(shares={"fp16": 1.0}, layers=now), facts(layers=both))["share:8-bit"]
    assert [change.dtypes for change in gate.layers] == [(("fp16", "int8"), ("fp16",))]


def test_nodes_numbered_anew_are_aligned_in_their_order() -> None:
    def of(*layers: tuple[str, str]) -> Facts:
        return facts(layers=tuple(KernelFacts(node, (node,), dtype, 10.0, "gemm") for node, dtype in layers))

    found = changes(of(("MatMul_1", "int8"), ("MatMul_2", "int8")), of(("MatMul_3", "int8"), ("MatMul_4", "fp16")))
    assert [(change.nodes, change.dtypes) for change in found] == [(("MatMul_4", "MatMul_2"), (("int8",), ("fp16",)))]


def test_an_added_kernel_without_a_counterpart_is_found() -> None:
    found = changes(facts(), facts(layers=(*LAYERS, kernel("softmax"))))
    assert [(change.nodes, change.kernels) for change in found] == [(("softmax",), (0, 1))]


def _model() -> dict[str, Any]:
    inputs = [{"name": "x", "dtype": "float32", "shape": ["N", 3]}]
    return {"path": "model.onnx", "sha256": "ab", "opset": 21, "inputs": inputs}


def test_a_model_that_code_makes_is_called_by_the_code() -> None:
    made = {**_model(), "path": None, "target": "nets.py:resnet"}
    assert facts_of(full_report(model=made), Path("r.json")).checked.model == "nets.py:resnet"


def test_the_facts_of_a_build_come_from_its_engine() -> None:
    sync = dataclasses.replace(LAYER, name="sync", is_kernel=False, kind="none")
    report = full_report(model=_model(), engine=dataclasses.replace(ENGINE, layers=(LAYER, sync)))
    found = facts_of(report, Path("r.json"))
    assert found.checked.backend == "tensorrt-rtx 1.7.1.116" and found.compiler == "tensorrt-rtx"
    assert found.shapes == {"x": (8, 3, 32, 32)}
    assert found.kernels == 23 and found.bytes == 2_612_345
    assert [(item.name, item.dtype, item.us) for item in found.layers] == [("conv1", "fp16", None)]
    assert found.shares == {"int8": 0.62, "fp16": 0.38} and found.all_shares
    assert found.synthetic is False and found.own_failures == ()


@pytest.mark.parametrize(("precision", "synthetic"), [("fp16", None), ("fp32", None), ("int8", True), ("auto", True)])
def test_random_data_is_judged_where_it_gives_8_bit_ranges(precision: str, synthetic: bool | None) -> None:
    """An FP16 build runs samples too, to find what overflows, and has no range from them."""
    report = full_report(model=_model(), precision=PrecisionRecord(precision))
    assert report.calibration is not None
    calibration = dataclasses.replace(report.calibration, source="synthetic")
    assert facts_of(dataclasses.replace(report, calibration=calibration), Path("r.json")).synthetic is synthetic


def test_shares_are_of_time_where_flop_is_not_known() -> None:
    achieved = {"int8": Achieved(2, 0.0, 0.3), "fp16": Achieved(1, 0.0, 0.7)}
    found = facts_of(full_report(model=_model(), precision=PrecisionRecord("int8", achieved)), Path("r.json"))
    assert found.shares == {"int8": 0.3, "fp16": 0.7} and found.share_of == "predicted time"


@pytest.mark.parametrize(
    ("requested", "shares"), [("int8", {"int8": 0.7}), ("fp8", {"fp8": 0.7}), ("auto", {"8-bit": 0.7})]
)
def test_without_an_engine_the_graph_gives_the_share(requested: str, shares: dict[str, float]) -> None:
    report = full_report(model=_model(), engine=None, precision=PrecisionRecord(requested, {}, 0.7))
    found = facts_of(report, Path("r.json"))
    assert found.shares == shares and not found.all_shares and found.kernels is None


def test_outputs_that_the_host_computes_are_judged_by_the_tensors_between() -> None:
    bad = OutputAccuracy(math.nan, math.nan, math.nan, None, shapes_differ=3)
    accuracy = AccuracyRecord(8, "eval", "onnx-only", {"boxes": bad, "t": GOOD}, host_outputs=("boxes",))
    host = HostRecord("m.host.onnx", ("NMS",), 1, ("t",), ("boxes",), (PassedTensor("t", "float32", (1, 3)),))
    found = facts_of(full_report(model=_model(), accuracy=accuracy, host=host), Path("r.json"))
    assert found.outputs == {"t": GOOD} and found.output_names == ("boxes",)
    ran = dataclasses.replace(accuracy, engine={"boxes": bad, "t": dataclasses.replace(GOOD, cosine=0.5)})
    found = facts_of(full_report(model=_model(), accuracy=ran, host=host), Path("r.json"))
    assert found.outputs is not None and found.outputs["t"].cosine == 0.5


def test_a_profile_is_judged_by_what_was_measured() -> None:
    report = small_profile()
    found = facts_of(report, Path("p.json"))
    assert found.kernels == sum(layer.measured_us > 0 for layer in report.layers)
    assert found.times is not None
    assert found.times["measured, sum of the layers"] == report.totals.measured_us
    slow = dataclasses.replace(
        found, times={name: 1.2 * value for name, value in found.times.items()}, layers=found.layers
    )
    gate = judged(slow, found)["latency"]
    assert gate.verdict == "failed" and gate.reason == "20 % slower than the baseline"


def test_an_analysis_is_judged_by_what_is_predicted() -> None:
    """TF32 counts as FP32, as in the report of a build."""
    report = full_analysis()
    rows = (dataclasses.replace(report.layers[0], dtype="tf32", flop=300), *report.layers[1:2])
    rows = (rows[0], dataclasses.replace(rows[1], dtype="fp16", flop=100))
    found = facts_of(dataclasses.replace(report, model=_model(), layers=rows), Path("a.json"))
    assert found.shares == {"fp32": 0.75, "fp16": 0.25}
    assert found.kernels == 2 and found.times == {"predicted": report.totals.predicted_us}


def test_times_taken_in_the_same_way_are_compared() -> None:
    both = {"measured, one inference": 80.0, "measured, sum of the layers": 100.0}
    gate = judged(facts(times={"measured, sum of the layers": 101.0}), facts(times=both))["latency"]
    assert (gate.title, gate.before) == ("latency, measured, sum of the layers", 100.0)


def test_the_json_says_whether_it_passed() -> None:
    found = evaluate(facts(kernels=4), facts(), Limits())
    assert isinstance(found, CheckReport)
    value = found.to_json_dict()
    assert value["schema"] == "trtopt.check/1" and value["passed"] is False
    assert {"name": "kernels", "verdict": "failed"}.items() <= value["gates"][-1].items()


def test_a_metric_of_the_graph_alone_is_judged_with_the_outputs_of_the_engine() -> None:
    """Reports of engines that ran, from before the metric was measured on them, or where it could not be."""
    metric = MetricRecord("top1", 0.95, 0.80, 0.15)
    bad = {"scores": OutputAccuracy(3.0, 0.5, 9.0, 0.2)}
    after = facts(metric=metric, metric_ran=False, outputs=bad)
    assert {"accuracy:top1", "accuracy:scores"} <= set(failed(after, facts()))
    assert "accuracy:scores" not in judged(facts(metric=metric, outputs=bad), facts())


def test_facts_of_an_engine_without_a_metric_of_its_own_have_the_graphs() -> None:
    report = full_report()
    assert report.accuracy is not None
    metric = MetricRecord("top1", 0.95, 0.80, 0.15)
    ran = dataclasses.replace(report.accuracy, engine=report.accuracy.outputs, metric=metric, engine_metric=None)
    found = facts_of(dataclasses.replace(report, accuracy=ran), Path("r.json"))
    assert found.metric == metric and not found.metric_ran


def test_waits_between_streams_are_no_kernels() -> None:
    analysis = full_analysis()
    sync = dataclasses.replace(analysis.layers[0], name="stream syncs", kind="sync", onnx_nodes=())
    found = facts_of(dataclasses.replace(analysis, model=_model(), layers=(*analysis.layers, sync)), Path("a.json"))
    assert found.kernels == len(found.layers) == len(analysis.layers)


def test_a_limit_is_never_below_nothing() -> None:
    now = facts(shares={"int8": 0.0, "fp16": 1.0})
    assert judged(now, now)["share:8-bit"].limit == 0.0


def test_what_failed_is_told_from_its_limit() -> None:
    failed = judged(facts(bytes=1_949_999), None, max_bytes=1_910_000)["bytes"]
    assert words.figure(failed.after, failed) == "1949999 B" and words.limit(failed) == "at most 1910000 B"
    passed = judged(facts(bytes=1_949_999), None, max_bytes=3_000_000)["bytes"]
    assert words.figure(passed.after, passed) == "1.9 MB"
