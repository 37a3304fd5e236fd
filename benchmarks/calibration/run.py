"""Calibration of ResNet-50 with the entropy method: trtopt, ONNX Runtime's quantizer and Model Optimizer.

    python benchmarks/calibration/run.py [--peers] [--rounds N]

Every measurement is a process of its own. The time of each is divided by that of bare ONNX Runtime inference of the
same samples (a session made from the file, then each sample once) measured before and after it, and the median of
these ratios is reported: the machine's other work moves both. ``ratio_to_runs_alone`` leaves out the making of the
bare session, but not of ours.
``--peers`` installs the peers into virtual environments of their own under ``~/.cache/trtopt-benchmarks``.
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
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from trtopt.support.precision import Precision

HERE = Path(__file__).parent
SAMPLES = 64
MANY_SAMPLES = 256
MACHINE = "2-core x86-64, no GPU"
METHOD = "entropy"
PEERS = {
    "onnxruntime": [["onnxruntime==1.31.1", "onnx==1.23.2", "sympy"]],
    # First what its CPU path needs, in the versions it asks for, then itself without its dependencies (CUDA packages).
    "modelopt": [
        ["torch==2.13.0", "onnx~=1.21.0", "onnxruntime~=1.24.2", "onnx-graphsurgeon", "onnxconverter-common~=1.16.0"],
        ["onnxslim", "onnxscript", "polygraphy", "cppimport", "lief", "ml_dtypes", "scipy", "omegaconf", "pydantic"],
        ["regex", "rich", "safetensors", "tqdm", "PyYAML", "pulp<4", "ninja", "nvidia-ml-py", "setuptools>=80"],
        ["--no-deps", "nvidia-modelopt==0.47.0"],
    ],
}

Work = Callable[[], dict[str, Any]]


def bare(model: Path, samples: Path) -> Work:
    """Inference alone: a session, and every sample once."""
    import numpy as np
    import onnxruntime

    images = np.load(samples)["input"]

    def work() -> dict[str, Any]:
        session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
        started = time.perf_counter()
        for index in range(len(images)):
            session.run(None, {"input": images[index : index + 1]})
        return {"run_seconds": time.perf_counter() - started}

    return work


def trtopt(model: Path, samples: Path, *, ranges_too: bool) -> Work:
    """Everything from the two files to the INT8 ranges, the session included.

    ``ranges_too``: also what ``trtopt build --int8`` observes for FP16; else the histograms only.
    """
    import onnx_ir as ir
    import onnxruntime  # noqa: F401 - imported here, so that no import is timed

    from trtopt.graph.artifact import input_spec
    from trtopt.precision.decide import wanted_tensors
    from trtopt.precision.observe.calibrate import collect
    from trtopt.precision.observe.ranges import choose_amax
    from trtopt.precision.observe.samples import open_samples

    def work() -> dict[str, Any]:
        graph = ir.load(model)
        wanted = wanted_tensors(graph, Precision.INT8, "tensorrt-rtx")
        source = open_samples(samples, [input_spec(value) for value in graph.graph.inputs])
        found = collect(graph, source, histogram=wanted.histogram, ranges=wanted.ranges if ranges_too else ())
        for name in wanted.histogram:
            choose_amax(found.table.stats[name], METHOD)
        counts = [stats.count for stats in found.table.stats.values()]
        return {"tensors": len(counts), "elements_per_sample": sum(counts) // found.samples, "samples": found.samples}

    return work


def onnxruntime_quantizer(model: Path, samples: Path) -> Work:
    """ONNX Runtime's entropy calibrator over Conv and Gemm, as its quantize_static runs it."""
    import numpy as np
    from onnxruntime.quantization.calibrate import CalibrationDataReader, CalibrationMethod, create_calibrator

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            images = np.load(samples)["input"]
            self._feeds = iter([{"input": images[index : index + 1]} for index in range(len(images))])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self._feeds, None)

    def work() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            augmented = str(Path(folder) / "augmented.onnx")
            calibrator = create_calibrator(
                model, ["Conv", "Gemm"], augmented_model_path=augmented, calibrate_method=CalibrationMethod.Entropy
            )
            calibrator.collect_data(Reader())
            return {"tensors": len(calibrator.compute_data().data)}

    return work


def modelopt(model: Path, samples: Path) -> Work:
    """Model Optimizer's INT8 entropy quantization; the time includes its placement and the writing of the model."""
    import numpy as np
    from modelopt.onnx.quantization import quantize

    def work() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            quantize(
                str(model),
                quantize_mode="int8",
                calibration_data={"input": np.load(samples)["input"]},
                calibration_method=METHOD,
                calibration_eps=["cpu"],
                output_path=str(Path(folder) / "quantized.onnx"),
            )
        return {}

    return work


WORKERS: dict[str, Callable[[Path, Path], Work]] = {
    "bare": bare,
    "trtopt": lambda model, samples: trtopt(model, samples, ranges_too=True),
    "trtopt, histograms only": lambda model, samples: trtopt(model, samples, ranges_too=False),
    "onnxruntime": onnxruntime_quantizer,
    "modelopt": modelopt,
}


def worker(kind: str, model: Path, samples: Path) -> dict[str, Any]:
    """One measurement, in this process."""
    work = WORKERS[kind](model, samples)
    before = os.times()
    started = time.perf_counter()
    details = work()
    seconds = time.perf_counter() - started
    after = os.times()
    status = Path("/proc/self/status").read_text()
    peak = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) * 1024
    cpu = after.user + after.system - before.user - before.system
    return {"seconds": seconds, "cpu_seconds": cpu, "peak_rss_bytes": peak, **details}


def measure(kind: str, model: Path, samples: Path, python: str = sys.executable) -> dict[str, Any]:
    """One measurement, in a process of its own."""
    command = [python, str(HERE / "run.py"), "--worker", kind, str(model), str(samples)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{kind} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def paired(kind: str, model: Path, samples: Path, rounds: int, python: str = sys.executable) -> dict[str, Any]:
    """The median ratio to bare inference over ``rounds``, each with bare inference before and after it."""
    runs, bares = [], []
    for _ in range(rounds):
        before = measure("bare", model, samples)
        runs.append(measure(kind, model, samples, python))
        after = measure("bare", model, samples)
        bares.append({key: (before[key] + after[key]) / 2 for key in before})

    def ratio(key: str, to: str) -> float:
        return round(statistics.median(run[key] / one[to] for run, one in zip(runs, bares, strict=True)), 2)

    return {
        "ratio": ratio("seconds", "seconds"),
        "ratio_to_runs_alone": ratio("seconds", "run_seconds"),
        "cpu_ratio": ratio("cpu_seconds", "cpu_seconds"),
        "seconds": round(statistics.median(run["seconds"] for run in runs), 2),
        "bare_seconds": round(statistics.median(one["seconds"] for one in bares), 2),
        "peak_rss_gb": round(max(run["peak_rss_bytes"] for run in runs) / 1e9, 2),
        "rounds": rounds,
        **{key: runs[0][key] for key in ("tensors", "elements_per_sample") if key in runs[0]},
    }


def install(name: str) -> str:
    """The Python of a peer's own virtual environment."""
    folder = Path.home() / ".cache" / "trtopt-benchmarks" / name
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        for packages in PEERS[name]:
            subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        (folder / "complete").touch()
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="measure the peers too (minutes, 8 GB of memory)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--worker", nargs=3, metavar=("KIND", "MODEL", "SAMPLES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        kind, model, samples = options.worker
        print(json.dumps(worker(kind, Path(model), Path(samples))))
        return
    with tempfile.TemporaryDirectory() as folder:
        model, samples, many = (Path(folder) / name for name in ("model.onnx", "samples.npz", "many.npz"))
        make = f"from resnet50 import *; from pathlib import Path; resnet50(Path({str(model)!r}));"
        make += "".join(f"write_samples(Path({str(p)!r}), {n});" for p, n in ((samples, SAMPLES), (many, MANY_SAMPLES)))
        subprocess.run([sys.executable, "-c", make], cwd=HERE, check=True)
        results: dict[str, Any] = {"machine": MACHINE, "date": options.date, "python": platform.python_version()}
        results["versions"] = {name: metadata.version(name) for name in ("numpy", "onnxruntime", "onnx_ir")}
        results["samples"] = SAMPLES
        results["load_average_at_start"] = round(os.getloadavg()[0], 1)
        for kind in ("trtopt", "trtopt, histograms only"):
            results[kind] = paired(kind, model, samples, options.rounds)
            of_many = measure(kind, model, many)
            results[kind][f"peak_rss_gb_at_{MANY_SAMPLES}"] = round(of_many["peak_rss_bytes"] / 1e9, 2)
            print(kind, results[kind], flush=True)
        for peer in PEERS if options.peers else ():
            try:
                results[peer] = paired(peer, model, samples, 1, install(peer))
            except (RuntimeError, subprocess.CalledProcessError) as error:
                results[peer] = {"not measured": str(error)[-500:]}
            print(peer, results[peer], flush=True)
    (HERE / "results.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
