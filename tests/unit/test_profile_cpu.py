"""The roofline of a CPU by hand, ranks, and the profiler's file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtopt.hardware.cpu import CpuSpec
from trtopt.profiling.cpu import predict_cpu
from trtopt.profiling.join import rank_correlation
from trtopt.profiling.onnxruntime import read_profile
from trtopt.roofline.work import Gemm, Layer, Window, Work

CPU = CpuSpec(
    name="made up",
    threads=1,
    tflops={"fp32": 0.1},
    bandwidth_gbs=10.0,
    cache_bandwidth_gbs=100.0,
    cache_bytes=1_000_000,
    latency_us=0.5,
    profiled_us=1.5,
    source="by hand",
)


def memory(read: int, write: int, *, weight: int = 0, flop: int = 0, steps: int = 1) -> Work:
    return Work("memory", flop, read, weight, write, "fp32", steps=steps)


def predicted(*works: Work | None) -> list[tuple[float, float, float, float, str] | None]:
    layers = [Layer(str(index), "Op", (str(index),), work) for index, work in enumerate(works)]
    rows = predict_cpu(layers, CPU)
    return [
        None if row is None else (row.math_us, row.memory_us, row.latency_us, row.predicted_us, row.limiter)
        for row in rows
    ]


def test_a_product_is_bound_by_the_peak() -> None:
    work = Work("gemm", 200_000_000, 400_000, 40_000, 400_000, "fp32", gemm=Gemm(1000, 100, 1000))
    # 2e8 flop at 1e11/s; 840 kB at 100 GB/s.
    assert predicted(work) == [(pytest.approx(2000), pytest.approx(8.4), 2.0, pytest.approx(2002), "math")]


def test_what_fits_into_the_caches_has_their_bandwidth_and_the_rest_that_of_the_memory() -> None:
    fits, exceeds = predicted(memory(500_000, 500_000), memory(500_000, 500_001))
    assert fits == (0.0, pytest.approx(10), 2.0, pytest.approx(12), "memory")
    assert exceeds == (0.0, pytest.approx(100.0001), 2.0, pytest.approx(102.0001), "memory")


def test_weights_come_from_memory_where_those_of_the_network_exceed_the_caches() -> None:
    alone = predicted(memory(1000, 1000, weight=600_000))
    both = predicted(memory(1000, 1000, weight=600_000), memory(1000, 1000, weight=600_000))
    assert alone == [(0.0, pytest.approx(6.02), 2.0, pytest.approx(8.02), "memory")]
    assert both == [(0.0, pytest.approx(60.02), 2.0, pytest.approx(62.02), "memory")] * 2


def test_small_nodes_are_bound_by_latency_and_unknown_ones_have_no_row() -> None:
    assert predicted(memory(100, 100), None) == [
        (0.0, pytest.approx(0.002), 2.0, pytest.approx(2.002), "latency"),
        None,
    ]


def test_executions_in_a_loop_each_have_the_latency_and_their_own_share_of_the_caches() -> None:
    loop = memory(4_000_000, 4_000_000, steps=10)
    assert predicted(loop) == [(0.0, pytest.approx(80), pytest.approx(20), pytest.approx(100), "memory")]


def test_the_steps_of_a_recurrent_layer_are_one_node() -> None:
    lstm = Work("recurrent", 1000, 100, 100, 100, "fp32", gemm=Gemm(1, 4, 4), steps=50)
    assert predicted(lstm)[0] == (pytest.approx(0.01), pytest.approx(0.003), 2.0, pytest.approx(2.01), "latency")


def test_a_strided_convolution_reads_only_what_it_uses() -> None:
    work = Work(
        "conv", 0, 16 * 64 * 4, 64, 4 * 64 * 4, "fp32", gemm=Gemm(4, 64, 64), window=Window((1, 1), (2, 2), (1, 1))
    )
    found = predicted(work)[0]
    assert found is not None
    assert found[1] == pytest.approx((4 * 64 * 4 + 64 + 4 * 64 * 4) / 100e3)


def test_other_types_compute_at_the_rate_of_fp32() -> None:
    half = Work("gemm", 200_000_000, 2, 2, 2, "fp16", gemm=Gemm(1000, 100, 1000))
    found = predicted(half)[0]
    assert found is not None
    assert found[0] == pytest.approx(2000)


def test_a_row_has_no_tiles() -> None:
    row = predict_cpu([Layer("n", "Op", ("n",), memory(8, 8))], CPU)[0]
    assert row is not None
    assert (row.tile, row.tiles, row.waves, row.tile_efficiency, row.wave_efficiency) == (None, 0, 0, 1.0, 1.0)


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 100, 1000, 10000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5, variances 4.5 and 5.
    assert rank_correlation([0, 5, 5, 9], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_rank_correlation_of_too_few_or_of_equal_values_is_unknown() -> None:
    assert rank_correlation([], []) is None
    assert rank_correlation([1, 2], [1, 2]) is None
    assert rank_correlation([1, 2, 3], [7, 7, 7]) is None
    with pytest.raises(ValueError, match="3 values against 2"):
        rank_correlation([1, 2, 3], [1, 2])


def event(name: str, at: int, us: int) -> str:
    args = {"op_name": "Op", "node_index": "3", "input_type_shape": [{"float": [2, 3]}], "output_type_shape": []}
    node = {"cat": "Node", "name": f"{name}_kernel_time", "ts": at, "dur": us, "args": args}
    return json.dumps(node)


def ended(name: str, at: int, us: int) -> str:
    return json.dumps({"cat": "Session", "name": name, "ts": at, "dur": us, "args": {}})


EXECUTE = "SequentialExecutor::Execute"


def test_the_time_of_a_loop_is_its_own_and_that_of_its_nodes_adds_up(tmp_path: Path) -> None:
    """Two iterations, each with a node and an If that holds another; events stand in the order in which they end."""
    body = [
        line
        for start in (110, 150)
        for line in (
            event("inner", start, 4),
            event("deep", start + 6, 3),
            ended(EXECUTE, start + 6, 5),
            event("if", start + 5, 10),
            ended(EXECUTE, start, 20),
        )
    ]
    lines = [
        event("before", 100, 2),
        *body,
        event("loop", 105, 70),
        ended(EXECUTE, 100, 80),
        ended("model_run", 99, 82),
    ]
    file = tmp_path / "profile.json"
    file.write_text("[\n" + ",\n".join([ended("session_initialization", 0, 9), *lines, event("cut", 300, 5)]) + "\n]\n")
    profile = read_profile(file)
    (run,) = profile.runs
    assert run.own_us == {"before": 2, "inner": 8, "deep": 6, "if": 10, "loop": 30}
    assert run.executions == {"before": 1, "inner": 2, "deep": 2, "if": 2, "loop": 1}
    assert list(run.own_us) == ["before", "loop", "inner", "if", "deep"]
    assert profile.kernels["inner"].inputs == (("float", (2, 3)),)


def test_a_node_without_a_name_is_known_by_its_operator_and_number(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text("\n".join([event("Op_3", 1, 1), event("n0", 3, 1), ended("model_run", 0, 9)]))
    kernels = read_profile(file).kernels
    assert {name: kernel.is_unnamed for name, kernel in kernels.items()} == {"Op_3": True, "n0": False}
