"""What a person reads after a build."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

import pytest
from report_samples import ACCURACY, ENGINE, full_report
from rich.console import Console

from trtopt.cli.build import make_parser, parse_arguments
from trtopt.cli.options import config_from
from trtopt.config import BuildConfig
from trtopt.report.schema.analysis import EngineAnalysis, LayerRow, Uncosted, totals_of
from trtopt.report.schema.build import (
    AccuracyRecord,
    Achieved,
    BuildReport,
    CalibrationRecord,
    KeptNode,
    NetworkIo,
    OutputAccuracy,
    PrecisionRecord,
)
from trtopt.report.schema.decisions import BuilderTrial, GuardRecord, WeightsRecord
from trtopt.report.schema.shipped import DynamicCost, PlainCost
from trtopt.report.schema.steps import Cost, Refusal, RegionRecord, RewritingRecord, StepRecord
from trtopt.report.text.blocks import Command
from trtopt.report.text.build import view
from trtopt.report.text.command import build_line
from trtopt.report.text.format import bytes_text, decibels, percent, seconds_text, some
from trtopt.report.text.verdict import accuracy_texts, advice


def _text(report: BuildReport, width: int = 100, *, verbose: bool = True) -> str:
    console = Console(width=width, no_color=True, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(view(report, verbose=verbose))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _section(report: BuildReport, title: str) -> str:
    """The lines under a heading, joined, with runs of spaces made one."""
    lines = _text(report).splitlines()
    start = lines.index(title)
    end = next((index for index in range(start, len(lines)) if lines[index] == ""), len(lines))
    return " ".join(" ".join(lines[start + 1 : end]).split())


def test_the_verdict_is_five_lines() -> None:
    rows = _text(_ready(), verbose=False).splitlines()[:5]
    assert rows == [
        "INT8 on L4, TensorRT for RTX: 179 us predicted at batch 8 (44,700/s), 1.11x FP16",
        "size       2.6 MB (0.72x its weights in FP16), 23 kernels",
        "accuracy   top1 0.9889 in FP32, 0.9861 now, on 360 samples (eval)",
        "verified   on the CPU only: the engine itself has not run here",
        "ready      model.rtx.engine",
    ]


def test_a_build_in_16_bits_is_held_against_plain_16_bits() -> None:
    report = dataclasses.replace(_ready(), plain_forms=(PlainCost(20, 0, 20, 198.7, "fp16"),))
    half = dataclasses.replace(report, precision=dataclasses.replace(report.precision, requested="fp16"))
    assert _text(half, verbose=False).splitlines()[0].endswith(", 1.11x plain FP16")


def _ready() -> BuildReport:
    engine = dataclasses.replace(ENGINE, profiles=({"x": {"min": [8, 64], "opt": [8, 64], "max": [8, 64]}},))
    calibration = CalibrationRecord("user", "auto", 360, 1.0, 1_000_000)
    return full_report(
        engine=engine,
        calibration=calibration,
        shipped=Cost(23, 0, 10, 179.0),
        plain_forms=(PlainCost(20, 0, 20, 198.7, "fp16"), PlainCost(30, 0, 20, 260.0, "int8")),
        parameters=1_805_556,
    )


def test_what_keeps_an_engine_from_being_ready_stands_in_the_place_of_ready() -> None:
    calibration = CalibrationRecord("synthetic", "auto", 16, 1.0, 0)
    report = dataclasses.replace(_ready(), calibration=calibration, shipped=Cost(23, 0, 10, 300.0))
    last = _text(report, verbose=False).splitlines()[4]
    assert last == "look at    8-bit ranges from RANDOM data; slower than plain"


def test_a_time_that_leaves_kernels_out_says_so() -> None:
    left_out = (Uncosted("Pad", ("/pad",)), Uncosted("Conv", ("/conv",)))
    analysis = EngineAnalysis("L4", (), totals_of(()), left_out)
    last = _text(dataclasses.replace(_ready(), analysis=analysis), verbose=False).splitlines()[4]
    assert last == "look at    the time is without Pad, Conv"


def test_against_plain_says_what_changed() -> None:
    found = _section(_ready(), "Against plain")
    assert found.startswith("time 199 us -> 179 us kernels 20 -> 23 bytes moved 20 B -> 10 B")
    assert "INT8 everywhere would take 260 us" in found


def test_a_portable_engine_and_an_onnx_model_are_named_as_such() -> None:
    assert _text(full_report(gpu=None, analysis=None)).startswith("INT8 on a portable engine, TensorRT for RTX")
    for judge, target in (("model:tensorrt", "TensorRT"), ("compiler:tensorrt-rtx 1.7", "TensorRT for RTX")):
        first = _text(full_report(engine=None, analysis=None, judge=judge)).splitlines()[0]
        assert first == f"ONNX model for {target} on L4, INT8"


def test_the_advice_is_three_lines_that_the_command_takes(tmp_path: Path) -> None:
    report = dataclasses.replace(_ready(), config={**_ready().config, "calib": None})
    synthetic = dataclasses.replace(ACCURACY, source="synthetic")
    commands = [
        block.text for block in advice(dataclasses.replace(report, accuracy=synthetic)) if isinstance(block, Command)
    ]
    assert len(commands) == 3
    assert commands[0].startswith("trtopt build ") and "--calib samples.npz" in commands[0]
    for text in commands:
        name, *words = shlex.split(text)[1:]
        if name == "build":
            args = parse_arguments(make_parser(), words)
            assert config_from(args, BuildConfig, "build").precision == "int8"


def test_options_of_a_file_that_are_none_are_left_out_of_the_lines() -> None:
    report = dataclasses.replace(_ready(), config={"opt_shapes": 5, "io": 7, "precision": "no", "metric": "top1"})
    assert build_line(report, {}) == "trtopt build model.onnx --metric top1"


def test_options_that_nothing_uses_are_left_out_of_the_lines() -> None:
    report = dataclasses.replace(_ready(), config={"steps": 5, "calib": "s.npz", "calib_method": "max"})
    assert build_line(report, {}) == "trtopt build model.onnx --calib s.npz"
    acting = {"precision": "int8", "calib": "decode:prompts.npz"}
    line = "trtopt build model.onnx --int8 --calib decode:prompts.npz --calib-method max --steps 5"
    assert build_line(report, acting) == line


def test_the_lines_name_the_code_that_made_the_model_and_are_silent_of_its_inputs_where_it_is_in_memory() -> None:
    config = {**_ready().config, "inputs": ["x:float32:1x3"], "dynamic": ["x:0=batch:1..4"]}
    model = {**_ready().model, "path": None}
    advice = _section(dataclasses.replace(_ready(), config=config, model=model), "Worth doing next")
    assert "MODEL.onnx" in advice and "--input" not in advice and "--dynamic" not in advice
    coded = dataclasses.replace(_ready(), config=config, model={**model, "target": "nets.py:net"})
    assert "analyze nets.py:net --input x:float32:1x3 --dynamic x:0=batch:1..4" in " ".join(
        _section(coded, "Worth doing next").replace("\\", " ").split()
    )


@pytest.mark.parametrize(("files", "layout"), [({}, "hwc4"), ({"epcontext": "ctx.onnx"}, "chw")])
def test_an_image_is_fed_interleaved_where_the_runtime_takes_it(files: dict[str, str], layout: str) -> None:
    model = {"path": "m.onnx", "inputs": [{"name": "x", "dtype": "float32", "shape": [1, 3, 32, 32]}]}
    cast = LayerRow("cast", "Cast", ("trtopt/cast/x_fp16",), "memory", 0, 9, 0.1, "fp16", None, None, 0, 0, 1.0, 1.0,
                    16, "memory", 1.0, 5.0, 0.5, 5.0)  # fmt: skip
    analysis = EngineAnalysis("L4", (cast,), totals_of((cast,)))
    report = dataclasses.replace(_ready(), model=model, analysis=analysis, config={**_ready().config, **files})
    lines = [block.text for block in advice(report) if isinstance(block, Command)]
    assert [
        line for line in lines if "--io" in line and f":{layout}" in line and ("--epcontext" in line) == bool(files)
    ]


def test_one_shape_is_not_advised_where_several_were_asked_for() -> None:
    cost = DynamicCost(Cost(20, 0, 10, 100.0), 4, 0, 0.5, "x 1 .. 8", "--opt-shapes x:4")
    for options in ({"batches": [1, 8]}, {"shape_histogram": "log.txt"}):
        report = dataclasses.replace(_ready(), dynamic_cost=cost, config={**_ready().config, **options})
        assert "fix the shapes" not in _section(report, "Worth doing next")


@pytest.mark.parametrize(
    ("shape", "said"), [((1, 4, "past", 64), False), (("batch", 4, 128, 64), True), ((1, 4, 128, 64), True)]
)
def test_a_cache_that_grows_is_not_to_be_given_one_size(shape: tuple[int | str, ...], said: bool) -> None:
    cost = DynamicCost(Cost(20, 0, 10, 100.0), 4, 0, 0.5, "x 1 .. 8", "--opt-shapes x:4")
    cache = NetworkIo("past", "input", "fp16", "chw", shape, "feed fp16 values", state=True)
    report = dataclasses.replace(_ready(), dynamic_cost=cost, network_io=(cache,))
    assert ("fix the shapes" in _section(report, "Worth doing next")) == said
    assert ("fix it with" in _section(report, "Against plain")) == said


@pytest.mark.parametrize(("precision", "label"), [("fp16", "int4"), ("int8", "8-bit, int4")])
def test_regions_are_counted_under_what_was_asked_for(precision: str, label: str) -> None:
    guard = (GuardRecord("weights 8x8", ("fc",), False, "", "the whole network is not faster", 4.0, 4.0),)
    asked = dataclasses.replace(full_report().precision, requested=precision)
    report = full_report(guard=guard, precision=asked, weights=WeightsRecord("int4", 128, (), 0, 0))
    assert f"{label} 0 of 1 region: where it pays" in _section(report, "Against plain")
    assert f"{label} 0 of 1 region" in _section(report, "Guard")


def test_a_verdict_without_verbose_has_no_steps_and_says_how_to_see_them() -> None:
    short = _text(full_report(), verbose=False)
    assert "Done" not in short.splitlines() and "Refused" not in short.splitlines()
    assert "--verbose adds every step" in short


def test_a_command_for_the_model_has_the_model_s_shapes_whatever_io_made_of_the_engine_s() -> None:
    image = {"name": "x", "dtype": "float32", "shape": ["batch", 3, 32, 32]}
    engine = dataclasses.replace(ENGINE, profiles=({"x": {"opt": [8, 4, 32, 32]}},))
    report = dataclasses.replace(full_report(engine=engine), model={"path": "m.onnx", "inputs": [image]})
    line = next(block.text for block in advice(report) if isinstance(block, Command) and "analyze" in block.text)
    assert "x:8x3x32x32" in shlex.split(line)


def test_the_verdict_is_of_outputs_that_are_no_selection_and_says_what_one_alone_means() -> None:
    rows, other = OutputAccuracy(4.8, 0.9, 300.0, None), OutputAccuracy(41.5, 1.0, 0.1, None)
    record = AccuracyRecord(8, "eval", "onnx-only", {"rows": rows, "map": other}, selections=("rows",))
    (text,) = accuracy_texts(dataclasses.replace(full_report(), accuracy=record))
    assert "41.5 dB" in text and "4.8" not in text
    alone = dataclasses.replace(full_report(), accuracy=dataclasses.replace(record, outputs={"rows": rows}))
    text, why = accuracy_texts(alone)
    assert "4.8 dB" in text and why.startswith("rows is a selection") and "--metric" in why
    assert "behind a selection" in _section(alone, "Accuracy") and "rows" in _section(alone, "Accuracy")


@pytest.mark.parametrize(
    ("shape", "expected"), [(["n", 3, 32, 40], "x:8x3x32x40"), (["n", "h", "w", 3], "x:8x32x40x3")]
)
def test_a_command_for_a_model_whose_engine_takes_pixels_has_the_shape_of_the_file(
    shape: list[int | str], expected: str
) -> None:
    """The build takes pixels, channels last; analyze reads the file."""
    engine = dataclasses.replace(ENGINE, profiles=({"x": {"opt": [8, 32, 40, 3]}},))
    image = {"name": "x", "dtype": "float32", "shape": shape}
    config = {**full_report().config, "preprocess": "imagenet", "preprocess_in_engine": True}
    report = full_report(engine=engine, config=config)
    report = dataclasses.replace(report, model={"path": "m.onnx", "inputs": [image]})
    line = next(block.text for block in advice(report) if isinstance(block, Command) and "analyze" in block.text)
    assert expected in shlex.split(line)


def test_after_a_failed_gate_it_says_that_nothing_was_made() -> None:
    report = full_report(engine=None, gate_failures=("SQNR 1.0 dB, less than 20",))
    lines = _text(report).splitlines()
    assert lines[0] == "Nothing was made: a gate failed"
    assert lines[1] == "failed     SQNR 1.0 dB, less than 20"
    assert _section(report, "Written") == "model.json"
    assert "trtopt sensitivity" in _section(report, "Worth doing next")


def test_a_failed_gate_that_is_allowed_still_makes_an_engine() -> None:
    config = {**full_report().config, "allow_accuracy_loss": True}
    text = _text(full_report(config=config, gate_failures=("SQNR too low",)))
    assert text.startswith("INT8 on L4")
    assert "a gate failed: SQNR too low" in text


def test_the_result_names_the_judge_and_every_file() -> None:
    assert "judge the compiler tensorrt-rtx 1.7.1; times are predicted" in _section(full_report(), "Result")
    written = _section(full_report(), "Written").split()
    assert {"model.rtx.engine", "model.int8.onnx", "model.json", "model.build.log"} <= set(written)


def test_steps_are_listed_and_idle_ones_are_one_line() -> None:
    done = _section(full_report(), "Done")
    assert "precision-int8 PRECISION 19 3 1.20 s" in done
    assert "constant-expression: largest difference 0" in done
    assert "nothing to do: dead-node" in done


def test_refusals_are_grouped_by_reason_the_largest_first() -> None:
    refused = _section(full_report(), "Refused")
    assert refused.startswith("2 nodes precision-int8: depthwise (/dw1, /dw2)")
    assert "1 node precision-int8: reads [0] of x (/head)" in refused


def test_long_lists_are_cut_with_a_count() -> None:
    refusals = tuple(Refusal(f"/n{index}", f"reason {index}") for index in range(30))
    report = full_report(steps=(StepRecord("s", "FUSE", 0, 0.0, refusals),))
    assert "and 18 more reasons, in the JSON report" in _section(report, "Refused")
    kept = tuple(KeptNode(f"/n{index}", "fp32", "overflow") for index in range(500))
    text = _section(full_report(precision=PrecisionRecord("fp16", kept=kept)), "Kept in a wider type")
    assert text == "500 nodes fp32: overflow (/n0, /n1 and 498 more)"


def test_the_achieved_precision_is_that_of_the_engine_not_the_one_asked_for() -> None:
    achieved = _section(full_report(), "Precision achieved")
    assert "int8 9 62.0 % fp16 13 38.0 %" in achieved
    assert "asked for int8: 62.0 % of the flop runs in int8" in achieved
    assert "8-bit in the graph: 93.1 %" in achieved


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (PrecisionRecord("fp16", {"fp32": Achieved(3, 1.0)}), "asked for fp16: 0 % of the flop runs in fp16"),
        (
            PrecisionRecord("tf32", {"fp32": Achieved(3, 1.0)}),
            "asked for tf32: 100 % of the flop runs in fp32; the compiler may",
        ),
        (PrecisionRecord("fp16"), "asked for fp16; without an engine, no type was achieved"),
        (PrecisionRecord("as-is"), "the types the model has"),
    ],
)
def test_what_was_asked_for_and_not_achieved_is_said(precision: PrecisionRecord, expected: str) -> None:
    assert expected in _section(full_report(precision=precision), "Precision achieved")


def test_synthetic_calibration_is_loud() -> None:
    report = full_report(calibration=CalibrationRecord("synthetic", "auto", 32, 0.1, 0))
    assert _section(report, "Calibration").startswith("SYNTHETIC SAMPLES")
    assert "SYNTHETIC" not in _text(full_report())


def test_the_accuracy_of_each_output_is_a_row() -> None:
    text = _section(full_report(), "Accuracy")
    assert "360 samples (eval) against FP32: the graph was verified on the CPU" in text
    assert "logits 31.2 dB 0.999870 0.123 99.4 %" in text
    assert "boxes equal 1.000000 0" in text
    assert "broken not finite nan inf 7" in text
    assert "metric top1: FP32 0.9889, optimized 0.9861, drop 0.0028" in text


def test_recorded_outputs_are_named_as_the_reference() -> None:
    assert "360 samples (eval) against the outputs in o.json: " in _section(
        full_report(config={"reference": "o.json"}), "Accuracy"
    )


def test_the_outputs_of_the_engine_itself_are_shown_where_it_ran() -> None:
    accuracy = dataclasses.replace(ACCURACY, verified="engine", engine={"logits": ACCURACY.outputs["logits"]})
    text = _section(full_report(accuracy=accuracy), "Accuracy")
    assert "the engine itself has run" in text
    assert "output of the engine" in text


def test_a_report_without_verification_says_so() -> None:
    assert _section(full_report(accuracy=None), "Accuracy") == "not verified"


def test_the_least_accurate_tensors_come_worst_first_with_the_one_where_the_error_enters() -> None:
    text = _section(full_report(), "Least accurate tensors")
    assert text.startswith("the error enters at conv4")
    assert text.index("conv5") < text.index("conv3 ")
    assert "conv0" not in text


def test_the_engine_shows_kernels_bytes_and_what_was_ignored() -> None:
    text = _section(full_report(), "Engine")
    for part in (
        "kernels 23",
        "activations 1.2 MB",
        "weights 2.3 MB",
        "x: 1x3x32x32 .. 8x3x32x32 .. 16x3x32x32",
        "timing_cache",
        "2 ONNX nodes that no layer names: /Shape, /Gather",
    ):
        assert part in text


def test_the_engines_of_a_search_over_builder_options_are_rows() -> None:
    trials = (
        BuilderTrial((), 12.5, 1000.0, 3.0, False, True, "as asked for"),
        BuilderTrial(("tiling=fast",), None, None, None, False, True, "refused: no such option"),
        BuilderTrial(("max_aux_streams=0",), 11.0, 900.0, 2.0, True, False, "10.0% faster than as asked for"),
    )
    report = dataclasses.replace(full_report(), engine=dataclasses.replace(ENGINE, builder_search=trials))
    text = " ".join(_section(report, "Builder options").split())
    assert "as asked for 1.00 ms 3.00 us 12.5 s as asked for (remembered)" in text
    assert "tiling=fast refused: no such option (remembered)" in text
    assert "* max_aux_streams=0 900 us 2.00 us 11.0 s 10.0% faster than as asked for" in text
    assert "Builder options" not in _text(full_report())


def test_on_a_backend_that_ignores_them_the_search_says_why() -> None:
    report = dataclasses.replace(full_report(), engine=dataclasses.replace(ENGINE, ignored_options=("search=8",)))
    text = " ".join(_section(report, "Engine").split())
    assert "search=8: tensorrt-rtx has no such option" in text and "is the same with every value" in text


@pytest.mark.parametrize("width", [80, 100])
def test_it_fits_the_terminal(width: int) -> None:
    assert max(len(line) for line in _text(full_report(), width).splitlines()) <= width


def test_names_are_not_taken_for_markup() -> None:
    report = full_report(warnings=("[bold]x[/bold] :smile:",), judge="[red]")
    assert "[bold]x[/bold] :smile:" in _text(report)
    assert "[red]" in _text(report)


def test_numbers_are_readable() -> None:
    assert [bytes_text(count) for count in (0, 999, 1000, 2_600_000, 999_999_999, 3_000_000_000)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "2.6 MB",
        "1.00 GB",
        "3.00 GB",
    ]
    assert [percent(share) for share in (0.0, 1e-6, 0.5, 0.99999, 1.0)] == ["0 %", "0.1 %", "50.0 %", "99.9 %", "100 %"]
    assert [seconds_text(value) for value in (0.004, 12.34, 200.0)] == ["0.00 s", "12.3 s", "3 min 20 s"]
    edges = (9.994, 9.996, 59.94, 59.97, 60.0, 119.4, 119.5, 119.7, 3599.6)
    texts = [
        "9.99 s",
        "10.0 s",
        "59.9 s",
        "1 min 0 s",
        "1 min 0 s",
        "1 min 59 s",
        "2 min 0 s",
        "2 min 0 s",
        "60 min 0 s",
    ]
    assert [seconds_text(value) for value in edges] == texts
    assert [decibels(value) for value in (42.06, float("inf"), float("-inf"), float("nan"))] == [
        "42.1 dB",
        "equal",
        "-inf dB",
        "not finite",
    ]
    assert some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_recipes_show_the_whole_and_each_place_that_was_rewritten() -> None:
    before, after = Cost(5, 0, 12_000_000, 44.0), Cost(4, 0, 9_500_000, 39.0)
    kept = RegionRecord(("conv1", "conv2"), "62", True, "", before, after)
    refused = RegionRecord(("conv3",), "64", False, "it does not pay", before, before)
    step = StepRecord("misaligned-channels", "ALIGN", 2, 0.5, regions=(kept, kept, refused))
    rewriting = RewritingRecord(Cost(92, 4, 760_700_000, 2936.0), Cost(58, 0, 502_400_000, 2170.0))
    text = _section(full_report(steps=(step,), rewriting=rewriting), "Recipes")
    assert "without recipes 92 kernels and 4 stream syncs, 760.7 MB, 2.94 ms predicted" in text
    assert "with recipes 58 kernels, 502.4 MB, 2.17 ms predicted" in text
    assert "misaligned-channels conv1 +3 5 -> 4 44.0 -> 39.0 us > 62" in text
    assert "conv3" not in text


@pytest.mark.parametrize(("nodes", "named"), [(("q", "k", "v"), "q +2"), (("fc",), "fc")])
def test_a_region_says_how_many_nodes_it_has(nodes: tuple[str, ...], named: str) -> None:
    guard = (GuardRecord("x", nodes, True, "int8", "", 4.0, 3.0, (2, 2), (2000, 1000)),)
    assert f"INT8 {named} 4.00 -> 3.00 us, 2 kernels, 2.0 -> 1.0 kB" in _section(full_report(guard=guard), "Guard")


@pytest.mark.parametrize(
    ("kernels", "syncs", "share", "expected"),
    [
        (11, 20, 0.29, "x 1 .. 8 costs 11 kernels, 20 stream syncs, 29.0 %: fix it with --opt-shapes x:4"),
        (-1, 0, 0.0053, "x 1 .. 8 costs 0.5 %: fix it with --opt-shapes x:4"),
        (0, 0, -0.0008, "x 1 .. 8 costs nothing at the optimum"),
        (0, 0, 0.0, "x 1 .. 8 costs nothing at the optimum"),
    ],
)
def test_a_range_that_costs_nothing_is_not_to_be_fixed(kernels: int, syncs: int, share: float, expected: str) -> None:
    cost = Cost(5, 0, 1000, 20.0)
    found = DynamicCost(cost, kernels, syncs, share, "x 1 .. 8", "--opt-shapes x:4")
    assert expected in _section(full_report(shipped=cost, dynamic_cost=found), "Against plain")


def test_the_line_for_analyze_behind_an_optimized_model_has_the_shapes_of_its_range() -> None:
    cost = DynamicCost(Cost(3, 0, 10, 9.0), 0, 0, 0.0, "ids 1x32 .. 16x32", "--opt-shapes a,b:8x32,mask:8x32")
    text = _section(full_report(engine=None, dynamic_cost=cost), "Worth doing next")
    assert "--shapes a,b:8x32,mask:8x32" in " ".join(text.split())
