"""``trtopt build --fp16`` of ResNet-50 end to end, as a user runs it, and where the time goes.

    python benchmarks/build/run.py [--repeats N]

ResNet-50 with random weights, one input [1, 3, 224, 224], eight samples. Every run is a process of its own: imports,
verification on all samples, and the compiler's process included. The runs of the cases take turns, so that the
machine's other work moves all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SAMPLES = 8
MACHINE = "2-core x86-64, no GPU"
CASES = ("no samples", "8 samples, calibration cache cold", "8 samples, calibration cache warm")
POLL_SECONDS = 0.01


def resident_bytes(pid: int) -> int:
    """Memory of a process and its descendants at this moment; shared pages count in each."""
    total = 0
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has just ended
        return 0
    for line in status.splitlines():
        if line.startswith("VmRSS:"):
            total = int(line.split()[1]) * 1024
    return total + sum(resident_bytes(int(child)) for child in children)


@dataclass(frozen=True)
class Cost:
    """Wall and CPU seconds of a command with its children, and the peak of their memory, seen every 10 ms."""

    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int


def run(command: list[str]) -> Cost:
    """Run a command and see what it costs."""
    peak = 0
    with tempfile.TemporaryFile("w+") as errors:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        while not ended:
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(POLL_SECONDS)
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{errors.read()[-2000:]}")
    return Cost(seconds, usage.ru_utime + usage.ru_stime, peak)


def build(case: str, folder: Path) -> dict[str, Any]:
    """One ``trtopt build``: wall time, peak memory, and the stages of its report."""
    report, cache = folder / "report.json", folder / "cache"
    command = [sys.executable, "-m", "trtopt", "build", str(folder / "model.onnx"), "--fp16"]
    command += ["-o", str(folder / "model.rtx.engine"), "--report", str(report), "--cache-dir", str(cache)]
    if "samples," in case:
        command += ["--calib", str(folder / "samples.npz")]
    if "warm" not in case:
        shutil.rmtree(cache, ignore_errors=True)
    cost = run(command)
    found = json.loads(report.read_text())
    stages = dict(found["seconds"])
    rest = cost.seconds - sum(stages.values())
    stages["Python, imports, report"] = rest
    compiler = found["engine"]["build_seconds"]
    return {**asdict(cost), "stages": stages, "compiler_seconds": compiler}


def bare(model: Path, samples: Path) -> float:
    """Seconds of one bare ONNX Runtime inference of the same model: what every sample costs at the least."""
    script = (
        "import sys, time, numpy as np, onnxruntime as ort\n"
        "session = ort.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])\n"
        "images = np.load(sys.argv[2])['input']\n"
        "started = time.perf_counter()\n"
        "[session.run(None, {'input': images[i : i + 1]}) for i in range(len(images))]\n"
        "print((time.perf_counter() - started) / len(images))\n"
    )
    command = [sys.executable, "-c", script, str(model), str(samples)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs of one case; the peak is the largest seen."""
    stages = {name: [one["stages"].get(name, 0.0) for one in runs] for name in runs[0]["stages"]}
    return {
        "seconds": round(statistics.median(one["seconds"] for one in runs), 2),
        "fastest_seconds": round(min(one["seconds"] for one in runs), 2),
        "cpu_seconds": round(statistics.median(one["cpu_seconds"] for one in runs), 2),
        "slowest_seconds": round(max(one["seconds"] for one in runs), 2),
        "peak_rss_gb": round(max(one["peak_rss_bytes"] for one in runs) / 1e9, 2),
        "stages": {name: round(statistics.median(values), 3) for name, values in stages.items()},
        "compiler_seconds": round(statistics.median(one["compiler_seconds"] for one in runs), 3),
    }


def table(results: dict[str, Any]) -> list[str]:
    """Medians in seconds: one row for the whole, one for each stage."""
    rows = {"the whole run": [results[case]["seconds"] for case in CASES]}
    rows["fastest run"] = [results[case]["fastest_seconds"] for case in CASES]
    rows["CPU time of all processes"] = [results[case]["cpu_seconds"] for case in CASES]
    for stage in results[CASES[1]]["stages"]:
        rows[stage] = [results[case]["stages"].get(stage, 0.0) for case in CASES]
    rows["of `build engine`: the compiler and its import"] = [results[case]["compiler_seconds"] for case in CASES]
    lines = ["| seconds | " + " | ".join(CASES) + " |", "|---" * (len(CASES) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(f"{value:.2f}" for value in values) + " |" for name, values in rows.items()]
    return [*lines, "| peak memory, GB | " + " | ".join(f"{results[case]['peak_rss_gb']:.2f}" for case in CASES) + " |"]


def write_table(readme: Path, lines: list[str]) -> None:
    """Put the table between the README's markers."""
    before, opening, rest = readme.read_text().partition("<!-- table -->\n")
    _, closing, after = rest.partition("<!-- end of table -->")
    if not opening or not closing:
        raise SystemExit(f"{readme} has no markers for the table")
    readme.write_text(before + opening + "\n".join(lines) + "\n" + closing + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, samples = folder / "model.onnx", folder / "samples.npz"
        make = "import sys; from pathlib import Path; from resnet50 import *; "
        make += f"resnet50(Path(sys.argv[1])); write_samples(Path(sys.argv[2]), {SAMPLES})"
        calibration = HERE.parent / "calibration"
        subprocess.run([sys.executable, "-c", make, str(model), str(samples)], cwd=calibration, check=True)
        run([sys.executable, "-m", "trtopt", "build", str(model), "--fp16", "--cache-dir", str(folder / "first")])
        load = [os.getloadavg()[0]]
        runs: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
        inference = []
        for _ in range(options.repeats):
            for case in CASES:  # the warm case uses what the cold one before it has stored
                runs[case].append(build(case, folder))
                print(case, runs[case][-1], flush=True)
            inference.append(bare(model, samples))
        load.append(os.getloadavg()[0])
    versions = {item: metadata.version(item) for item in ("trtopt", "numpy", "onnx", "onnxruntime", "tensorrt-rtx")}
    results = {
        "machine": MACHINE,
        "date": options.date,
        "python": platform.python_version(),
        "versions": versions,
        "repeats": options.repeats,
        "load_average_before_and_after": [round(value, 1) for value in load],
        "bare_inference_seconds_per_sample": round(statistics.median(inference), 4),
        **{case: summary(found) for case, found in runs.items()},
    }
    (HERE / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print("\n".join(table(results)))
    write_table(HERE / "README.md", table(results))


if __name__ == "__main__":
    main()
