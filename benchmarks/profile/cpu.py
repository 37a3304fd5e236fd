"""Every node of the trained models timed on the CPU, against the CPU's own roofline.

    python benchmarks/profile/cpu.py --minilm minilm.onnx [--models ../shared/models] [--threads N ...]

Each model runs on one of its calibration samples (FastestDet an image, MiniLM eight sentences; Silero, which has none,
a frame of speech) and is measured twice: the second time says how well a measurement repeats. ``cpu.json`` has all
figures.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "accuracy"))

from subjects import SUBJECTS, Bench, Subject, as_stored  # noqa: E402 - benchmarks/accuracy

from trtopt.hardware.cpu import CpuSpec, available_threads  # noqa: E402
from trtopt.profiling.cpu import predict_cpu, probe_cpu  # noqa: E402
from trtopt.profiling.join import rank_correlation  # noqa: E402
from trtopt.profiling.measured import MeasuredLayer  # noqa: E402
from trtopt.profiling.onnxruntime import measure  # noqa: E402
from trtopt.roofline.work import Layer  # noqa: E402
from trtopt.source.onnx_file import load  # noqa: E402

MACHINE = "2-core x86-64, no GPU"
FRAME = 100
"""The frame of speech that Silero is given: the first ones are silence, with a state of zeros."""


class _EnoughError(Exception):
    """The wanted feed is there."""


def feeds_of(bench: Bench, subject: Subject) -> dict[str, np.ndarray]:
    """One real sample."""
    if bench.evaluate.REG[subject.name][1] is not None:
        return dict(next(iter(bench.evaluate.calib(subject.name))))
    run = as_stored(bench.model(subject))
    count = itertools.count()
    kept: dict[str, np.ndarray] = {}

    def keep(feeds: Any) -> list[np.ndarray]:
        if next(count) == FRAME:
            kept.update(feeds)
            raise _EnoughError
        return run(feeds)

    try:
        bench.metric(subject, keep)
    except _EnoughError:
        return kept
    raise SystemExit(f"{subject.name} has no {FRAME} samples")


def row_of(bench: Bench, subject: Subject, cpu: CpuSpec) -> dict[str, Any]:
    """The figures of one model."""
    artifact = load(bench.model(subject))
    feeds = feeds_of(bench, subject)
    feeds = {item.name: np.asarray(feeds[item.name]).astype(item.dtype) for item in artifact.inputs}
    began = time.perf_counter()
    found = measure(artifact, feeds, threads=cpu.threads)
    seconds = time.perf_counter() - began
    again = {layer.info.name: layer.measured_us for layer in measure(artifact, feeds, threads=cpu.threads).layers}
    layers = [Layer(item.info.name, item.op, item.info.onnx_nodes, item.work) for item in found.layers]
    ran = [item for item in found.layers if item.median_us is not None]
    both = [
        (item, row.predicted_us)
        for item, row in zip(found.layers, predict_cpu(layers, cpu), strict=True)
        if row is not None and item.measured_us > 0
    ]
    errors = [abs(us / item.measured_us - 1) for item, us in both]
    total = sum(item.measured_us for item in ran)
    floor = 2 * (cpu.latency_us + cpu.profiled_us)
    return {
        "model": subject.label,
        "nodes": len(found.layers),
        "ran": len(ran),
        "predicted": len(both),
        "sum_us": round(total, 1),
        "sum_without_profiler_us": round(total - len(ran) * cpu.profiled_us, 1),
        "end_to_end_us": round(found.end_to_end_us or 0.0, 1),
        "end_to_end_spread_us": round(found.end_to_end_spread_us or 0.0, 1),
        "predicted_us": round(sum(us for _, us in both), 1),
        "mean_error": round(statistics.mean(errors), 3),
        "median_error": round(statistics.median(errors), 3),
        "rank_correlation": _ranks(both),
        "long": sum(item.measured_us >= floor for item, _ in both),
        "rank_correlation_long": _ranks([pair for pair in both if pair[0].measured_us >= floor]),
        "rank_correlation_again": _ranks([(item, again[item.info.name]) for item in ran]),
        "runs": found.source.runs,
        "seconds": round(seconds, 1),
        "stable": found.source.conditions["stable"],
        "by_op": _by_op(both),
    }


def _ranks(pairs: list[tuple[MeasuredLayer, float]]) -> float | None:
    found = rank_correlation([item.measured_us for item, _ in pairs], [us for _, us in pairs])
    return None if found is None else round(found, 3)


def _by_op(both: list[tuple[MeasuredLayer, float]]) -> dict[str, list[float]]:
    """Measured and predicted microseconds of the five operators that take the most time."""
    totals: dict[str, list[float]] = {}
    for item, us in both:
        known = totals.setdefault(item.op, [0.0, 0.0])
        totals[item.op] = [known[0] + item.measured_us, known[1] + us]
    longest = sorted(totals.items(), key=lambda pair: -pair[1][0])[:5]
    return {op: [round(us, 1) for us in times] for op, times in longest}


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| model | nodes (that ran) | sum of nodes, us | less the profiler | one inference, us | mean error | median | "
        "rank correlation | of longer nodes | of two measurements | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['nodes']} ({row['ran']}) | {row['sum_us']:.0f} | "
            f"{row['sum_without_profiler_us']:.0f} | {row['end_to_end_us']:.0f} | {row['mean_error']:.0%} | "
            f"{row['median_error']:.0%} | {_two(row['rank_correlation'])} | "
            f"{_two(row['rank_correlation_long'])} ({row['long']}) | {_two(row['rank_correlation_again'])} | "
            f"{row['seconds']:.1f} |"
        )
    return "\n".join(lines)


def round_of(bench: Bench, threads: int) -> dict[str, Any]:
    """The figures of all models with a number of threads."""
    load_average = os.getloadavg()[0]
    began = time.perf_counter()
    cpu = probe_cpu(threads)
    probe_seconds = time.perf_counter() - began
    rows = []
    for subject in SUBJECTS:
        rows.append(row_of(bench, subject, cpu))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(f"\n{threads} threads, {cpu}\n\n{table(rows)}", flush=True)
    return {
        "threads": threads,
        "cpu": dataclasses.asdict(cpu),
        "probe_seconds": round(probe_seconds, 1),
        "load_average": [round(load_average, 2), round(os.getloadavg()[0], 2)],
        "models": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=HERE.parents[2] / "shared" / "models")
    parser.add_argument("--minilm", type=Path, required=True, help="MiniLM's ONNX file")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, available_threads()])
    arguments = parser.parse_args()
    bench = Bench(arguments.models, arguments.minilm, HERE)
    found = {
        "machine": MACHINE,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "onnxruntime": metadata.version("onnxruntime"),
        "rounds": [round_of(bench, threads) for threads in arguments.threads],
    }
    (HERE / "cpu.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
