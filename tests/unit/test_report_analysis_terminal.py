"""What a person reads in a terminal after an analysis."""

from __future__ import annotations

import dataclasses

import pytest
from analysis_samples import (
    GPU,
    HOSTILE,
    analysis_of,
    full_analysis,
    hostile_layers,
    many_layers,
    resnet50_layers,
    small_layers,
    sweep_of,
)
from rich.console import Console

from trtopt.report.schema.analysis import Analysis, Excess, Finding, Limit
from trtopt.report.text.analysis import share_of_peak, view
from trtopt.report.text.format import flop_text, shorten, time_text, visible
from trtopt.report.text.names import Labels, equal_layers
from trtopt.report.text.words import peak_of, product_text


def _lines(analysis: Analysis, width: int = 100) -> list[str]:
    console = Console(width=width, no_color=True, markup=False, emoji=False, highlight=False)
    with console.capture() as capture:
        console.print(view(analysis, GPU))
    return [line.rstrip() for line in capture.get().split("\n")]


def _section(analysis: Analysis, title: str) -> list[str]:
    """The lines under a heading, runs of spaces made one."""
    lines = _lines(analysis)
    start = lines.index(title) + 1
    end = next(index for index in range(start, len(lines)) if not lines[index])
    return [" ".join(line.split()) for line in lines[start:end]]


def test_the_first_line_says_model_gpu_precision_and_level() -> None:
    assert _lines(analysis_of(small_layers))[0] == "model.onnx on L4, fp16: predicted from the ONNX graph"


def test_a_proxy_is_said_in_the_first_line_and_in_the_second() -> None:
    lines = _lines(full_analysis())
    assert lines[0].endswith("from the ONNX graph and TensorRT for RTX engine (PROXY)")
    assert lines[1].startswith("PROXY: the compiler cannot target L4; these layers are of an engine for RTX-4090")
    assert "PROXY" not in "\n".join(_lines(analysis_of(small_layers)))


def test_the_share_of_the_peak_is_the_time_at_the_peak_over_the_predicted_time() -> None:
    analysis = analysis_of(resnet50_layers)
    share = share_of_peak(analysis.layers, GPU)
    assert share is not None
    assert share == pytest.approx(analysis.totals.flop / (GPU.tflops["fp16"] * 1e6) / analysis.totals.predicted_us)
    assert f"{100 * share:.1f} % of the peak of fp16" in " ".join(_section(analysis, "Predicted"))


def test_without_a_peak_for_a_type_no_share_of_the_peak_is_claimed() -> None:
    gpu = dataclasses.replace(GPU, tflops={"fp32": GPU.tflops["fp32"]})
    assert share_of_peak(analysis_of(small_layers).layers, gpu) is None
    assert peak_of(GPU, "bf16") == GPU.tflops["fp16"]


def test_the_times_by_limiter_add_up_to_the_total() -> None:
    analysis = analysis_of(small_layers)
    shares = [float(line.split(" %")[0].split()[-1]) for line in _section(analysis, "Time by limiter")[1:]]
    assert len(shares) == len({row.limiter for row in analysis.layers})
    assert sum(shares) == pytest.approx(100, abs=0.2)


def test_the_slowest_layers_come_first_and_the_rest_is_one_line_with_its_time() -> None:
    analysis = analysis_of(resnet50_layers)
    rows = sorted(analysis.layers, key=lambda row: -row.predicted_us)
    body = _section(analysis, "Slowest layers")
    assert len(body) == 1 + 12 + 1
    groups = equal_layers(rows, Labels({}))
    assert len(groups) < len(rows), "equal layers are one row"
    assert body[1].startswith(f"{groups[0].rows[0].op} {product_text(groups[0].rows[0])} x{len(groups[0].rows)} fp16")
    rest = time_text(sum(group.predicted_us for group in groups[12:]))
    assert body[-1] == f"and {len(groups) - 12} more rows with {rest}; all of them are in the JSON"


def test_findings_that_say_the_same_are_one_with_the_sum_of_their_gains() -> None:
    same = [Finding("r", "warning", (f"/n{index}",), "m", "do", 10.0) for index in range(3)]
    other = [Finding(f"s{index}", "hint", (), "m", "do", 0.0) for index in range(12)]
    body = _section(analysis_of(small_layers, findings=(*other, *same)), "Findings")
    assert body[:2] == ["-30.0 us r: m (/n0, /n1 and 1 more)", "> do"]
    assert body[2] == "hint s0: m"
    assert body[-2] == "and 3 more findings; all of them are in the JSON"


def test_the_batch_sweep_marks_the_knee_the_best_within_the_budget_and_what_does_not_fit() -> None:
    analysis = full_analysis()
    assert analysis.batch_sweep is not None
    points = (*analysis.batch_sweep.points[:-1], dataclasses.replace(analysis.batch_sweep.points[-1], fits=False))
    sweep = dataclasses.replace(analysis.batch_sweep, points=points, knee=16, best_within_budget=32)
    body = _section(dataclasses.replace(analysis, batch_sweep=sweep), "Batch sweep")
    noted = {line.split()[0]: line.split("B ", 1)[1] for line in body if "B " in line}
    assert noted == {"16": "knee", "32": "best within the budget", "256": "does not fit"}


def test_a_long_sweep_is_thinned_without_losing_its_ends_and_its_knee() -> None:
    sweep = sweep_of(small_layers, GPU, range(1, 257), 1.0)
    body = _section(analysis_of(small_layers, batch_sweep=sweep), "Batch sweep")
    shown = [int(line.split()[0]) for line in body[1:] if line.split()[0].isdigit()]
    assert len(shown) <= 12
    assert {1, 256, sweep.knee} <= set(shown)
    assert f"and {256 - len(shown)} more sizes between them; all of them are in the JSON" in body
    assert "no batch of the sweep meets the budget of 1.00 us" in body


def test_a_model_that_does_not_fit_is_said_with_what_is_missing() -> None:
    analysis = analysis_of(small_layers)
    needed = analysis.memory.weight_bytes + analysis.memory.activation_bytes
    memory = dataclasses.replace(analysis.memory, device_bytes=needed - 5_000_000, fits=False)
    body = " ".join(_section(dataclasses.replace(analysis, memory=memory), "Predicted"))
    assert "DOES NOT FIT in" in body
    assert "the GPU lacks 5.0 MB of memory" in body


def test_the_levels_are_compared_a_line_each() -> None:
    analysis = full_analysis()
    same_target = tuple(dataclasses.replace(summary, proxy=None) for summary in analysis.levels)
    body = _section(dataclasses.replace(analysis, levels=same_target), "Levels")
    assert [line.split(" ")[0] for line in body] == ["level", "ONNX", "TensorRT"]
    assert body[2].startswith("TensorRT for RTX engine 53 ")


def test_the_limit_says_what_is_necessary_and_what_is_not_by_reason() -> None:
    kernels = (
        Excess("layout", "Transpose", "fp16", 3, ("turn",), 40.0, 38.0),
        Excess("sync", "sync", "fp32", 2, ("stream syncs",), 2.0, 2.0),
    )
    shown = " ".join(_section(analysis_of(small_layers, limit=Limit(60.0, 100.0, 50.0, 2_000_000, kernels)), "Limit"))
    assert "necessary: 60.0 us of 100 us (60.0 %): products 50.0 us; 2.0 MB of weights, inputs and outputs" in shown
    assert "Transpose turn" in shown
    assert "by reason (kernels): only copies 38.0 us (3), waits of streams 2.00 us (2)" in shown


def test_operators_without_a_cost_and_warnings_are_listed() -> None:
    body = _section(full_analysis(), "Without a cost, and in no sum")
    assert body == ["com.acme::Fancy 3 nodes: /fancy1, /fancy2 and 1 more", "NonMaxSuppression 1 node: /nms"]
    assert _section(full_analysis(), "Warnings")[0].startswith("- batch 8 was taken")


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("make", [small_layers, many_layers, hostile_layers])
def test_it_fits_the_terminal(width: int, make: object) -> None:
    from rich.cells import cell_len

    for analysis in (full_analysis(), analysis_of(make)):  # type: ignore[arg-type]
        assert max(cell_len(line) for line in _lines(analysis, width)) <= width


def test_names_neither_drive_the_terminal_nor_break_its_lines() -> None:
    text = "\n".join(_lines(analysis_of(hostile_layers), 140))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[bold red]markup[/] :smile:" in text
    text.encode("utf-8")


def test_a_name_is_cut_in_the_middle_and_keeps_its_ends() -> None:
    assert shorten("/encoder/layers.11/attention/MatMul", 20) == "/encoder...on/MatMul"
    assert shorten("short", 20) == "short"
    for name in HOSTILE:
        assert len(shorten(visible(name), 16)) <= 16


def test_what_cannot_be_seen_becomes_an_escape() -> None:
    assert visible("\x1b[31m\n\u202e\udc80层") == "\\x1b[31m\\n\\u202e\\udc80层"


def test_times_and_amounts_have_three_digits() -> None:
    assert [time_text(value) for value in (0.0, 0.05, 3.254, 12.34, 999.4, 999.6, 12_340.0, 2.5e6)] == [
        "0 us",
        "0.05 us",
        "3.25 us",
        "12.3 us",
        "999 us",
        "1.00 ms",
        "12.3 ms",
        "2.50 s",
    ]
    assert [flop_text(value) for value in (0, 999, 1000, 8_180_000_000, 7 * 10**15)] == [
        "0 FLOP",
        "999 FLOP",
        "1.00 kFLOP",
        "8.18 GFLOP",
        "7000 TFLOP",
    ]
