"""``trtopt analyze`` as a user runs it: wall time with start-up, CPU time and peak memory of the process.

    python benchmarks/analyze/run.py [--repeats N]

Three models, for an L4: ResNet-50 (random weights), a network of 20 000 nodes, and one with 14 GiB of weights in a
sparse file beside it. Every run is a process of its own; the models take turns, so that the other work of the machine
moves all of them.
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

HERE = Path(__file__).parent
MACHINE = "2-core x86-64, no GPU"
CASES: dict[str, tuple[str, list[str]]] = {
    "ResNet-50": ("resnet50.onnx", []),
    "ResNet-50, --batch-sweep 1..256": ("resnet50.onnx", ["--batch-sweep", "1..256"]),
    "20 000 nodes": ("many.onnx", []),
    "14 GiB of weights": ("large.onnx", []),
}
LIMITS = {"ResNet-50": ("seconds", 0.8), "20 000 nodes": ("seconds", 4.0), "14 GiB of weights": ("peak_rss_gb", 1.074)}
"""What each has to stay below; 1 GiB is 1.074 GB."""


MAKE = """\
import sys
from pathlib import Path
sys.path.append(sys.argv[2])
from models import large_weights, many_nodes
from resnet50 import resnet50
folder = Path(sys.argv[1])
resnet50(folder / "resnet50.onnx")
many_nodes(folder / "many.onnx")
large_weights(folder / "large.onnx")
"""
"""Run by another process: a child's peak memory begins at that of the process that started it."""


def analyze(folder: Path, model: str, options: list[str]) -> dict[str, float]:
    """One run: what it took. Python keeps the bytecode of its modules, as an installation does (0.18 s of CPU time)."""
    command = [sys.executable, "-m", "trtopt", "analyze", str(folder / model), "--gpu", "L4", *options]
    with tempfile.TemporaryFile("w+") as errors:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{errors.read()[-2000:]}")
    return {
        "seconds": seconds,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_rss_gb": usage.ru_maxrss * 1024 / 1e9,
    }


def summary(runs: list[dict[str, float]]) -> dict[str, float]:
    """Medians, and the fastest run."""
    found = {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
    return {**found, "fastest_seconds": round(min(run["seconds"] for run in runs), 3)}


def table(results: dict[str, dict[str, float]]) -> list[str]:
    """The table of the README."""
    lines = ["| | seconds | fastest | CPU seconds | peak memory, GB | limit |", "|---|---|---|---|---|---|"]
    for case, found in results.items():
        key, limit = LIMITS.get(case, ("", 0.0))
        shown = {"seconds": f"{limit:g} s", "peak_rss_gb": f"{limit:.3f} GB"}.get(key, "")
        figures = (found["seconds"], found["fastest_seconds"], found["cpu_seconds"], found["peak_rss_gb"])
        lines.append(f"| {case} | {' | '.join(f'{figure:.2f}' for figure in figures)} | {shown} |")
    return lines


def write_table(readme: Path, lines: list[str]) -> None:
    """Replace the table in the README."""
    opening, closing = "<!-- table -->\n", "<!-- end of table -->"
    before, found, rest = readme.read_text().partition(opening)
    _, end, after = rest.partition(closing)
    if not found or not end:
        raise SystemExit(f"{readme} has no markers for the table")
    readme.write_text(before + opening + "\n".join(lines) + "\n" + closing + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make = [sys.executable, "-c", MAKE, str(folder), str(HERE.parent / "calibration")]
        subprocess.run(make, cwd=HERE, check=True)
        load = [os.getloadavg()[0]]
        runs: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
        for repeat in range(options.repeats + 1):
            for case, (model, arguments) in CASES.items():
                found = analyze(folder, model, arguments)
                if repeat:  # the first round fills the caches of the system
                    runs[case].append(found)
                print(case, {key: round(value, 3) for key, value in found.items()}, flush=True)
        load.append(os.getloadavg()[0])
    results: dict[str, Any] = {
        "machine": MACHINE,
        "date": options.date,
        "python": platform.python_version(),
        "versions": {item: metadata.version(item) for item in ("trtopt", "numpy", "onnx", "onnx_ir", "rich")},
        "repeats": options.repeats,
        "load_average_before_and_after": [round(value, 1) for value in load],
        "cases": {case: summary(found) for case, found in runs.items()},
    }
    (HERE / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    lines = table(results["cases"])
    print("\n".join(lines))
    write_table(HERE / "README.md", lines)
    over = [case for case, (key, limit) in LIMITS.items() if results["cases"][case][key] > limit]
    if over:
        raise SystemExit(f"above the limit: {', '.join(over)}")


if __name__ == "__main__":
    main()
