"""Ten INT8 variants of ResNet-50 from one pass of statistics, and its sensitivity against one calibration pass.

    python benchmarks/precision/timing.py [--rounds N] [--jobs N] [--only variants|sensitivity]

ResNet-50 with random weights, batch 1, 64 samples. Each variant is a ``trtopt optimize --int8`` of its own: five
calibration methods, for two backends, whose placement and scales (one or one per channel) differ. The first makes the
calibration pass and leaves its statistics in the cache, where the others find them. Each is verified on four samples.
numpy's products take one thread: on cores that others use, its threads wait for each other longer than they compute.

``trtopt sensitivity`` has 53 convolutions and the classifier to measure; its time is divided by that of the calibration
pass of the same process.
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
from concurrent.futures import ThreadPoolExecutor
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
    """One command: its report, and the seconds of the process, of the clock and of the cores."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        report, output = Path(own) / "report.json", Path(own) / "output"
        command = [sys.executable, "-m", "trtopt", *arguments, "--report", str(report)]
        command += ["-o", str(output.with_suffix(".onnx"))] if arguments[0] == "optimize" else []
        started = time.perf_counter()
        with output.open("w+") as log:
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: exit {process.returncode}\n{output.read_text()[-2000:]}")
        seconds = {"process_seconds": time.perf_counter() - started, "cpu_seconds": usage.ru_utime + usage.ru_stime}
        return {**json.loads(report.read_text()), **seconds}


def variants(folder: Path, jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every calibration method, for both backends; without recipes, so that there is one graph to observe."""
    choices = [("--backend", backend, "--calib-method", method) for backend in BACKENDS for method in METHODS]
    yield _variant(folder, choices[0])
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda choice: _variant(folder, choice), choices[1:])


def _variant(folder: Path, choice: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    files = (
        "--calib",
        str(folder / "samples.npz"),
        "--eval",
        str(folder / "few.npz"),
        "--cache-dir",
        str(folder / "cache"),
    )
    common = ("--int8", "--keep-all-int8", "--recipes", "none")
    found = trtopt(folder, "optimize", str(folder / "model.onnx"), *common, *choice, *files)
    row = {
        "seconds": round(found["process_seconds"], 1),
        "cpu_seconds": round(found["cpu_seconds"], 1),
        "improve_seconds": round(found["seconds"].get("improve", 0.0), 1),
        "pass_seconds": round(found["calibration"]["seconds"], 1),
        "statistics_cached": found["calibration"]["cached"],
        "int8_flop_share": found["precision"]["int8_flop_share"],
        "sqnr_db": next(iter(found["accuracy"]["outputs"].values()))["sqnr_db"],
        "stages": {name: round(value, 1) for name, value in found["seconds"].items() if value >= 0.5},
    }
    print(f"{' '.join(choice)}: {json.dumps(row)}", flush=True)
    return " ".join(choice), row


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
    rows = found.get("variants", {})
    heads = ("variant", "seconds", "of the cores", "calibration pass", "improving the numbers", "INT8 share of flop")
    yield f"| {' | '.join(heads)} | SQNR dB |"
    yield "|---" * (len(heads) + 1) + "|"
    for name, row in rows.items():
        made = "from the cache" if row["statistics_cached"] else f"{row['pass_seconds']:.1f}"
        sqnr = f"{row['sqnr_db']:.1f}" if row["sqnr_db"] is not None else "-"
        cells = [
            f"`{name}`",
            f"{row['seconds']:.1f}",
            f"{row['cpu_seconds']:.1f}",
            made,
            f"{row['improve_seconds']:.1f}",
        ]
        yield f"| {' | '.join(cells)} | {row['int8_flop_share']:.0%} | {sqnr} |"
    if rows:
        passes = [row["pass_seconds"] for row in rows.values() if not row["statistics_cached"]]
        cores = [row["cpu_seconds"] for row in rows.values()]
        yield ""
        yield (
            f"{len(rows)} variants, {len(passes)} calibration pass of {SAMPLES} samples ({sum(passes):.1f} s): "
            f"{found['variants_seconds']:.0f} s in all, {found['jobs']} at a time, {sum(cores):.0f} s of the cores "
            f"({found['machine']}, load average {found['load_average']:g} at the start)."
        )
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
    parser.add_argument("--jobs", type=int, default=1, help="variants at a time, once the first has made its pass")
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
            started = time.perf_counter()
            found.update(variants={}, jobs=options.jobs)
            for variant, row in variants(folder, options.jobs):
                found["variants"][variant] = row
                found["variants_seconds"] = round(time.perf_counter() - started, 1)
                store(found)
        if options.only != "variants":
            found["sensitivity"] = sensitivity(folder, options.rounds)
            store(found)
    print("\n".join(lines(found)))


if __name__ == "__main__":
    main()
