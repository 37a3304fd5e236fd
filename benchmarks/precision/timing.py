"""Ten INT8 variants of ResNet-50 from one pass of statistics, and its sensitivity against one calibration pass.

    python benchmarks/precision/timing.py [--rounds N] [--only variants|sensitivity]

ResNet-50 with random weights, batch 1, 64 samples. Each variant is a ``trtopt optimize --int8`` of its own that finds
the statistics of the first in the cache: five calibration methods, for two backends, whose placement differs. Each is
verified on four samples. ``trtopt sensitivity`` has 53 convolutions and the classifier to measure; its time is divided
by that of the calibration pass of the same process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
MACHINE = "2-core x86-64, no GPU"
SAMPLES, VERIFIED = 64, 4
METHODS = ("auto", "max", "percentile", "entropy", "mse")
BACKENDS = ("tensorrt-rtx", "tensorrt")
LARGEST_RATIO = 4.0


def network(folder: Path) -> Path:
    """``benchmarks/calibration/resnet50.py``: the model and its samples."""
    path = HERE.parent / "calibration" / "resnet50.py"
    spec = importlib.util.spec_from_file_location("resnet50", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.resnet50(folder / "model.onnx")
    module.write_samples(folder / "samples.npz", SAMPLES)
    with np.load(folder / "samples.npz") as arrays:
        np.savez(folder / "few.npz", **{name: arrays[name][:VERIFIED] for name in arrays})
    return folder / "model.onnx"


def trtopt(folder: Path, *arguments: str) -> dict[str, Any]:
    """One command: its report, and the seconds of the process."""
    report = folder / "report.json"
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "trtopt", *arguments, "--report", str(report)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"trtopt {' '.join(arguments)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return {**json.loads(report.read_text()), "process_seconds": time.perf_counter() - started}


def variants(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every calibration method, for both backends; without recipes, so that there is one graph to observe."""
    common = ("--calib", str(folder / "samples.npz"), "--eval", str(folder / "few.npz"))
    common += ("--cache-dir", str(folder / "cache"), "-o", str(folder / "optimized.onnx"))
    common += ("--keep-all-int8", "--recipes", "none")
    for backend in BACKENDS:
        for method in METHODS:
            options = ("--int8", "--calib-method", method, "--backend", backend)
            found = trtopt(folder, "optimize", str(folder / "model.onnx"), *options, *common)
            calibration = found["calibration"]
            yield (
                " ".join(options),
                {
                    "seconds": round(found["process_seconds"], 1),
                    "improve_seconds": round(found["seconds"].get("improve", 0.0), 1),
                    "calibrate_seconds": round(found["seconds"].get("calibrate", 0.0), 2),
                    "statistics_cached": calibration["cached"],
                    "int8_flop_share": found["precision"]["int8_flop_share"],
                    "sqnr_db": next(iter(found["accuracy"]["outputs"].values()))["sqnr_db"],
                    "stages": {name: round(value, 1) for name, value in found["seconds"].items() if value >= 0.5},
                },
            )


def sensitivity(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds of ``trtopt sensitivity`` and of its calibration pass, nothing cached."""
    found = []
    for each in range(rounds):
        fresh = str(folder / f"fresh-{each}")
        common = ("--calib", str(folder / "samples.npz"), "--cache-dir", fresh, "--int8")
        report = trtopt(folder, "sensitivity", str(folder / "model.onnx"), *common)
        seconds = report["seconds"]
        found.append({**seconds, "process": report["process_seconds"], "regions": len(report["regions"])})
        print(f"sensitivity: {json.dumps(found[-1])}", flush=True)
    ratios = [each["sensitivity"] / each["calibrate"] for each in found]
    return {
        "regions": found[0]["regions"],
        "calibrate_seconds": [round(each["calibrate"], 1) for each in found],
        "sensitivity_seconds": [round(each["sensitivity"], 1) for each in found],
        "ratio": round(statistics.median(ratios), 2),
        "met": statistics.median(ratios) < LARGEST_RATIO,
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    heads = "variant, seconds, of them calibrating, improving weights, statistics from the cache, INT8 share of flop"
    yield "| " + f"{heads}, SQNR dB".replace(", ", " | ") + " |"
    yield "|---" * 7 + "|"
    for name, row in found.get("variants", {}).items():
        cells = [
            f"`{name}`",
            f"{row['seconds']:.1f}",
            f"{row['calibrate_seconds']:.2f}",
            f"{row['improve_seconds']:.1f}",
        ]
        cells += ["yes" if row["statistics_cached"] else "no"]
        cells += [f"{row['int8_flop_share']:.0%}", f"{row['sqnr_db']:.1f}" if row["sqnr_db"] is not None else "-"]
        yield "| " + " | ".join(cells) + " |"
    if "sensitivity" not in found:
        return
    row = found["sensitivity"]
    yield ""
    yield (
        f"Sensitivity: {row['regions']} regions, {SAMPLES} samples: {row['sensitivity_seconds']} s against a "
        f"calibration pass of {row['calibrate_seconds']} s, {row['ratio']:g} times (asked: under {LARGEST_RATIO:g}): "
        f"{'met' if row['met'] else 'NOT met'}."
    )


def store(found: Mapping[str, Any]) -> None:
    """Write ``timing.json`` and the README's table."""
    (HERE / "timing.json").write_text(json.dumps(found, indent=2) + "\n")
    readme = HERE / "README.md"
    before, opening, rest = readme.read_text().partition("<!-- timing -->\n")
    _, closing, after = rest.partition("<!-- end of timing -->")
    if not opening or not closing:
        raise SystemExit(f"{readme} has no markers for the table timing")
    readme.write_text(before + opening + "\n".join(lines(found)) + "\n" + closing + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of the sensitivity")
    parser.add_argument("--only", choices=("variants", "sensitivity"), help="the other's figures stay")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    options = parser.parse_args()
    packages = ("trtopt", "numpy", "onnx", "onnxruntime", "tensorrt-rtx")
    versions = {name: metadata.version(name) for name in packages}
    path = HERE / "timing.json"
    found: dict[str, Any] = dict(json.loads(path.read_text())) if path.exists() else {}
    found.update(machine=MACHINE, date=options.date, python=platform.python_version(), versions=versions)
    found["load_average"] = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        network(folder)
        if options.only != "sensitivity":
            found["variants"] = {}
            for variant, row in variants(folder):
                print(f"{variant}: {json.dumps(row)}", flush=True)
                found["variants"][variant] = row
                store(found)
        if options.only != "variants":
            found["sensitivity"] = sensitivity(folder, options.rounds)
            store(found)
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
