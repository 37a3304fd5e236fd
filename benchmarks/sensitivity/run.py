"""Sensitivity of ResNet-50 (54 products, 64 samples) against one calibration pass, and against a session per region.

    python benchmarks/sensitivity/run.py [--rounds N] [--exact FOLDER_OR_NPZ MODEL]

Each round is a process of its own: it calibrates, then measures every region and the growth of the error. The ratio is
of wall times in the same process, one after the other; the ratio of CPU times is beside it, since other work on the
machine moves the first. ``--exact`` compares the figures of a model, on all samples and on the default choice of them,
with those of one ONNX Runtime session per region.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from trtopt.support.precision import Precision

HERE = Path(__file__).parent
SAMPLES = 64
MACHINE = "2-core x86-64, no GPU"


def prepared(model: Path, samples: Path) -> tuple[Any, ...]:
    """The FP32 form, the INT8 form, the plan's regions and the samples; and what calibration took, wall and CPU."""
    from trtopt.graph.shapes import static_shapes
    from trtopt.precision.decide import wanted_tensors
    from trtopt.precision.fp16.to_fp32 import to_fp32
    from trtopt.precision.observe.calibrate import collect
    from trtopt.precision.observe.samples import open_samples
    from trtopt.precision.plan import FP16, PrecisionPlan
    from trtopt.precision.regions import Problem, find_candidates
    from trtopt.precision.write import apply_plan
    from trtopt.source.onnx_file import load

    artifact = load(model)
    base = to_fp32(artifact.model)
    source = open_samples(samples, artifact.inputs)
    started = (time.perf_counter(), time.process_time())
    wanted = wanted_tensors(base, Precision.INT8, "tensorrt-rtx")
    table = collect(base, source, histogram=wanted.histogram, ranges=wanted.ranges).table
    taken = (time.perf_counter() - started[0], time.process_time() - started[1])
    shapes = static_shapes(base, dict(source.shapes()[0]))
    found = find_candidates(Problem(base, "tensorrt-rtx", table.stats, shapes, "auto", FP16), ("int8",))
    plan = PrecisionPlan(Precision.INT8, quantized=tuple(found.all.values()))
    regions = {region.name: region.nodes for region in found.regions}
    return base, apply_plan(base, plan), plan, regions, source, taken


def timed(model: Path, samples: Path) -> dict[str, Any]:
    """One round."""
    from trtopt.accuracy.segments import SegmentedModel
    from trtopt.accuracy.sensitivity import growth, sensitivity
    from trtopt.precision.observe.calibrate import peak_rss_bytes

    base, quantized, _, regions, source, calibration = prepared(model, samples)
    before = peak_rss_bytes()
    started = (time.perf_counter(), time.process_time())
    with SegmentedModel(base, quantized, [node for nodes in regions.values() for node in nodes]) as segmented:
        found = sensitivity(segmented, regions, source)
    growth(base, quantized, regions, source)
    taken = (time.perf_counter() - started[0], time.process_time() - started[1])
    return {
        "calibration_seconds": calibration[0],
        "seconds": taken[0],
        "ratio": taken[0] / calibration[0],
        "cpu_ratio": taken[1] / calibration[1],
        "regions": len(regions),
        "samples_per_region": next(iter(found.regions.values())).samples,
        "peak_rss_gb_of_calibration": before / 1e9,
        "peak_rss_gb": peak_rss_bytes() / 1e9,
    }


def exact(model: Path, samples: Path) -> dict[str, Any]:
    """How far the figures are from those of one session per region over all samples."""
    import dataclasses

    import numpy as np

    from trtopt.accuracy.compare import compare
    from trtopt.accuracy.segments import SegmentedModel
    from trtopt.accuracy.sensitivity import Sampling, sensitivity
    from trtopt.precision.write import apply_plan
    from trtopt.support.ort_session import OrtSession

    base, quantized, plan, regions, source, _ = prepared(model, samples)
    feeds = list(source)
    with SegmentedModel(base, quantized, [node for nodes in regions.values() for node in nodes]) as segmented:
        every = sensitivity(segmented, regions, feeds, sampling=Sampling(len(feeds))).regions
        seeds = [sensitivity(segmented, regions, feeds, sampling=Sampling(seed=seed)).regions for seed in range(5)]
    truth = {}
    with OrtSession(base) as before:
        for name, nodes in regions.items():
            alone = dataclasses.replace(plan, quantized=tuple(op for op in plan.quantized if op.node in nodes))
            with OrtSession(apply_plan(base, alone), keep_qdq=True) as after:
                truth[name] = compare(before, after, feeds)[every[name].worst].sqnr_db

    def gaps(found: Any) -> list[float]:
        return [abs(found[name].outputs[every[name].worst].sqnr_db - truth[name]) for name in regions]

    def order(found: Any) -> float:
        figures = [found[name].outputs[every[name].worst].sqnr_db for name in regions]
        first, second = (np.argsort(np.argsort(values)) for values in (figures, list(truth.values())))
        return float(np.corrcoef(first, second)[0, 1])

    return {
        "samples": len(feeds),
        "regions": len(regions),
        "samples_per_region": next(iter(seeds[0].values())).samples,
        "all_samples": {"largest_difference_db": max(gaps(every)), "spearman": order(every)},
        "default": {
            "mean_difference_db": statistics.mean(gap for found in seeds for gap in gaps(found)),
            "spearman": statistics.mean(map(order, seeds)),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--exact", nargs=2, metavar=("MODEL", "SAMPLES"))
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "SAMPLES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.exact or options.worker:
        work = exact if options.exact else timed
        print(json.dumps(work(*map(Path, options.exact or options.worker))))
        return
    with tempfile.TemporaryDirectory() as folder:
        model, samples = Path(folder) / "model.onnx", Path(folder) / "samples.npz"
        make = (
            f"from resnet50 import *; resnet50(Path({str(model)!r})); write_samples(Path({str(samples)!r}), {SAMPLES})"
        )
        subprocess.run([sys.executable, "-c", make], cwd=HERE.parent / "calibration", check=True)
        command = [sys.executable, __file__, "--worker", str(model), str(samples)]
        rounds = [
            json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for _ in range(options.rounds)
        ]
    results: dict[str, Any] = {"machine": MACHINE, "date": options.date, "python": platform.python_version()}
    results["versions"] = {name: metadata.version(name) for name in ("numpy", "onnxruntime", "onnx_ir")}
    results["load_average"] = round(os.getloadavg()[0], 1)
    results["samples"], results["rounds"] = SAMPLES, len(rounds)
    results.update((name, round(statistics.median(item[name] for item in rounds), 2)) for name in rounds[0])
    results["ratios"] = [round(item["ratio"], 2) for item in rounds]
    print(json.dumps(results, indent=2))
    (HERE / "results.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
